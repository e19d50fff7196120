"""Block-diffusion drafting: a block of tokens from one pass over the target's own hidden states."""
