"""Hypothesis strategies: valid trees, expansions and tables of logits, and whole pipelines over toy models."""

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("treegraft.testing.strategies needs hypothesis: pip install 'treegraft[testing]'") from error

import numpy as np

from treegraft.compose import load
from treegraft.pipeline import Pipeline
from treegraft.testing.drafters import TableDrafter
from treegraft.testing.models import MarkovTarget
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


@st.composite
def pipelines(draw: st.DrawFn, pipeline: str = "neural_small", target: MarkovTarget | None = None) -> Pipeline:
    """Pipelines with any fixed schedule, whose sources `small` and `middle` differ from the registry's in all else.

    Selectors, graft policies, widths, branching, ranks, rescoring, steps and budget are drawn; costs are fixed. Every
    schedule begins with a source and every budget lets a node through. The models are toys: `Pipeline.target` is a
    `MarkovTarget`, and each drafter that takes a model reads a table, in half of the cases the target's own.

    Args:
        draw: Hypothesis's.
        pipeline: of the registry, with sources `small` and `middle`, the latter on a model.
        target: None draws one over three tokens.
    """
    if target is None:
        target = MarkovTarget(draw(markov_tables()))
    names = st.sampled_from(["small", "middle"])
    pattern = [draw(names), *draw(st.lists(names | st.just("null"), max_size=3))]
    policies, selectors = st.sampled_from(["non_destructive", "overwrite"]), st.sampled_from(["newest", "unvisited"])
    overrides = [
        f"steps={draw(st.integers(1, 4))}",
        f"scheduler={{use: fixed, pattern: [{', '.join(pattern)}]}}",
        f"budget={{use: fixed, verify_nodes: {draw(st.integers(1, 12))}}}",
        "costs={use: fixed}",
        f"sources.middle.rescore={str(draw(st.booleans())).lower()}",
        f"calibration={draw(st.sampled_from(['on', 'off']))}",
    ]
    for source in ("small", "middle"):
        overrides += [
            f"sources.{source}.graft={{use: {draw(policies)}}}",
            f"sources.{source}.select={{use: {draw(selectors)}}}",
            f"sources.{source}.width={draw(st.integers(1, 3))}",
            f"sources.{source}.branching={draw(st.integers(1, 3))}",
            f"sources.{source}.rank={draw(st.integers(0, 1))}",
        ]
    tables = st.just(target.table) | markov_tables(target.vocab_size)
    drafters = {name: TableDrafter(draw(tables)) for name in ("small", "middle")}
    return load(pipeline, *overrides, models={"target": target, **drafters})
