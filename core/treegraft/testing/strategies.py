"""Hypothesis strategies: valid trees, expansions and tables of logits, and whole pipelines over toy models."""

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("treegraft.testing.strategies needs hypothesis: pip install 'treegraft[testing]'") from error

import numpy as np

from treegraft.tree import DraftTree, Expansion, Floats

# Few distinct values, so that ties and certain tokens are common, beside any other.
LOG_PROBS = st.sampled_from([0.0, -0.5, -1.0]) | st.floats(-8.0, 0.0, allow_subnormal=False)
LOGITS = st.sampled_from([0.0, 1.0, -2.0]) | st.floats(-4.0, 4.0, allow_subnormal=False)


@st.composite
def expansions(draw: st.DrawFn, tree: DraftTree, vocab_size: int = 3, max_size: int = 8) -> Expansion:
    """Valid expansions of `tree`: anchored to its rows and to earlier proposals, siblings distinct.

    Proposals may repeat paths that the tree holds, and paths of each other by another anchor.
    """
    proposals: dict[tuple[int, int], float] = {}
    for size in range(draw(st.integers(0, max_size))):
        key = draw(st.tuples(st.integers(-size, len(tree) - 1), st.integers(0, vocab_size - 1)))
        if key in proposals or key[0] < -len(proposals):
            continue
        proposals[key] = draw(LOG_PROBS)
    return Expansion(
        anchor=[anchor for anchor, _ in proposals],
        token=[token for _, token in proposals],
        log_prob=list(proposals.values()),
    )


@st.composite
def draft_trees(draw: st.DrawFn, vocab_size: int = 3, max_steps: int = 3, num_sources: int = 2) -> DraftTree:
    """Valid trees: grown by several sources in turns, rescored and pruned, from the root alone upwards.

    Source s overrules the scores of those before it.
    """
    tree = DraftTree.rooted(draw(st.integers(0, vocab_size - 1)))
    for _ in range(draw(st.integers(0, max_steps))):
        source = draw(st.integers(0, num_sources - 1))
        overrules = [scorer <= source for scorer in range(num_sources)]
        rows = st.lists(st.integers(0, len(tree) - 1), unique=True, max_size=4)
        if draw(st.booleans()):
            rescored = draw(rows)
            log_prob = draw(st.lists(LOG_PROBS, min_size=len(rescored), max_size=len(rescored)))
            tree = tree.rescored(np.array(rescored, np.int64), np.array(log_prob), source, overrules)
        tree = tree.mark(np.array(draw(rows), np.int64), source)
        tree = tree.append(draw(expansions(tree, vocab_size)), source, overrules)
        if draw(st.booleans()):
            kept = np.zeros(len(tree), np.bool_)
            kept[tree.ranked()[: draw(st.integers(1, len(tree)))]] = True
            tree = tree.keep(kept)
    return tree


@st.composite
def markov_tables(draw: st.DrawFn, vocab_size: int = 3, order: int = 2) -> Floats:
    """Logits [V] * order + [V] of a `MarkovTarget`; ties are common, and some tokens are ruled out by -inf."""
    size = vocab_size ** (order + 1)
    table = np.array(draw(st.lists(LOGITS, min_size=size, max_size=size))).reshape((vocab_size,) * (order + 1))
    for row in table.reshape(-1, vocab_size):
        if draw(st.integers(0, 5)) == 0:
            row[draw(st.integers(0, vocab_size - 1))] = -np.inf
    return table
