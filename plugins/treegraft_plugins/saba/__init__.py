"""State-aware budgets: how many nodes are worth verifying, by a fitted model of what more of them bring."""

from treegraft_plugins.saba.budget import SABABudget

__all__ = ["SABABudget"]
