"""Scheduler and budget `fixed`: what is written down is what happens; rules C1, C2, B1."""

import pytest
from bare_parts import bare_setting, bare_state
from hypothesis import given
from hypothesis import strategies as st

from treegraft.errors import ComposeError
from treegraft.testing.strategies import draft_trees
from treegraft_plugins.budgets import FixedBudget
from treegraft_plugins.schedulers.fixed import FixedScheduler

NAMES = st.sampled_from(["small", "middle", None])


@given(st.lists(NAMES, min_size=1, max_size=8), st.integers(0, 12))
def test_c1_c2_the_pattern_is_repeated_or_truncated(pattern, step):
    scheduler = FixedScheduler(pattern)
    scheduler.bind(bare_setting(["small", "middle"]))
    assert scheduler.decide(bare_state(step)) == (pattern * 13)[step]
    assert scheduler.decide(bare_state(step)) == scheduler.decide(bare_state(step))


def test_an_empty_pattern_never_drafts():
    scheduler = FixedScheduler(pattern=[])
    scheduler.bind(bare_setting(["small"]))
    assert scheduler.decide(bare_state(0)) is None


def test_a_source_that_failed_is_still_named():
    assert FixedScheduler(["small"]).decide(bare_state(0)) == "small"  # a bare state has no sources


def test_an_unknown_source_is_refused_with_a_suggestion():
    with pytest.raises(ComposeError, match="no source named 'smal'") as caught:
        FixedScheduler(["middle", None, "smal"]).bind(bare_setting(["small", "middle"]))
    assert "Sources: small, middle. Did you mean 'small'?" in str(caught.value)


@pytest.mark.parametrize("pattern", ["small", None, [1], {"small": 1}])
def test_a_pattern_that_is_no_list_of_names_is_refused(pattern):
    with pytest.raises(TypeError, match=r"pattern: got .*; allowed: a list of source names"):
        FixedScheduler(pattern)


@given(st.integers(0, 100), draft_trees())
def test_b1_the_fixed_budget_is_what_was_given_and_no_more_than_the_tree(verify_nodes, tree):
    budget = FixedBudget(verify_nodes=verify_nodes)
    assert budget.max_verify_nodes == budget.max_nodes(bare_state()) == verify_nodes
    assert budget.verify_nodes(bare_state(), tree) == min(verify_nodes, len(tree) - 1)


@pytest.mark.parametrize(("given_nodes", "error"), [(-1, ValueError), (2.5, TypeError), (None, TypeError)])
def test_a_budget_that_is_no_count_is_refused(given_nodes, error):
    with pytest.raises(error, match="verify_nodes: got"):
        FixedBudget(verify_nodes=given_nodes)
