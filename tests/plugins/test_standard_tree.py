"""The trees that whole pipelines grow: the endpoints' are the standard one, and the shared one only grows."""

import numpy as np
import pytest
from bare_parts import request
from hypothesis import given, settings
from hypothesis import strategies as st

import treegraft
from treegraft.interfaces import RoundRecord, Wants
from treegraft.testing import MarkovTarget, TableDrafter
from treegraft.testing.strategies import markov_tables, pipelines
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.drafters.ngram import NGramDrafter

PROMPT = [0, 1, 2, 0, 1, 1, 2]
EXACT = ("costs={use: fixed}", "calibration=off")
Path = tuple[int, ...]


def paths(tree: DraftTree) -> dict[Path, float]:
    """Path scores by path, in the order of rows."""
    return {tuple(tree.token[tree.path(row)[1:]].tolist()): score for row, score in enumerate(tree.path_score.tolist())}


def chain(root: int, path: Path) -> DraftTree:
    """A tree that is one path."""
    tree = DraftTree.rooted(root)
    return tree.append(Expansion([0, *range(-1, -len(path), -1)][: len(path)], path, np.zeros(len(path))), 0, [True])


def standard_tree(drafter, committed: list[int], steps: int, width: int, branching: int, max_depth: int):
    """{path: score} of the standard tree: at every step the `width` best of the newest nodes get their children.

    A drafter that finds nothing there has the rest of the newest nodes to try next, and then any leaf.
    """
    tree, newest, expanded = {(): 0.0}, [()], set()
    for _ in range(steps):
        open_paths = [path for path in tree if path not in expanded and len(path) < max_depth]
        pool = [path for path in open_paths if path in newest]
        pool = pool or [path for path in open_paths if not any(other[:-1] == path for other in tree if other)]
        best = sorted(pool, key=lambda path: (-tree[path], len(path)))[:width]
        created = []
        for path in best:
            asked = request(committed, chain(committed[-1], path), [len(path)], branching, max_depth=max_depth)
            expansion = drafter.draft(asked)
            for token, log_prob in zip(expansion.token.tolist(), expansion.log_prob.tolist(), strict=True):
                created.append((*path, token))
                tree[(*path, token)] = tree[path] + log_prob
        expanded.update(best)
        newest = created or newest
    return tree


def best_paths(scores: dict[Path, float], num_nodes: int) -> list[Path]:
    order = sorted(scores, key=lambda path: (-scores[path], len(path)))  # stable: then in the order of rows
    return order[: num_nodes + 1]


def rounds_of(pipeline: treegraft.Pipeline, num_tokens: int) -> list[tuple[list[int], RoundRecord]]:
    """Each round with the tokens that were committed before it."""
    committed, rounds = list(PROMPT), []
    for record in pipeline.rounds(PROMPT, num_tokens):
        rounds.append((list(committed), record))
        committed += record.tokens
    return rounds


@pytest.mark.parametrize("name", ["all_small", "all_middle"])
@settings(max_examples=25, deadline=None)
@given(
    table=markov_tables(), other=markov_tables(), steps=st.integers(1, 3), width=st.integers(1, 3),
    branching=st.integers(1, 3), verify_nodes=st.integers(1, 12),
)  # fmt: skip
def test_the_endpoints_grow_the_standard_tree(name, table, other, steps, width, branching, verify_nodes):
    num_tokens, source = 4, name.removeprefix("all_")
    sizes = [f"steps={steps}", f"sources.{source}.width={width}", f"sources.{source}.branching={branching}"]
    one_token = ["sources.small.draft.chain_factor=0"] if source == "small" else []
    budget = f"budget={{use: fixed, verify_nodes: {verify_nodes}}}"
    models = {"target": MarkovTarget(table), "middle": TableDrafter(other)}
    pipeline = treegraft.load(name, *EXACT, budget, *sizes, *one_token, models=models)
    for committed, record in rounds_of(pipeline, num_tokens):
        drafter = TableDrafter(other)
        if source == "small":
            drafter = NGramDrafter(chain_factor=0)
            drafter.start(MarkovTarget(table).prefill([np.array(committed)], Wants(num_top=10))[0])
        max_depth = num_tokens - (len(committed) - len(PROMPT)) - 1
        expected = standard_tree(drafter, committed, steps, width, branching, max_depth)
        assert paths(record.state.tree) == pytest.approx(expected)
        assert len(record.pruned) == min(verify_nodes + 1, len(expected))
        if len(set(expected.values())) == len(expected):  # without ties, whose order rounding may turn
            assert set(paths(record.pruned)) == set(best_paths(expected, verify_nodes))


def test_the_endpoints_tree_is_full_at_the_registrys_sizes():
    """410 nodes: 10 below the root, 100 in each later step."""
    table = np.random.default_rng(0).normal(size=(20, 20, 20))
    models = {"target": MarkovTarget(table), "middle": TableDrafter(table)}
    pipeline = treegraft.load("all_middle", *EXACT, "budget={use: fixed, verify_nodes: 63}", models=models)
    _, record = rounds_of(pipeline, 12)[0]
    assert len(record.state.tree) - 1 == 410 and len(record.pruned) - 1 == 63


@settings(max_examples=50, deadline=None)
@given(pipelines())
def test_shared_trees_keep_their_rules_and_grow_where_nothing_is_destroyed(pipeline):
    policies = {source.name: source.graft_policy for source in pipeline.sources}
    for _, record in rounds_of(pipeline, 4):
        for step in record.state.steps:
            step.tree.check()
            if policies[step.source].keeps_existing:
                assert set(paths(step.tree_before)) <= set(paths(step.tree))
        record.pruned.check()
        scores = paths(record.state.tree)
        assert list(paths(record.pruned)) == [p for p in scores if p in set(best_paths(scores, record.budget))]
