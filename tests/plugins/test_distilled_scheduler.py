"""The distilled scheduler online: which weights it takes, what it refuses, when it leaves the decision to another."""

import warnings

import attrs
import numpy as np
import pytest
from bare_parts import bare_source, bare_state

from treegraft.errors import ComposeError, SchedulerWarning
from treegraft.interfaces import Setting, SourceSetting, Statistics, StepRecord
from treegraft.statistics import AcceptanceStats
from treegraft.tree import Expansion
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.schedulers.distilled import DistilledScheduler, scheduler
from treegraft_plugins.schedulers.distilled.fit import Predictor
from treegraft_plugins.schedulers.distilled.networks import Normaliser
from treegraft_plugins.schedulers.distilled.signals import NUM_RUNTIME
from treegraft_plugins.schedulers.distilled.weights import Header, Weights
from treegraft_plugins.selectors import UnvisitedSelector

SIGNALS = ("frontier_depth", "selected_score")
NUM_INPUTS = NUM_RUNTIME + 2 + 5 + len(SIGNALS)


def setting(**changes) -> Setting:
    sources = {"small": SourceSetting("", 10, 10, 0), "middle": SourceSetting("m", 10, 10, 1)}
    return attrs.evolve(Setting("t", 7, sources, steps=5, verify_nodes=63), **changes)


def save(path, margin=1.0, a_step=0.0, **changes) -> None:
    """Weights whose predictor says `margin`, and `a_step` more with each step, whatever else it is shown."""
    header = Header(
        signals=SIGNALS, steps=5, pairs=(("t", "m"),), small="", vocab_sizes=(7,), ratios=(1.0, 40.0), width=10,
        max_nodes=63, ablation=None, versions={},
    )  # fmt: skip
    flat = {"w1": (NUM_INPUTS, 4), "b1": (4,), "w2": (4, 4), "b2": (4,), "w3": (4,)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in flat.items()} | {
        "b3": np.float32(margin).reshape(())
    }
    arrays["w1"][NUM_RUNTIME, 0], arrays["w2"][0, 0], arrays["w3"][0] = 5, 1, a_step  # the input is step / D
    normaliser = Normaliser(np.zeros(NUM_INPUTS, np.float32), np.ones(NUM_INPUTS, np.float32))
    Weights(attrs.evolve(header, **changes), Predictor(SIGNALS, 5, normaliser, arrays)).save(path)


def state(ratio: float = 4.0, steps: int = 0):
    """A round's first state, with costs at t_target / t_middle = ratio."""
    sources = {
        name: attrs.evolve(bare_source(index), name=name, selector=UnvisitedSelector(), width=10)
        for index, name in enumerate(("small", "middle"))
    }
    costs = FixedCosts(target=ratio, sources={"middle": 1.0, "small": 0.001})
    return attrs.evolve(bare_state(steps), sources=sources, statistics=Statistics(costs, AcceptanceStats(2)))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder in the place of what ships."""
    monkeypatch.setattr(scheduler, "SHELF", attrs.evolve(scheduler.SHELF, folder=tmp_path))
    return tmp_path


@pytest.mark.parametrize(("margin", "name"), [(0.1, "middle"), (-0.1, "small")])
def test_the_sign_of_the_margin_decides(shipped, margin, name):
    save(shipped / "pair.safetensors", margin)
    distilled = DistilledScheduler()
    distilled.bind(setting())
    assert distilled.decide(state()) == name
    assert distilled.note() == "weights pair; gain_over_cost where t_target / t_middle is not within 1 to 40"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target": "other"}, "no weights that ship fit"),
        ({"steps": 4}, "fitted for steps .D. 5, not 4"),
        (
            {"sources": {"small": SourceSetting("t", 10, 10, 0), "middle": SourceSetting("m", 10, 10, 1)}},
            "fitted for small drafters of model '', not 't'",
        ),
        ({"verify_nodes": 20}, "fitted for verify_nodes .B. 63, not 20"),
        ({"vocab_size": 9}, "fitted for vocabularies of"),
        ({"sources": {"small": SourceSetting("", 10, 10, 0)}}, "it schedules two sources of different rank"),
    ],
)
def test_auto_falls_back_aloud_and_named_weights_are_refused(shipped, changes, why):
    save(shipped / "pair.safetensors")
    other = setting(**changes)
    auto = DistilledScheduler()
    auto.bind(other)
    assert auto.note().startswith("gain_over_cost, because")
    if "target" in changes:
        DistilledScheduler("pair").bind(other)  # by name, weights may serve another pair of the same vocabulary
        return
    with pytest.raises(ComposeError, match=why):
        DistilledScheduler(str(shipped / "pair.safetensors")).bind(other)


def test_weights_that_are_not_there_are_refused_with_those_that_are(shipped):
    save(shipped / "pair.safetensors")
    with pytest.raises(ComposeError, match="or shipped weights: pair"):
        DistilledScheduler("missing").bind(setting())


def test_auto_says_why_no_weights_fit(shipped):
    save(shipped / "pair.safetensors")
    auto = DistilledScheduler()
    auto.bind(setting(steps=4))
    assert auto.note() == (
        "gain_over_cost, because no weights that ship fit (pair are fitted for steps (D) 5, not 4); "
        "treegraft fit scheduler makes some"
    )


def test_an_ablation_s_weights_are_taken_where_it_is_named(shipped):
    save(shipped / "pair-one_signal.safetensors", ablation="one_signal")
    save(shipped / "pair.safetensors")
    for distilled, name in (
        (DistilledScheduler(), "pair"),
        (DistilledScheduler(ablation="one_signal"), "pair-one_signal"),
        (DistilledScheduler("pair-one_signal"), "pair-one_signal"),
        (DistilledScheduler("pair-one_signal", ablation="one_signal"), "pair-one_signal"),
    ):
        distilled.bind(setting())
        assert distilled.note().startswith(f"weights {name};")
    (shipped / "pair.safetensors").unlink()
    auto = DistilledScheduler()
    auto.bind(setting())
    why = "no weights that ship fit (pair-one_signal are fitted as ablations)"
    assert auto.note().startswith(f"gain_over_cost, because {why}")


def test_an_ablation_without_weights_is_refused_with_the_command_that_makes_them(shipped):
    save(shipped / "pair.safetensors")
    with pytest.raises(ComposeError, match="'all_signals': no weights that ship fit") as error:
        DistilledScheduler(ablation="all_signals").bind(setting())
    assert "treegraft fit scheduler DIR... --ablations --out NAME.safetensors" in str(error.value)
    assert "scheduler.weights=NAME-all_signals.safetensors" in str(error.value)
    with pytest.raises(ComposeError, match="fitted as the whole system, not as the ablation all_signals"):
        DistilledScheduler("pair", ablation="all_signals").bind(setting())
    with pytest.raises(ValueError, match="value_online"):
        DistilledScheduler(ablation="no_signals")


def test_under_a_table_that_knows_of_no_costs_it_falls_back_without_a_warning(shipped):
    save(shipped / "pair.safetensors", margin=1.0)
    distilled = DistilledScheduler()
    distilled.bind(setting())
    free = attrs.evolve(state(), statistics=Statistics(FixedCosts(), AcceptanceStats(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert distilled.decide(free) == distilled._fallback.decide(free)


@pytest.mark.parametrize("ratio", [0.5, 41.0])
def test_a_cost_ratio_outside_the_fitted_range_warns_once_and_falls_back(shipped, ratio):
    save(shipped / "pair.safetensors", margin=1.0)
    distilled = DistilledScheduler()
    distilled.bind(setting())
    outside = state(ratio)
    with pytest.warns(SchedulerWarning, match=f"t_target / t_middle is {ratio:.2f}, outside 1 to 40"):
        first = distilled.decide(outside)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert distilled.decide(outside) == first == distilled._fallback.decide(outside)


def with_steps(before, *names, drafted=False):
    """A state so many steps later; steps that `drafted` had a node to draft below, and found nothing there."""
    positions = np.zeros(int(drafted), np.int64)
    none = np.zeros(0, np.int64)
    steps = [StepRecord(name, before.tree, before.tree, positions, Expansion.empty(), none, 0, 0.0) for name in names]
    return attrs.evolve(before, steps=tuple(steps))


@pytest.mark.parametrize("first_call", range(2, 7))
def test_once_the_small_source_has_run_out_growth_goes_on_only_towards_a_call(shipped, first_call):
    save(shipped / "pair.safetensors", margin=0.5 - first_call, a_step=1.0)
    distilled = DistilledScheduler()
    distilled.bind(setting())
    answers = [distilled.decide(with_steps(state(), *["small"] * done)) for done in range(2, 5)]
    waiting = "small" if first_call < 5 else None
    assert answers == ["middle" if done >= first_call else waiting for done in range(2, 5)]


@pytest.mark.parametrize(("names", "drafted"), [([], False), (["small"], True), (["small", "middle"], False)])
def test_growth_does_not_end_while_the_small_source_may_find_something(shipped, names, drafted):
    save(shipped / "pair.safetensors", margin=-1.0)
    distilled = DistilledScheduler()
    distilled.bind(setting())
    assert distilled.decide(with_steps(state(), *names, drafted=drafted)) == "small"


def test_what_calls_cost_is_read_once_a_round(shipped):
    save(shipped / "pair.safetensors", margin=1.0)
    distilled = DistilledScheduler(max_calls=True)
    distilled.bind(setting())
    now = state(ratio=2.5)
    called = with_steps(now, "middle", "middle")
    assert distilled.decide(called) == "small"
    now.statistics.costs.target.ms[:] = 3.5
    assert distilled.decide(called) == "small"
    now.statistics.acceptance.learn_round(num_emitted=1, num_accepted=0, num_verified=0, modelled_ms=1.0)
    assert distilled.decide(called) == "middle"


def test_the_fallback_learns_gains_and_the_predictor_asks_for_none(shipped):
    save(shipped / "pair.safetensors", margin=1.0)
    distilled = DistilledScheduler()
    distilled.bind(setting())
    inside, outside = state(ratio=4.0), state(ratio=0.5)
    distilled.decide(inside)
    with pytest.warns(SchedulerWarning):
        distilled.decide(outside)
    assert not inside.statistics.acceptance.are_options_read
    assert outside.statistics.acceptance.are_options_read


def test_calls_can_be_capped_at_the_cost_ratio(shipped):
    save(shipped / "pair.safetensors", margin=1.0)
    distilled = DistilledScheduler(max_calls=True)
    distilled.bind(setting())
    before = state(ratio=2.5)
    assert distilled.decide(before) == "middle"
    assert distilled.decide(with_steps(before, "middle", "middle", drafted=True)) == "small"


def test_a_source_that_failed_leaves_the_rest_to_the_fallback(shipped):
    save(shipped / "pair.safetensors", margin=1.0)
    distilled = DistilledScheduler()
    distilled.bind(setting())
    whole = state()
    left = attrs.evolve(whole, sources={"small": whole.sources["small"]})
    assert distilled.decide(left) == distilled._fallback.decide(left)


def test_mode_value_needs_weights_that_kept_the_value_system(shipped):
    save(shipped / "pair.safetensors")
    with pytest.raises(ComposeError, match="holds no value system"):
        DistilledScheduler(mode="value").bind(setting())
