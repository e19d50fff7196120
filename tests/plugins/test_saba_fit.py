"""Fitting the state-aware budget: labels of one large tree, the fitted curve, the policies it is compared with."""

import itertools
import json
from functools import cache

import attrs
import numpy as np
import pytest
import torch
from edge_world import ChainDrafter

import treegraft
from treegraft.errors import RequestError
from treegraft.interfaces import Setting, SourceSetting
from treegraft.registry import packaged_registry
from treegraft.replay import ReplayTarget, outcome_of, record, replay
from treegraft.sampling import SamplingOptions
from treegraft.testing import MarkovTarget, markov_table
from treegraft_plugins.budgets import ExpectedGainBudget
from treegraft_plugins.collection import Text
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.saba import SABABudget, report
from treegraft_plugins.saba.budget import COARSE, GRID, below
from treegraft_plugins.saba.fit import fit_gain, readable
from treegraft_plugins.saba.labels import LabellingBudget, Labels, labelled
from treegraft_plugins.saba.model import GainModel
from treegraft_plugins.saba.offline import SABA_FILE, BudgetFit
from treegraft_plugins.saba.signals import DRAFTED, OWN, SIGNALS

V = 7
TABLE = markov_table(V, order=1, seed=2, spread=2.0)
MOST = 20
BUDGETS = np.array(below(COARSE, MOST))
COSTS = FixedCosts(target={1: 5.0, 2: 6.0, 64: 40.0}, sources={"dflash": {1: 1.0, 8: 2.0}})
TEXTS = [Text(f"text {number}", ("even", "odd")[number % 2], (number % V, 1)) for number in range(9)]
HELD_OUT = [Text("x", "even", (0, 2)), Text("y", "odd", (1, 2))]


def pipeline(target, *overrides, nodes=MOST):
    return treegraft.load(
        "ddtree", "costs={use: fixed}", f"budget={{use: fixed, verify_nodes: {nodes}}}", *overrides,
        registry=packaged_registry(), models={"target": target, "dflash": ChainDrafter(TABLE)},
    )  # fmt: skip


@cache
def live():
    return MarkovTarget(TABLE)


def recording(prompt, num_tokens, temperature=0.0):
    return record(live(), prompt, num_tokens, SamplingOptions(temperature), 3)


def replayed(*overrides, nodes=MOST):
    return pipeline(ReplayTarget(live()), *overrides, nodes=nodes)


@cache
def labels():
    parts = [
        labelled(replayed(), recording(text.token_ids, 60, 1.0), BUDGETS, np.random.default_rng(number))
        for number, text in enumerate(TEXTS)
    ]
    return Labels.joined(parts)


# -- labels -----------------------------------------------------------------------------------------------------------


def test_labels_of_one_large_tree_are_those_of_separately_grown_trees():
    text = recording((1, 2), 24)
    found = Labels.joined([labelled(replayed("calibration=off"), text, BUDGETS, np.random.default_rng(0))])
    assert len(found) > 5
    emitted, ms = found.emitted(np.tile(BUDGETS, (len(found), 1))), None
    for place, budget in enumerate(BUDGETS.tolist()):
        alone = replayed("calibration=off", nodes=budget)
        ms = found.ms(COSTS, ["dflash"], np.minimum(budget, found.num_nodes))
        for number, position in enumerate(found.position.tolist()):
            rest = recording(text.text[: position + 1].tolist(), len(text.text) - position - 1)
            assert np.array_equal(rest.text, text.text)
            first = replay(alone, rest).rounds[0]
            assert len(first.verdict.path) == min(found.accepted(np.full(len(found), budget))[number], len(rest.tokens))
            assert len(first.tokens) == emitted[number, place]
            assert outcome_of([first], COSTS).modelled_ms == pytest.approx(ms[number])
    assert emitted.max() > 2 and (emitted[:, 0] == 1).all() and (np.diff(emitted, axis=1) >= 0).all()


def test_rounds_that_verify_at_random_see_histories_of_many_budgets():
    recent = labels().signals[:, SIGNALS.index("recent_accepted")]
    assert len(labels()) > 100 and len(np.unique(recent)) > 50
    last = labels().signals[:, SIGNALS.index("last_accepted")]
    assert {0.0, 1.0} <= set(last.tolist())
    assert np.isnan(labels().signals[:, : len(DRAFTED)]).all(), "a table says nothing about itself"
    assert not np.isnan(labels().signals[:, len(DRAFTED) :]).any()


def test_a_pipeline_is_left_with_its_own_budget():
    some = replayed()
    own = some.parts
    labelled(some, recording((1, 2), 8), BUDGETS, np.random.default_rng(0))
    assert some.parts is own


# -- the curve --------------------------------------------------------------------------------------------------------


def synthetic(num_rounds=3000, seed=0):
    """Rounds whose expected gain is known: 3 or 1 tokens at most, half of it at few nodes, by one signal."""
    rng = np.random.default_rng(seed)
    signals = np.full((num_rounds, len(SIGNALS)), np.nan)
    signals[:, [SIGNALS.index(name) for name in OWN]] = rng.normal(size=(num_rounds, len(OWN)))
    helps = signals[:, SIGNALS.index("expected_4")] > 0
    most = np.where(helps, 4, 1)
    ranks = np.zeros((num_rounds, 64), np.int64)
    for number in range(num_rounds):
        ranks[number, : most[number]] = np.sort(np.ceil(rng.exponential(6.0 if helps[number] else 2.0, most[number])))
    return helps, Labels(
        text=np.arange(num_rounds) % 20, position=np.full(num_rounds, 30), left=np.full(num_rounds, 99),
        signals=signals.astype(np.float32), num_nodes=np.full(num_rounds, MOST), ranks=ranks,
        expected=np.tile(np.log1p(np.arange(MOST + 1)), (num_rounds, 1)).astype(np.float32),
        source=np.zeros((num_rounds, 1), np.int64), rows=np.full((num_rounds, 1), 8),
    )  # fmt: skip


@cache
def fitted():
    return fit_gain(synthetic()[1], BUDGETS, num_steps=800)


def test_the_mean_gain_of_every_budget_is_recovered_for_each_state():
    helps, found = synthetic(seed=1)
    assert fitted().names == OWN
    x = found.signals[:, len(DRAFTED) :].astype(np.float64)
    predicted = fitted()(x, found.expecting(np.tile(BUDGETS, (len(found), 1))))
    truth = found.accepted(np.tile(BUDGETS, (len(found), 1)))
    for state in (helps, ~helps):
        np.testing.assert_allclose(predicted[state].mean(0), truth[state].mean(0), atol=0.4)
    assert predicted[helps, -1].mean() > predicted[~helps, -1].mean() + 1.5
    assert (predicted[:, 0] == 0).all() and (np.diff(predicted, axis=1) >= 0).all()


def test_a_signal_that_many_rounds_lack_is_not_read_and_rounds_without_a_read_one_are_left_out():
    found = synthetic(200)[1]
    signals = found.signals.copy()
    signals[:30, SIGNALS.index("context")] = np.nan
    signals[:10, SIGNALS.index("expected_4")] = np.nan
    found = attrs.evolve(found, signals=signals)
    assert set(OWN) - set(readable(found)) == {"context"}
    model = fit_gain(found, BUDGETS, num_steps=2)
    assert model.names == readable(found) and np.isfinite(model.arrays["mean"]).all()


def test_a_fit_is_the_same_again():
    found = synthetic(100)[1]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        once = fit_gain(found, BUDGETS, num_steps=5)
    again = fit_gain(found, BUDGETS, num_steps=5)
    assert all(np.array_equal(array, again.arrays[name]) for name, array in once.arrays.items())


# -- policies ---------------------------------------------------------------------------------------------------------


def own_model():
    rng = np.random.default_rng(0)
    size = len(OWN)
    return GainModel(OWN, {
        "mean": np.zeros(size), "std": np.ones(size), "w1": rng.normal(size=(size, 4)), "b1": rng.normal(size=4),
        "w2": rng.normal(size=(4, 3)), "b2": np.array([0.3, 1.0, -0.1]),
    })  # fmt: skip


def test_policies_of_the_report_choose_what_the_budgets_choose_online(monkeypatch):
    online, rates = {"rule": [], "saba": []}, []
    rule, saba = ExpectedGainBudget(MOST), SABABudget(MOST)
    saba._model = own_model()
    label = LabellingBudget.verify_nodes

    def watched(self, state, tree):
        online["rule"].append(rule.choose(state, tree))
        online["saba"].append(saba.choose(state, tree))
        rates.append(state.statistics.rate(state.position))
        return label(self, state, tree)

    monkeypatch.setattr(LabellingBudget, "verify_nodes", watched)
    some = pipeline(ReplayTarget(live()), f"costs={json.dumps({'use': 'fixed', **COSTS.table()})}")
    found = Labels.joined([labelled(some, recording((1, 2), 60, 1.0), BUDGETS, np.random.default_rng(0))])
    place = report.Costed.of(found, np.array(below(GRID, MOST)), COSTS, ["dflash"])
    assert place.expected_gain().tolist() == [choice.nodes for choice in online["rule"]]
    nodes, gain = place.saba_by_rate(own_model())(np.array(rates))
    assert nodes.tolist() == [choice.nodes for choice in online["saba"]]
    np.testing.assert_allclose(gain, [choice.gain for choice in online["saba"]], rtol=1e-4)
    np.testing.assert_allclose(place.totals(nodes)[1], [choice.cost_ms for choice in online["saba"]])
    assert len(set(nodes.tolist())) > 1


def test_the_report_settles_where_time_earns_what_the_choices_make_of_it():
    found = synthetic(400)[1]
    place = report.Costed.of(found, np.array(below(GRID, MOST)), COSTS, ["dflash"])
    nodes, _ = place.saba(fitted())
    again, _ = place.saba_by_rate(fitted())(place._rates(nodes))
    np.testing.assert_allclose(place._rates(again), place._rates(nodes), rtol=0.05)
    emitted, ms = place.totals(nodes)
    own = found.text == 3
    assert place._rates(nodes)[own] == pytest.approx(emitted[own].sum() / ms[own].sum())


def test_the_oracle_is_the_best_of_all_choices_by_brute_force():
    few = synthetic(4)[1]
    place = report.Costed.of(few, np.array([0, 3, 9]), COSTS, ["dflash"])
    best = max(
        sum(place.emitted[range(4), choice]) / sum(place.ms[range(4), choice])
        for choice in itertools.product(range(3), repeat=4)
    )
    emitted, ms = place.totals(place.oracle())
    assert emitted.sum() / ms.sum() == pytest.approx(best)


def test_no_policy_beats_the_oracle_and_a_known_world_is_won_by_the_model():
    held_out = synthetic(seed=5)[1]
    found = report.rows(
        held_out, synthetic(seed=6)[1], BUDGETS, fitted(), report.cost_shapes(COSTS, MOST), ["dflash"],
        ["even", "odd"] * 10,
    )  # fmt: skip
    assert {(row["costs"], row["category"]) for row in found} == set(
        itertools.product(("own", "flat", "kinked", "linear"), ("all", "even", "odd"))
    )
    for row in found:
        # The training-free rule may verify any number of nodes, the oracle one of the grid.
        assert row["of_oracle"] <= 1.0 + (0.01 if row["policy"] == "expected_gain" else 1e-9)
    whole = {(row["costs"], row["policy"]): row for row in found if row["category"] == "all"}
    assert whole["linear", "saba"]["to_fixed"]["interval"][0] > 1.0
    for (_, policy), row in whole.items():
        assert policy != "oracle" or row["rounds_near_oracle"] == 1.0


@pytest.mark.parametrize("most", [1, 20, 512])
def test_cost_shapes_begin_where_the_pipelines_own_table_does(most):
    shapes = report.cost_shapes(COSTS, most)
    assert {float(table.target_ms(1, 0)) for table in shapes.values()} == {5.0}
    assert float(shapes["linear"].target_ms(most + 1, 0)) == pytest.approx(5.0 * (1 + 0.1 * most))
    assert float(shapes["flat"].target_ms(most + 1, 0)) < 1.1 * 5.0 + 1e-9
    assert all(float(table.source_ms("dflash", 8)) == 2.0 for table in shapes.values())


# -- the whole --------------------------------------------------------------------------------------------------------

SETTING = Setting(
    "", V, {"dflash": SourceSetting("", width=1, branching=32, rank=0)}, steps=5, verify_nodes=MOST
)  # fmt: skip


def fit(out, **changes) -> BudgetFit:
    return attrs.evolve(
        BudgetFit(
            target=live(), pipeline=replayed(), setting=SETTING, texts=TEXTS,
            held_out=HELD_OUT, max_new_tokens=40, temperatures=(0.0, 1.0), seed=3,
            num_steps=60, costs=COSTS, settings={"pipeline": "toy"}, out=out, progress=lambda *step: None,
        ),
        **changes,
    )  # fmt: skip


class Stop(Exception):
    pass


def test_weights_of_a_fit_serve_the_pipeline_and_an_interrupted_one_ends_alike(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    path = fit(whole).run()

    def stop(*step):
        if step[:2] == ("labelling (validation)", 1):
            raise Stop

    with pytest.raises(Stop):
        fit(parts, progress=stop).run()
    fit(parts).run()
    for name in (SABA_FILE, "report.md", "report.json", "rounds.jsonl"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert "## flat costs, odd" in path.read_text()
    lines = [json.loads(line) for line in (whole / "rounds.jsonl").read_text().splitlines()]
    assert {line["id"] for line in lines} == {"x", "y"}
    assert all(line["expected_accepted"] >= 0 and line["oracle_budget"] in range(MOST + 1) for line in lines)
    loaded = treegraft.load(
        "ddtree_saba", "costs={use: fixed, target: {1: 5.0, 64: 40.0}}", f"budget.verify_nodes={MOST}",
        f"budget.weights={whole / SABA_FILE}", registry=packaged_registry(),
        models={"target": MarkovTarget(TABLE), "dflash": ChainDrafter(TABLE)},
    )  # fmt: skip
    assert "weights saba; expected_gain in rounds without recent_accepted" in loaded.parts.budget.note()
    result = loaded.generate([1], 20, keep_rounds=True)
    assert not result.faults and any(done.choice.gain for done in result.rounds)


def test_a_folder_of_another_fit_is_refused(tmp_path):
    fit(tmp_path).run()
    with pytest.raises(RequestError, match="pipeline: 'toy'; now 'other'"):
        fit(tmp_path, settings={"pipeline": "other"}).run()
    with pytest.raises(RequestError, match="at least two"):
        fit(tmp_path / "new", texts=TEXTS[:1]).run()
