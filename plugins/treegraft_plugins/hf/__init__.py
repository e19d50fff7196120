"""The only files that import transformers."""
