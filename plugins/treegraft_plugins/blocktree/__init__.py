"""Trees from drafters that say in one pass what stands at each of the next places."""

from treegraft_plugins.blocktree.best_first import PrefixTree, best_first, scored_edges
from treegraft_plugins.blocktree.drafting import SHAPES, Top, asks_for_root, drafted, drawn_chain

__all__ = ["SHAPES", "PrefixTree", "Top", "asks_for_root", "best_first", "drafted", "drawn_chain", "scored_edges"]
