"""Trees from drafters that say in one pass what stands at each of the next places."""

from treegraft_plugins.blocktree.best_first import PrefixTree, best_first, scored_edges

__all__ = ["PrefixTree", "best_first", "scored_edges"]
