"""Training of drafters that read the target's hidden states: the text, the loop, the held-out measure."""
