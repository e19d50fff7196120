"""Drafting with a small head for each of the next places."""
