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


def test_a_middle_that_costs_more_than_it_brings_is_left_out_but_probed():
    generation = run("costs={use: fixed, target: 10.0, sources: {small: 0.01, middle: 200.0}}")
    calls = [any(step.source == "middle" for step in record.state.steps) for record in generation.rounds]
    assert calls[0], "the first round tries it"
    assert sum(calls[6:]) <= max(1, len(calls[6:]) // 32)


def test_a_cheap_middle_that_knows_the_target_is_called():
    costs = "costs={use: fixed, target: 100.0, sources: {small: 0.1, middle: 1.0}}"
    varied = markov_table(40, seed=3, spread=2.0)  # text that no lookup can guess
    generation = run(costs, temperature=1.0, table=varied)
    called = sum(any(step.source == "middle" for step in record.state.steps) for record in generation.rounds)
    assert called > 0.8 * generation.num_rounds


def middle_calls(middle_ms: float) -> tuple[int, int]:
    """Rounds in which a middle that never proposes a thing is called after the first ones, and rounds in all."""
    models = {"target": MarkovTarget(TABLE), "middle": FaultyDrafter("empty")}
    costs = f"costs={{use: fixed, target: 10.0, sources: {{small: 0.01, middle: {middle_ms}}}}}"
    loaded = treegraft.load("treegraft", costs, "sources.middle.rescore=false", models=models)
    rounds = loaded.generate([1, 2, 3], 600, temperature=1.5, seed=5, keep_rounds=True).rounds[8:]
    return sum(any(step.source == "middle" for step in record.state.steps) for record in rounds), len(rounds)


def test_a_useless_option_is_probed_now_and_then():
    calls, rounds = middle_calls(middle_ms=0.02)
    assert 0 < calls <= rounds / 32 * 5  # five steps, each an option of its own


def test_an_option_too_dear_for_its_share_of_the_time_is_not_probed():
    calls, _ = middle_calls(middle_ms=50.0)
    assert calls == 0


@pytest.mark.parametrize("pipeline", ["all_small", "all_middle", "treegraft_fixed"])
def test_the_budget_serves_any_scheduler(pipeline):
    generation = run(FREE, pipeline=pipeline)
    assert generation.accepted_per_round > 0
