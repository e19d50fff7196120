"""Replay on the demo pair: rounds, labels and rows are those of live runs, greedy and sampled."""

import json
from functools import cache
from pathlib import Path

import attrs
import numpy as np
import pytest

import treegraft
from treegraft import Scheduler
from treegraft.registry import packaged_registry
from treegraft.replay import Recording, ReplayTarget, outcome_of, record, replay, schedules, tabulate, wants_of
from treegraft.sampling import SamplingOptions
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.schedulers.fixed import FixedScheduler

HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "data" / "demo_heldout.jsonl"
PROMPT = json.loads(HELD_OUT.read_text().splitlines()[5])["turns"][0]
FIXED = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}", "calibration=off")
COSTS = FixedCosts(target={1: 5.0, 64: 13.0}, sources={"small": 0.6, "middle": {1: 2.2, 10: 2.8, 32: 4.0}})
NUM_TOKENS = 24
TEMPERATURES = [0.0, 0.8]


@cache
def loaded(name: str, is_live: bool, *overrides: str) -> treegraft.Pipeline:
    models = {"target": "demo:target" if is_live else ReplayTarget(loaded("plain", True).target)}
    return treegraft.load(name, *overrides, models=models, registry=packaged_registry())


@cache
def recording(temperature: float) -> Recording:
    target = loaded("plain", True).target
    wants = wants_of([loaded("treegraft", False, *FIXED)])
    ids = target.tokenizer(PROMPT)["input_ids"]
    return record(target, ids, NUM_TOKENS, SamplingOptions(temperature), 3, wants)


def live_run(pipeline: treegraft.Pipeline, temperature: float) -> treegraft.Generation:
    return pipeline.generate(PROMPT, NUM_TOKENS, temperature, seed=3, keep_rounds=True)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("treegraft", FIXED), ("treegraft", ("costs={use: fixed}",)), ("all_middle", ("costs={use: fixed}",))],
)
def test_replayed_rounds_are_the_live_ones(name, overrides, temperature):
    live = live_run(loaded(name, True, *overrides), temperature)
    replayed = replay(loaded(name, False, *overrides), recording(temperature))
    assert replayed.token_ids == live.token_ids == recording(temperature).tokens.tolist()
    assert [len(done.verdict.path) for done in replayed.rounds] == [len(done.verdict.path) for done in live.rounds]
    for mine, its in zip(replayed.rounds, live.rounds, strict=True):
        assert [(step.source, step.num_rows) for step in mine.state.steps] == [
            (step.source, step.num_rows) for step in its.state.steps
        ]
        assert np.array_equal(mine.pruned.token, its.pruned.token)
    assert replayed.accepted_per_round > 0.5


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_schedules_followed_by_their_labels_are_live_runs(temperature):
    """Accepted tokens, calls and latencies of whole runs, those of which the middle has missed tokens included."""
    kept = recording(temperature)
    table = tabulate(schedules(loaded("treegraft", False, "steps=3", *FIXED), kept), len(kept.tokens))
    live = loaded("treegraft", True, "steps=3", *FIXED)
    missed = 0
    for pattern in (["middle"] * 3, ["middle", "small", "small"], ["small", "small", "middle"], ["small"] * 3):
        live.parts = attrs.evolve(live.parts, scheduler=FixedScheduler(pattern))
        rounds = live_run(live, temperature).rounds
        expected = outcome_of(rounds, COSTS)
        index = table.schedules.index(tuple(pattern))
        found = table.fixed(COSTS, index, 0)
        assert (found.num_rounds, found.num_accepted) == (expected.num_rounds, expected.num_accepted)
        assert found.num_verified == expected.num_verified and found.num_emitted == len(kept.tokens)
        assert {name: count for name, count in found.num_calls.items() if count} == expected.num_calls
        assert found.modelled_ms == pytest.approx(expected.modelled_ms)
        for done in rounds:
            start = done.state.position + 1 - len(kept.prompt)
            rows = np.array([step.num_rows for step in done.state.steps])
            assert table.num_accepted[start, index, 0] == len(done.verdict.path)
            missed += int((rows - table.num_rows[start, index, : len(rows)]).sum())
    assert missed > 5, "the middle had something to catch up"


class InTurns(Scheduler):
    """Another schedule of two steps every round."""

    def decide(self, state):
        return turn(state.statistics.acceptance.num_rounds)[len(state.steps)]


def turn(number: int) -> tuple[str, str]:
    return (("small", "middle"), ("small", "small"), ("middle", "small"), ("middle", "middle"))[number % 4]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_prefixes_of_a_followed_run_are_its_rounds_with_their_calibration(temperature):
    """The middle's cache is the run's own, too: all schedules were tried in between, and left no trace."""
    overrides = ("steps=2", *FIXED[:2])
    live = loaded("treegraft", True, *overrides)
    live.parts = attrs.evolve(live.parts, scheduler=InTurns())
    rounds = live_run(live, temperature).rounds
    prefixes = list(schedules(loaded("treegraft", False, *overrides), recording(temperature), follow=turn))
    assert len(rounds) == len(prefixes) > 4
    missed = 0
    for number, (prefix, done) in enumerate(zip(prefixes, rounds, strict=True)):
        label = prefix.labels[turn(number)]
        assert label.num_accepted.tolist() == [len(done.verdict.path)]
        assert np.array_equal(label.state.tree.token, done.state.tree.token)
        assert label.state.tree.path_score == pytest.approx(done.state.tree.path_score, abs=1e-4)
        rows = [step.num_rows for step in done.state.steps]
        missed += sum(rows) - int(label.num_rows.sum())
        assert (np.array(rows) >= label.num_rows[: len(rows)]).all()
    assert missed > 0, "the middle had something to catch up"
