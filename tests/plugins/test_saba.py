"""The budgets `expected_gain` and `saba`: the arg-max by brute force, what a round records, which weights they take."""

import numpy as np
import pytest
import saba_world
from exactness.toy_block import TableBlockDrafter
from hypothesis import assume, given
from hypothesis import strategies as st
from saba_world import SAID, drafted_state, setting

import treegraft
from treegraft.errors import ComposeError
from treegraft.interfaces import SourceSetting
from treegraft.registry import packaged_registry
from treegraft.testing import MarkovTarget, markov_table
from treegraft.testing.strategies import draft_trees
from treegraft_plugins.budgets import ExpectedGainBudget
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.saba import SABABudget, budget
from treegraft_plugins.saba.budget import COARSE, GRID, below
from treegraft_plugins.saba.signals import DRAFTED, OWN, SIGNALS, state_signals

COSTS = st.sampled_from(
    [
        FixedCosts(target=20.0, sources={"block": 3.0}),
        FixedCosts(target={1: 5.0, 2: 6.0, 8: 6.5, 64: 40.0}, sources={"block": {1: 1.0, 8: 2.0}}),
        FixedCosts(target={1: 1.0, 64: 64.0}),
        FixedCosts(target=0.0),
    ]
)


def rate(state, nodes, gain):
    """Tokens per ms, and the ms."""
    costs = state.statistics.costs
    ms = float(costs.target_ms(nodes + 1, state.position)) + float(costs.source_ms("block", 8))
    return (1.0 + gain) / max(ms, 1e-9), ms


# -- expected_gain ----------------------------------------------------------------------------------------------------


@given(draft_trees(), COSTS, st.integers(0, 12))
def test_expected_gain_is_the_arg_max_by_brute_force(tree, costs, most):
    assume(len(tree) > 1)
    state = drafted_state(tree, costs, {})
    chosen = ExpectedGainBudget(most).choose(state, tree)
    best = sorted(tree.path_score[1:].tolist(), reverse=True)
    gains = [sum(np.exp(best[:nodes])) for nodes in range(min(most, len(best)) + 1)]
    rates = [rate(state, nodes, gain)[0] for nodes, gain in enumerate(gains)]
    assert rates[chosen.nodes] == pytest.approx(max(rates))
    assert chosen.gain == pytest.approx(gains[chosen.nodes])
    assert chosen.cost_ms == pytest.approx(rate(state, chosen.nodes, 0.0)[1])
    assert (
        ExpectedGainBudget(most).verify_nodes(state, tree) == chosen.nodes <= ExpectedGainBudget(most).max_nodes(state)
    )


@given(draft_trees())
def test_where_a_node_more_never_costs_less_it_is_the_rule_that_stops_when_the_ratio_stops_rising(tree):
    assume(len(tree) > 1)
    state = drafted_state(tree, FixedCosts(target={1: 9.0, 4: 9.5, 64: 40.0}), {})
    best = sorted(tree.path_score[1:].tolist(), reverse=True)
    nodes, gain = 0, 0.0
    while nodes < len(best) and rate(state, nodes + 1, gain + np.exp(best[nodes]))[0] > rate(state, nodes, gain)[0]:
        gain += np.exp(best[nodes])
        nodes += 1
    found = ExpectedGainBudget(63).choose(state, tree)
    assert rate(state, found.nodes, found.gain)[0] == pytest.approx(rate(state, nodes, gain)[0])


# -- saba -------------------------------------------------------------------------------------------------------------


def bound(path, **options):
    policy = SABABudget(weights=str(path), **options)
    policy.bind(setting())
    return policy


@given(draft_trees(), COSTS, st.sampled_from([None, (0, 1, 5), (2, 3), (63,), (0,)]), st.integers(0, 5))
def test_saba_is_the_arg_max_over_its_grid_by_brute_force(tmp_path_factory, tree, costs, grid, seed):
    assume(len(tree) > 1)
    path = tmp_path_factory.getbasetemp() / f"saba-{seed}.safetensors"
    made = saba_world.save(path, seed=seed)
    state = drafted_state(tree, costs, SAID)
    policy = bound(path, grid=grid)
    chosen = policy.choose(state, tree)
    x = state_signals(state, tree, SIGNALS)
    z = np.clip((x - made["mean"]) / made["std"], -4, 4)
    log_g, log_kappa, log_alpha = np.maximum(z @ made["w1"] + made["b1"], 0) @ made["w2"] + made["b2"]
    scale, kappa = np.exp(np.clip(log_g, -6, 4)), np.exp(np.clip(log_kappa, -3, 8))
    alpha = np.exp(np.clip(log_alpha, -1.6, 0.7))
    sizes = [min(nodes, len(tree) - 1) for nodes in grid or range(64)]
    scores = sorted(tree.path_score[1:].tolist(), reverse=True)
    expected = {nodes: sum(np.exp(scores[:nodes])) for nodes in sizes}
    gains = {nodes: scale * (1 - np.exp(-((expected[nodes] / kappa) ** alpha))) for nodes in sizes}
    worth = state.statistics.rate(state.position)
    surplus = {nodes: gain - worth * rate(state, nodes, gain)[1] for nodes, gain in gains.items()}
    assert chosen.nodes in gains
    assert surplus[chosen.nodes] == pytest.approx(max(surplus.values()))
    assert chosen.gain == pytest.approx(gains[chosen.nodes]) and policy.verify_nodes(state, tree) == chosen.nodes
    assert chosen.cost_ms == pytest.approx(rate(state, chosen.nodes, 0.0)[1])
    assert policy.max_nodes(state) == (grid or (63,))[-1]


@pytest.mark.parametrize("verify_nodes", [0, 1, 63, 64, 512])
@pytest.mark.parametrize("budgets", [GRID, COARSE])
def test_the_grid_ends_at_the_most_nodes(budgets, verify_nodes):
    grid = below(budgets, verify_nodes)
    assert list(grid) == sorted(set(grid)) and grid[-1] == verify_nodes
    assert set(grid[:-1]) == {nodes for nodes in budgets if nodes < verify_nodes}
    assert set(range(32, 513, 16)) <= set(budgets)


@pytest.mark.parametrize(
    ("grid", "error"),
    [
        ([3, 2], ValueError),
        ([], ValueError),
        ([1, 64], ValueError),
        ([-1], ValueError),
        ([1.5], TypeError),
        (8, TypeError),
    ],
)
def test_a_grid_that_is_none_is_refused(grid, error):
    with pytest.raises(error, match=r"grid: got .*ascending ints in .*63"):
        SABABudget(grid=grid)


# -- what it sees -----------------------------------------------------------------------------------------------------


@given(draft_trees())
def test_signals_are_those_of_the_tree_the_rounds_before_and_what_drafters_said(tree):
    assume(len(tree) > 1)
    state = drafted_state(tree, FixedCosts(), SAID, verify_nodes=5)
    acceptance = state.statistics.acceptance
    for accepted in (3, 2):
        acceptance.learn_round(accepted + 1, accepted, 9, 1.0)
    found = dict(zip(SIGNALS, state_signals(state, tree, SIGNALS), strict=True))
    assert {name: found[name] for name in DRAFTED} == SAID
    best = np.exp(sorted(tree.path_score[1:].tolist(), reverse=True))
    expected = [np.log(max(best[:nodes].sum(), 0.01)) for nodes in (4, 5, 5)]  # 16 is more than may be verified
    assert [found[f"expected_{size}"] for size in ("4", "16", "all")] == pytest.approx(expected)
    assert found["last_accepted"] == 2 and 2 < found["recent_accepted"] < 3
    assert found["context"] == pytest.approx(np.log(41))


@pytest.fixture(scope="module")
def tree():
    """Four nodes, none certain."""
    expansion = treegraft.Expansion(anchor=[0, 0, -1, -3], token=[1, 2, 3, 4], log_prob=np.log([0.6, 0.3, 0.5, 0.2]))
    return treegraft.DraftTree.rooted(0).append(expansion, 0, (True,))


def test_without_a_signal_that_the_model_reads_the_rule_decides(tmp_path, tree):
    saba_world.save(tmp_path / "s.safetensors")
    saba_world.save(tmp_path / "own.safetensors", names=OWN)
    state = drafted_state(tree, FixedCosts(target={1: 1.0, 64: 30.0}), {})
    rule = ExpectedGainBudget(63).choose(state, tree)
    assert bound(tmp_path / "s.safetensors").choose(state, tree) == rule
    assert bound(tmp_path / "own.safetensors").choose(state, tree) != rule


# -- which weights ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder in the place of what ships."""
    monkeypatch.setattr(budget, "SHELF", budget.Shelf("weights", tmp_path, "treegraft fit budget"))
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "other"}, {"vocab_size": 9}, {"steps": 4}, {"verify_nodes": 20},
        {"sources": {"block": SourceSetting("another", 1, 32, 0)}},
        {"sources": {"block": SourceSetting("drafter", 1, 32, 0, edges="tdes")}},
        {"sources": {"block": SourceSetting("drafter", 1, 32, 0), "small": SourceSetting("", 10, 10, 0)}},
    ],
    ids=str,
)  # fmt: skip
def test_weights_of_another_pipeline_are_refused_by_name_and_passed_by_aloud(shipped, tree, changes):
    saba_world.save(shipped / "mine.safetensors")
    with pytest.raises(ComposeError, match=r"'mine': fitted for .*, not (.|\n)*treegraft fit budget"):
        SABABudget(weights="mine").bind(setting(**changes))
    auto = SABABudget()
    auto.bind(setting(**changes))
    assert auto.note().startswith("expected_gain, because no weights that ship fit (mine are fitted for ")
    state = drafted_state(tree, FixedCosts(target={1: 1.0, 64: 30.0}), SAID)
    assert auto.choose(state, tree) == ExpectedGainBudget(63).choose(state, tree)


def test_auto_takes_weights_that_fit(shipped):
    saba_world.save(shipped / "mine.safetensors")
    auto = SABABudget()
    auto.bind(setting())
    assert auto.note().startswith("weights mine; expected_gain in rounds without mean_top1")
    auto.bind(setting(vocab_size=None))  # before the target is loaded


# -- in a pipeline ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["expected_gain", "saba"])
def test_every_round_records_what_was_chosen_and_expected(use):
    table = markov_table(7, order=1, seed=2)
    pipeline = treegraft.load(
        "ddtree", "costs={use: fixed, target: {1: 5.0, 64: 30.0}, sources: {dflash: 1.0}}",
        f"budget={{use: {use}, verify_nodes: 20}}", registry=packaged_registry(),
        models={"target": MarkovTarget(table), "dflash": TableBlockDrafter(table)},
    )  # fmt: skip
    rounds = pipeline.generate([1], 40, 1.0, seed=4, keep_rounds=True).rounds
    assert len({done.budget for done in rounds}) > 1
    for done in rounds[:-1]:
        assert done.choice.gain > 0 and done.budget == done.choice.nodes == len(done.pruned) - 1
        costs = pipeline.costs
        assert done.choice.cost_ms == float(costs.target_ms(done.budget + 1, done.state.position)) + 1.0


def test_policies_that_predict_nothing_say_so():
    table = markov_table(7, order=1, seed=2)
    pipeline = treegraft.load(
        "ddtree", "costs={use: fixed}", "budget={use: fixed, verify_nodes: 20}", registry=packaged_registry(),
        models={"target": MarkovTarget(table), "dflash": TableBlockDrafter(table)},
    )  # fmt: skip
    (done, *_) = pipeline.generate([1], 8, keep_rounds=True).rounds
    assert done.choice == treegraft.BudgetChoice(done.budget) and done.budget > 0
