"""Scheduler `opt_tree`: drafts on exactly as long as steps raise the expected accepted length by enough; C1, C2."""

import itertools

import attrs
import numpy as np
import pytest
from bare_parts import bare_setting, bare_state
from hypothesis import given
from hypothesis import strategies as st

import treegraft
from treegraft.errors import ComposeError
from treegraft.interfaces import Limits, RoundState, StepRecord
from treegraft.testing import MarkovTarget, TableDrafter, markov_table
from treegraft.testing.strategies import draft_trees, expansions
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.schedulers.opt_tree import OptTreeScheduler, expected_accepted

THRESHOLDS = st.sampled_from([0, 0.05, 0.2, 1.0]) | st.floats(0.0, 3.0)


def after(before: DraftTree, tree: DraftTree, verify_nodes: int = 63, num_earlier: int = 0) -> RoundState:
    """A state whose last step made `tree` of `before`."""
    nothing = np.zeros(0, np.int64)
    step = StepRecord("middle", before, tree, nothing, Expansion.empty(), nothing, num_rows=1, latency_ms=0.0)
    state = bare_state(num_earlier, tree)
    return attrs.evolve(state, limits=Limits(5, verify_nodes, 100), steps=(*state.steps, step))


def best_subtree(tree: DraftTree, num_nodes: int) -> float:
    """The most tokens that any subtree of at most `num_nodes` non-root nodes can be expected to accept: all are tried.

    A subtree's expectation, for a text whose next token below each node is drawn as the edge scores say: the sum over
    its nodes of the probability that the text runs through them.
    """
    reached = [1.0]
    for row in range(1, len(tree)):
        reached.append(reached[tree.parent[row]] * float(np.exp(tree.edge_score[row])))
    return max(
        sum(reached[row] for row in rows)
        for size in range(min(num_nodes, len(tree) - 1) + 1)
        for rows in itertools.combinations(range(1, len(tree)), size)
        if all(tree.parent[row] in (0, *rows) for row in rows)
    )


@given(draft_trees(max_steps=1), st.integers(0, 5))
def test_the_expected_accepted_length_is_that_of_the_best_subtree(tree, num_nodes):
    assert expected_accepted(tree, num_nodes) == pytest.approx(best_subtree(tree, num_nodes))


@given(st.data(), draft_trees(max_steps=1), st.integers(0, 5), THRESHOLDS)
def test_c1_c2_it_goes_on_while_the_last_step_raised_it_by_more_than_the_threshold(data, before, budget, threshold):
    tree = before.mark(np.zeros(1, np.int64), 0).append(data.draw(expansions(before, max_size=4)), 0, [True, True])
    rise = best_subtree(tree, budget) - best_subtree(before, budget)
    state, scheduler = after(before, tree, budget), OptTreeScheduler(["middle"], threshold)
    decision = scheduler.decide(state)
    if abs(rise - threshold) > 1e-9:
        assert decision == ("middle" if rise > threshold else None)
    assert decision == scheduler.decide(state)


@pytest.mark.parametrize(("threshold", "decision"), [(0.249, "middle"), (0.25, None), (0.251, None)])
def test_a_rise_of_just_the_threshold_is_not_enough(threshold, decision):
    root = DraftTree.rooted(0)
    half = root.append(Expansion([0], [1], [np.log(0.5)]), 0, [True])
    quarter = half.append(Expansion([1], [1], [np.log(0.5)]), 0, [True])
    assert OptTreeScheduler(["middle"], threshold).decide(after(half, quarter)) == decision


def test_nodes_beyond_the_budget_raise_nothing():
    root = DraftTree.rooted(0)
    one = root.append(Expansion([0], [1], [-0.1]), 0, [True])
    two = one.append(Expansion([0], [2], [-2.5]), 0, [True])
    scheduler = OptTreeScheduler(["middle"], 0.0)
    assert scheduler.decide(after(one, two, verify_nodes=2)) == "middle"
    assert scheduler.decide(after(one, two, verify_nodes=1)) is None


def test_a_step_that_lowers_scores_or_adds_nothing_ends_growth():
    tree = DraftTree.rooted(0).append(Expansion([0], [1], [-0.1]), 0, [True])
    lower = tree.rescored(np.array([1]), np.array([-3.0]), 0, [True])
    assert OptTreeScheduler(["middle"], 0.0).decide(after(tree, lower)) is None
    assert OptTreeScheduler(["middle"], 0.0).decide(after(tree, tree)) is None


def test_the_first_step_is_always_taken_and_sources_take_turns():
    grown = after(root := DraftTree.rooted(0), root.append(Expansion([0], [1], [0.0]), 0, [True]), num_earlier=2)
    scheduler = OptTreeScheduler(["middle", "small"], 0.5)
    assert scheduler.decide(bare_state(0)) == "middle"
    assert scheduler.decide(grown) == "small"
    assert OptTreeScheduler(["middle", None], 0.5).decide(grown) is None
    assert OptTreeScheduler([], 0.5).decide(bare_state(0)) is None


def test_an_unknown_source_is_refused_with_a_suggestion():
    with pytest.raises(ComposeError, match=r"scheduler\.pattern: no source named 'midle'") as caught:
        OptTreeScheduler(["midle"]).bind(bare_setting(["small", "middle"]))
    assert "Sources: small, middle. Did you mean 'middle'?" in str(caught.value)
    with pytest.raises(ComposeError, match=r"(?s)scheduler.*no source named 'midle'.*Did you mean 'middle'"):
        treegraft.load("opt_tree", "scheduler.pattern=[midle]")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pattern": "middle"}, TypeError, "pattern: got 'middle'; allowed: a list of source names"),
        ({"pattern": ["middle"], "threshold": -0.1}, ValueError, "threshold: got -0.1; allowed: a finite number >= 0."),
        ({"pattern": ["middle"], "threshold": True}, TypeError, "threshold: got True"),
    ],
)
def test_what_is_not_allowed_is_refused(options, error, message):
    with pytest.raises(error) as caught:
        OptTreeScheduler(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4, 5.0])
def test_a_pipeline_drafts_as_many_steps_as_the_rule_says(threshold):
    """Every round is one of the full five steps, cut behind the first whose rise was too small."""
    table = markov_table(12, seed=3, spread=4.0)
    models = {"target": MarkovTarget(table), "middle": TableDrafter(table)}
    rules = ["costs={use: fixed}", "budget={use: fixed, verify_nodes: 7}", "calibration=off"]
    pipeline = treegraft.load("opt_tree", *rules, f"scheduler.threshold={threshold}", models=models)
    full = treegraft.load("all_middle", *rules, models=models)
    generation = pipeline.generate([1, 2, 3], 60, temperature=1.0, seed=5, keep_rounds=True)
    numbers = []
    for record in generation.rounds:
        if record.state.limits.max_depth < 5:  # so near the end that the token limit cuts trees too
            break
        prompt = [1, 2, 3, *generation.token_ids][: record.state.position + 1]
        steps = next(full.rounds(prompt, 60)).state.steps
        lengths = [0.0, *(expected_accepted(step.tree, 7) for step in steps)]
        small = [number for number, (a, b) in enumerate(itertools.pairwise(lengths), 1) if b - a <= threshold]
        numbers.append(len(record.state.steps))
        assert numbers[-1] == min([*small, 5])
        assert np.array_equal(record.state.tree.uid, steps[numbers[-1] - 1].tree.uid)
    assert len(numbers) > 5
    assert threshold not in (0.1, 0.4) or len(set(numbers)) > 1, "sometimes early and sometimes late"
    assert threshold < 5.0 or set(numbers) == {1}
