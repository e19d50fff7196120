"""`gain_over_cost`: under known costs it does what pays, and no choice is for ever."""

import pytest

import treegraft
from treegraft.testing import FaultyDrafter, MarkovTarget, TableDrafter, markov_table

TABLE = markov_table(12, seed=3, spread=4.0)  # one token stands out after most contexts
FREE = "costs={use: fixed}"


def run(costs, *, num_tokens=150, pipeline="treegraft", temperature=0.0, table=TABLE):
    models = {"target": MarkovTarget(table), "middle": TableDrafter(table)}
    loaded = treegraft.load(pipeline, costs, models=models)
    return loaded.generate([1, 2, 3], num_tokens, temperature=temperature, seed=5, keep_rounds=True)


def verified(generation):
    return [len(record.pruned) - 1 for record in generation.rounds]


def test_free_drafting_and_a_flat_forward_verify_all_they_may():
    generation = run(FREE)
    assert generation.accepted_per_round > 1
    assert max(verified(generation)) > 20


def test_where_every_row_costs_a_whole_forward_it_decodes_plainly():
    generation = run("costs={use: fixed, target: {1: 10.0, 2: 20.0, 64: 640.0}}", temperature=1.0)
    late = verified(generation)[20:]
    assert late.count(0) > 0.9 * len(late)
    assert any(late), "the choice is probed now and then"


def test_a_middle_that_costs_more_than_it_can_bring_is_left_alone():
    generation = run("costs={use: fixed, target: 10.0, sources: {small: 0.01, middle: 200.0}}")
    assert generation.source_calls["middle"] == 0
    assert generation.source_calls["small"] > 0


@pytest.mark.parametrize("middle_ms", [1.0, 40.0])
def test_it_keeps_up_with_the_better_single_drafter(middle_ms):
    costs = "costs={use: fixed, target: 100.0, sources: {NAMES}}"
    varied = markov_table(40, seed=3, spread=2.0)  # text that a lookup guesses badly
    rates = {}
    for pipeline, sources in (
        ("all_small", "small: 0.1"),
        ("all_middle", f"middle: {middle_ms}"),
        ("treegraft", f"small: 0.1, middle: {middle_ms}"),
    ):
        generation = run(costs.replace("NAMES", sources), num_tokens=300, temperature=1.0, table=varied,
                         pipeline=pipeline)  # fmt: skip
        spent = 100.0 * generation.num_rounds + 0.1 * generation.source_calls.get("small", 0)
        rates[pipeline] = 300 / (spent + middle_ms * generation.source_calls.get("middle", 0))
    assert rates["treegraft"] > 0.93 * max(rates["all_small"], rates["all_middle"])


@pytest.mark.parametrize("middle_ms", [0.02, 0.5, 4.0, 50.0])
def test_probing_a_useless_option_stays_within_its_share_of_the_time(middle_ms):
    models = {"target": MarkovTarget(TABLE), "middle": FaultyDrafter("empty")}  # never proposes a thing
    costs = f"costs={{use: fixed, target: 10.0, sources: {{small: 0.01, middle: {middle_ms}}}}}"
    loaded = treegraft.load("treegraft", costs, "sources.middle.rescore=false", models=models)
    rounds = loaded.generate([1, 2, 3], 600, temperature=1.5, seed=5, keep_rounds=True).rounds[20:]
    calls = sum(step.source == "middle" for record in rounds for step in record.state.steps)
    assert calls * middle_ms <= 0.03 * 10.0 * len(rounds) + middle_ms
    assert calls > 0 or middle_ms > 1.0, "an option that can be afforded is never given up for good"


@pytest.mark.parametrize("pipeline", ["all_small", "all_middle", "treegraft_fixed"])
def test_the_budget_serves_any_scheduler(pipeline):
    generation = run(FREE, pipeline=pipeline)
    assert generation.accepted_per_round > 0
