"""Fitting edge scorers: traces of the target under drafted trees, the towers' training, and what they are worth."""
