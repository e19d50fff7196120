"""Replay over toy models: what it says of a round is what a live round does, without a forward of the target."""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treegraft
from treegraft import Drafter, DraftRequest, Expansion, Observation, RequestError, Scheduler, Wants
from treegraft.replay import (
    Outcome,
    Recording,
    ReplayTarget,
    ScheduleTable,
    outcome_of,
    record,
    replay,
    sampled_oracle,
    schedules,
    tabulate,
    wants_of,
)
from treegraft.sampling import SamplingOptions
from treegraft.testing import FaultyDrafter, MarkovTarget, TableDrafter, markov_table
from treegraft_plugins.budgets import FixedBudget
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.schedulers.fixed import FixedScheduler

V = 6
PROMPT = [0, 1, 2, 0, 1]
SMALLER = ("sources.small.width=2", "sources.small.branching=2", "sources.middle.width=2", "sources.middle.branching=2")
FIXED = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 12}", "calibration=off", "steps=3", *SMALLER)
GREEDY, SAMPLED = SamplingOptions(), SamplingOptions(temperature=1.0)


def target(**options: Any) -> MarkovTarget:
    return MarkovTarget(markov_table(V, seed=4), **options)


def near(seed: int = 9, share: float = 0.6) -> TableDrafter:
    """A drafter that is right rather often."""
    return TableDrafter(markov_table(V, seed=4) + share * markov_table(V, seed=seed))


def loaded(model: Any, *overrides: str, name: str = "treegraft_fixed", middle: Drafter | None = None) -> Any:
    return treegraft.load(name, *FIXED, *overrides, models={"target": model, "middle": middle or near()})


def recorded(model: Any, pipeline: Any, max_new_tokens: int = 20, options=GREEDY, **more: Any) -> Recording:
    return record(model, PROMPT, max_new_tokens, options, wants=wants_of([pipeline]), **more)


def set_parts(pipeline: Any, schedule: Sequence[str], budget: int = 12) -> None:
    """Give a loaded pipeline another schedule and budget."""
    pipeline.parts = attrs.evolve(pipeline.parts, scheduler=FixedScheduler(schedule), budget=FixedBudget(budget))


SCHEDULES = list(itertools.product(("small", "middle"), repeat=3))


def accepted(generation: Any) -> list[int]:
    return [len(done.verdict.path) for done in generation.rounds]


# -- recording --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, SamplingOptions(temperature=0.7, top_p=0.8)])
def test_a_recording_is_what_plain_decoding_emits_and_what_drafters_see_of_it(options):
    model = target()
    plain = treegraft.load("plain", models={"target": model})
    kept = record(model, PROMPT, 15, options, seed=3, wants=Wants(num_top=4))
    expected = plain.generate(PROMPT, 15, options.temperature, options.top_p, options.top_k, seed=3)
    assert kept.tokens.tolist() == expected.token_ids and kept.finish_reason == expected.finish_reason == "length"
    (seen,) = model.prefill([np.append(kept.text, 0)], Wants(num_top=4))
    assert np.array_equal(kept.top_ids, seen.top_ids) and np.array_equal(kept.top_log_probs, seen.top_log_probs)
    part = kept.observed(np.array([2, 7]), Wants(num_top=3))
    assert np.array_equal(part.tokens, kept.text[[2, 7]]) and np.array_equal(part.top_ids, seen.top_ids[[2, 7], :3])


@pytest.mark.parametrize(
    ("options", "limits", "reason"),
    [({"eos_ids": {5}}, 60, "eos"), ({"max_length": 12}, 60, "context_limit"), ({}, 9, "length"), ({}, 0, "length")],
)
def test_recordings_and_replays_end_as_requests_do(options, limits, reason):
    model = target(**options)
    replayed = loaded(ReplayTarget(model))
    kept = recorded(model, replayed, limits, SAMPLED, seed=1)
    live = loaded(model).generate(PROMPT, limits, 1.0, seed=1, keep_rounds=True)
    again = replay(replayed, kept)
    assert (kept.tokens.tolist(), kept.finish_reason) == (live.token_ids, reason)
    assert (again.token_ids, again.finish_reason, again.seed) == (live.token_ids, reason, 1)
    assert accepted(again) == accepted(live)


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(RequestError, match="0 tokens"):
        record(target(), [])
    with pytest.raises(RequestError, match=r"8 tokens.*\n.*1 to 7"):
        record(target(max_length=7), [0] * 8)


# -- pipelines --------------------------------------------------------------------------------------------------------


class NoForwards(MarkovTarget):
    """A target that must not be asked."""

    def prefill(self, prompts, wants):
        raise AssertionError("a forward of the target")

    score = prefill


@cache
def live_and_replayed(name: str) -> tuple[Any, Any]:
    """A pipeline of the registry twice, upon a target whose table can be changed and upon one that only replays."""
    overrides = ["costs={use: fixed, target: {1: 1.0, 13: 2.0}}"]
    if name != "plain":
        overrides += ["budget={use: gain_over_cost, verify_nodes: 12}"]
    have = {"plain": (), "all_small": SMALLER[:2], "all_middle": SMALLER[2:]}.get(name, SMALLER)
    live, replayed = (
        treegraft.load(name, *overrides, *have, models={"target": model, "middle": near()})
        for model in (target(), ReplayTarget(NoForwards(markov_table(V))))
    )
    return live, replayed


@pytest.mark.parametrize("name", ["all_small", "all_middle", "treegraft", "treegraft_fixed", "overwrite", "plain"])
@given(
    seed=st.integers(0, 50),
    spread=st.sampled_from([1.0, 3.0]),
    options=st.sampled_from([GREEDY, SAMPLED]),
    calibration=st.booleans(),
)
@settings(max_examples=10)
def test_replayed_rounds_are_the_live_ones(name, seed, spread, options, calibration):
    """Trees, budgets and verdicts, with schedulers and budgets that learn, and with scores calibrated on the way."""
    live, replayed = live_and_replayed(name)
    live.target.table = markov_table(V, seed=seed, spread=spread)
    live.calibration = replayed.calibration = calibration
    kept = record(MarkovTarget(live.target.table), PROMPT, 24, options, seed=2, wants=wants_of([live, replayed]))
    ours = replay(replayed, kept)
    theirs = live.generate(PROMPT, 24, options.temperature, seed=2, keep_rounds=True)
    assert ours.token_ids == theirs.token_ids and ours.faults == theirs.faults == []
    assert len(ours.rounds) == len(theirs.rounds)
    for mine, its in zip(ours.rounds, theirs.rounds, strict=True):
        assert np.array_equal(mine.pruned.nodes, its.pruned.nodes)
        assert np.array_equal(mine.verdict.path, its.verdict.path)
    assert outcome_of(ours.rounds, replayed.costs) == outcome_of(theirs.rounds, live.costs)


def test_hidden_states_are_served_as_asked_for():
    """A drafter sees of the text what it sees live, whichever other layers were recorded."""
    import torch

    @attrs.define(eq=False)
    class Watcher(Drafter):
        wants: Wants = attrs.field(factory=lambda: Wants(num_top=2, hidden_layers=(3,)))
        seen: list[Observation] = attrs.field(factory=list)

        def start(self, observation):
            self.seen.append(observation)

        observe = start

        def draft(self, request: DraftRequest) -> Expansion:
            return Expansion.from_rows({0: [(0, -0.1), (1, -0.2)]}) if 0 in request.positions else Expansion.empty()

    class Hidden(MarkovTarget):
        def _states(self, tokens, layers):
            return torch.tensor([[[float(10 * token + layer)] for layer in layers] for token in tokens])

        def prefill(self, prompts, wants):
            self.layers = wants.hidden_layers
            (seen,) = super().prefill(prompts, Wants(wants.num_top))
            return [attrs.evolve(seen, hidden=self._states(seen.tokens.tolist(), self.layers))]

        def score(self, trees):
            (scores,) = super().score(trees)
            return [attrs.evolve(scores, hidden_states=self._states(trees[0].token.tolist(), self.layers))]

    watchers = {name: Watcher() for name in ("live", "replayed")}
    model = Hidden(markov_table(V, seed=4))
    live, replayed = (
        treegraft.load("all_middle", "costs={use: fixed}", models={"target": each, "middle": watcher})
        for each, watcher in ((model, watchers["live"]), (ReplayTarget(model), watchers["replayed"]))
    )
    replay(replayed, record(model, PROMPT, 12, wants=Wants(num_top=3, hidden_layers=(1, 3))))
    live.generate(PROMPT, 12)
    assert len(watchers["live"].seen) == len(watchers["replayed"].seen) > 3
    for mine, its in zip(watchers["replayed"].seen, watchers["live"].seen, strict=True):
        assert mine.top_ids.shape[1] == 2 and torch.equal(mine.hidden, its.hidden) and mine.hidden.shape[1] == 1
        assert np.array_equal(mine.top_ids, its.top_ids) and np.array_equal(mine.tokens, its.tokens)


def test_what_cannot_be_replayed_is_refused():
    model = target()
    replayed = loaded(ReplayTarget(model))
    kept = recorded(model, replayed)
    with pytest.raises(RequestError, match="MarkovTarget for its target"):
        replay(loaded(model), kept)
    with pytest.raises(RequestError, match=r"costs=.use: fixed"):
        loaded(ReplayTarget(model), "costs={use: measured, cache: false}")
    with pytest.raises(RequestError, match=r"wants_of\(pipelines\)"):
        replay(replayed, record(model, PROMPT, 20, wants=Wants(num_top=3)))
    replay(replayed, kept)
    with pytest.raises(RequestError, match="another prompt"):
        replayed.generate([1, 1], 20)
    with pytest.raises(RequestError, match=r"Call replay\(pipeline, recording\)"):
        replayed.generate(PROMPT, 20, temperature=1.0)
    with pytest.raises(RequestError, match="off the recorded path"):
        replayed.target.prefill([kept.prompt], Wants())
        tree = treegraft.DraftTree.rooted(PROMPT[-1])
        wrong = (int(kept.tokens[0]) + 1) % V
        replayed.target.score([tree.append(Expansion([0], [wrong], [-0.1]), 0, [True])])[0].logits(1)


# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
@pytest.mark.parametrize("ending", [{}, {"eos_ids": {0}}])
def test_labels_are_what_live_rounds_from_the_same_prefix_do(options, ending):
    """Every schedule and every budget after every prefix, the last ones included."""
    chainless = "sources.small.draft.chain_factor=0"  # a chain is cut to what a budget has room for
    model, grid = target(**ending), [0, 1, 2, 5, 12]
    labelled = loaded(ReplayTarget(model), chainless)
    kept = recorded(model, labelled, 14, options, seed=5)
    assert kept.finish_reason == ("eos" if ending else "length")
    live, seen = loaded(model, chainless), set()
    for number, prefix in enumerate(schedules(labelled, kept, grid)):
        assert prefix.num_emitted == number and prefix.budgets.tolist() == grid
        prompt = [*PROMPT, *kept.tokens[:number].tolist()]
        for schedule, (place, budget) in itertools.product(SCHEDULES, enumerate(grid)):
            label = prefix.labels[schedule]
            set_parts(live, schedule, budget)
            done = next(live.rounds(prompt, 14 - number, options.temperature, seed=5))
            assert label.num_accepted[place] == len(done.verdict.path)
            assert label.num_emitted[place] == len(done.tokens)
            assert label.num_verified[place] == len(done.pruned) - 1
            assert np.array_equal(label.state.tree.nodes, done.state.tree.nodes)
            assert [step.source for step in label.state.steps] == [step.source for step in done.state.steps]
            assert label.num_rows.tolist() == [step.num_rows for step in done.state.steps] + [0] * (
                3 - len(done.state.steps)
            )
            assert label.is_call.sum() == sum(len(step.positions) > 0 for step in done.state.steps)
            for size, state in enumerate((*done.state.steps, done.state)):
                if schedule[:size] in prefix.states and size < 3:
                    tree = prefix.states[schedule[:size]].tree
                    assert np.array_equal(tree.nodes, getattr(state, "tree_before", done.state.tree).nodes)
            seen.add(int(label.num_accepted[place]))
        # Close to the end some trees cannot grow further, and then there is nothing to decide.
        assert len(prefix.labels) == 8 and (len(prefix.states) == 7 or number > 14 - 1 - 3)
    assert number == len(kept.tokens) - 1 and (ending or {0, 1, 2} <= seen)


class InTurns(Scheduler):
    """Another schedule every round."""

    def decide(self, state):
        step = len(state.steps)
        return turn(state.statistics.acceptance.num_rounds)[step] if step < 3 else None


def turn(number: int) -> tuple[str, ...]:
    return SCHEDULES[(5 * number + 3) % 8]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_prefixes_of_a_followed_run_are_its_rounds_with_what_they_have_taught(options):
    model = target()
    labelled = loaded(ReplayTarget(model), "calibration=on")
    kept = recorded(model, labelled, 80, options, seed=5)
    live = loaded(model, "calibration=on")
    live.parts = attrs.evolve(live.parts, scheduler=InTurns())
    rounds = live.generate(PROMPT, 80, options.temperature, seed=5, keep_rounds=True).rounds
    prefixes = list(schedules(labelled, kept, follow=turn))
    assert [prefix.num_emitted for prefix in prefixes] == [
        sum(len(done.tokens) for done in rounds[:number]) for number in range(len(rounds))
    ]
    for number, (prefix, done) in enumerate(zip(prefixes, rounds, strict=True)):
        label = prefix.labels[turn(number)]
        assert np.array_equal(label.state.tree.nodes, done.state.tree.nodes)  # scores, too
        assert label.num_accepted.tolist() == [len(done.verdict.path)]
    (raw,) = [each for each in schedules(loaded(ReplayTarget(model)), kept) if each.num_emitted == prefix.num_emitted]
    assert not np.array_equal(raw.labels[turn(number)].state.tree.path_score, done.state.tree.path_score)
    some = list(schedules(labelled, kept, every=3, follow=turn))
    assert [prefix.num_emitted for prefix in some] == [prefix.num_emitted for prefix in prefixes[::3]]


def test_every_so_many_and_some_sources_only():
    third = (
        "sources.third={draft: {use: ngram, mode: copy}, select: {use: newest}, graft: {use: non_destructive}, "
        "width: 2, branching: 2, rank: 0}"
    )
    model = target()
    labelled = loaded(ReplayTarget(model), third)
    kept = recorded(model, labelled, 20)
    some = list(schedules(labelled, kept, sources=["middle", "small"], every=7))
    assert [prefix.num_emitted for prefix in some] == [0, 7, 14]
    assert list(some[0].labels) == list(itertools.product(("middle", "small"), repeat=3))
    whole = list(schedules(labelled, kept, sources=["small", "middle"]))
    for prefix in some:
        for schedule, label in prefix.labels.items():
            other = whole[prefix.num_emitted].labels[schedule]
            assert np.array_equal(label.state.tree.nodes, other.state.tree.nodes)


def test_a_search_that_is_abandoned_ends_the_request():
    model = target()
    labelled = loaded(ReplayTarget(model))
    kept = recorded(model, labelled)
    search = schedules(labelled, kept)
    next(search)
    with pytest.raises(treegraft.PipelineBusyError):
        replay(labelled, kept)
    search.close()
    replay(labelled, kept)


@pytest.mark.parametrize(
    ("overrides", "arguments", "message"),
    [
        (["calibration=on"], {}, "calibration"),
        ([], {"sources": ["smal"]}, "no source named 'smal'.*\n.*Did you mean 'small'"),
        ([], {"budgets": [0, 13]}, r"\[0, 13\].*\n.*from 0 to 12"),
        ([], {"budgets": [3, 2]}, "ascending"),
        (["steps=11"], {}, "2 sources and 11 steps"),
    ],
)
def test_schedules_that_cannot_be_labelled_are_refused(overrides, arguments, message):
    model = target()
    labelled = loaded(ReplayTarget(model), *overrides)
    with pytest.raises(RequestError, match=message):
        schedules(labelled, recorded(model, labelled), **arguments)


@pytest.mark.filterwarnings("ignore::treegraft.DrafterWarning")
def test_a_drafter_that_fails_is_no_label():
    model = target()
    labelled = loaded(ReplayTarget(model), "sources.middle.rescore=false", middle=FaultyDrafter("raises"))
    with pytest.raises(RequestError, match=r"sources\.middle"):
        list(schedules(labelled, recorded(model, labelled)))


# -- throughput -------------------------------------------------------------------------------------------------------

COSTS = FixedCosts(
    target={1: 1.0, 9: 2.0, 33: 7.0}, sources={"a": {1: 0.1, 20: 0.4}, "b": {1: 0.5, 40: 3.0}}, context_ms=2.0
)


def random_table(seed: int, num_tokens: int = 6, num_budgets: int = 2) -> ScheduleTable:
    """Labels such as no drafter would bring, in which what is missed matters."""
    rng = np.random.default_rng(seed)
    names = tuple(itertools.product("ab", repeat=2))
    shape = (num_tokens, len(names), num_budgets)
    verified = np.sort(rng.integers(0, 30, shape), axis=-1)
    accepted = np.minimum(np.sort(rng.integers(0, 4, shape), axis=-1), np.arange(num_tokens, 0, -1)[:, None, None])
    emitted = np.minimum(accepted + 1, np.arange(num_tokens, 0, -1)[:, None, None])
    return ScheduleTable(
        schedules=names, sources=("a", "b"), source_of=np.array([[name == "b" for name in each] for each in names]) * 1,
        budgets=np.arange(num_budgets), starts=np.arange(num_tokens), positions=10 + 100 * np.arange(num_tokens),
        num_tokens=num_tokens, num_verified=verified, num_accepted=accepted, num_emitted=emitted,
        num_rows=rng.integers(0, 12, (num_tokens, len(names), 2)), is_call=rng.random((*shape[:2], 2)) < 0.8,
        num_missed=rng.integers(0, 9, (*shape, 2)),
    )  # fmt: skip


def by_hand(table: ScheduleTable, prefix: int, schedule: int, budget: int, missed: dict[str, int]):
    """Latency of a round (ms), and what it leaves missed."""
    ms = float(COSTS.target_ms(table.num_verified[prefix, schedule, budget] + 1, int(table.positions[prefix])))
    missed, left = dict(missed), {"a": 0, "b": 0}
    called = set()
    for step, name in enumerate(table.schedules[schedule]):
        rows = int(table.num_rows[prefix, schedule, step])
        if rows and name not in called:
            called.add(name)
            rows += missed[name]
        if table.is_call[prefix, schedule, step]:
            ms += float(COSTS.source_ms(name, rows))
    for index, name in enumerate("ab"):
        left[name] = int(table.num_missed[prefix, schedule, budget, index]) + (0 if name in called else missed[name])
    return ms, left


@pytest.mark.parametrize("seed", range(4))
def test_a_fixed_schedule_is_followed_round_by_round(seed):
    table = random_table(seed, num_tokens=25)
    for schedule, budget in itertools.product(range(4), range(2)):
        prefix, ms, missed, rounds = 0, 0.0, {"a": 0, "b": 0}, []
        while prefix < 25:
            took, missed = by_hand(table, prefix, schedule, budget, missed)
            ms += took
            rounds.append(int(table.num_accepted[prefix, schedule, budget]))
            prefix += int(table.num_emitted[prefix, schedule, budget])
        found = table.fixed(COSTS, schedule, budget)
        assert found.modelled_ms == pytest.approx(ms) and found.num_emitted == 25
        assert (found.num_rounds, found.num_accepted) == (len(rounds), sum(rounds))


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_is_the_best_of_all_ways_through_the_text(seed):
    table = random_table(seed)

    def least(prefix: int, missed: dict[str, int]) -> float:
        if prefix == table.num_tokens:
            return 0.0
        ways = []
        for schedule, budget in itertools.product(range(4), range(2)):
            ms, left = by_hand(table, prefix, schedule, budget, missed)
            ways.append(ms + least(prefix + int(table.num_emitted[prefix, schedule, budget]), left))
        return min(ways)

    found = table.oracle(COSTS)
    assert found.modelled_ms == pytest.approx(least(0, {"a": 0, "b": 0})) and found.num_emitted == table.num_tokens
    fixed = [table.fixed(COSTS, *choice) for choice in itertools.product(range(4), range(2))]
    assert all(found.modelled_ms <= each.modelled_ms for each in fixed)


@pytest.mark.parametrize("seed", range(4))
def test_of_prefixes_with_gaps_the_oracle_maximises_the_ratio(seed):
    tables = [attrs.evolve(random_table(seed + add, num_tokens=2), num_tokens=9) for add in (0, 40)]
    choices = list(itertools.product(range(4), range(2)))
    best = 0.0
    for chosen in itertools.product(choices, repeat=4):
        places = [(tables[number // 2], number % 2, *choice) for number, choice in enumerate(chosen)]
        emitted = sum(int(table.num_emitted[prefix, s, b]) for table, prefix, s, b in places)
        ms = sum(by_hand(table, prefix, s, b, {"a": 0, "b": 0})[0] for table, prefix, s, b in places)
        best = max(best, emitted / ms)
    found = sampled_oracle(tables, COSTS)
    assert found.num_emitted / found.modelled_ms == pytest.approx(best) and found.num_rounds == 4
    with pytest.raises(RequestError, match="2 of 9 prefixes"):
        tables[0].oracle(COSTS)
    total = tables[0].fixed(COSTS, 1, 0)
    assert total.num_rounds == 2 and total.modelled_ms == pytest.approx(
        sum(by_hand(tables[0], prefix, 1, 0, {"a": 0, "b": 0})[0] for prefix in range(2))
    )


def test_a_fixed_schedule_through_the_text_is_the_pipelines_own_run():
    model = target()
    labelled = loaded(ReplayTarget(model))
    costs = FixedCosts(target={1: 1.0, 13: 2.0}, sources={"small": 0.1, "middle": {1: 0.2, 4: 0.6}})
    kept = recorded(model, labelled, 30, SAMPLED, seed=8)
    table = tabulate(schedules(labelled, kept), len(kept.tokens))
    total = Outcome()
    alone = loaded(ReplayTarget(model))
    for number, schedule in enumerate(table.schedules):
        set_parts(alone, schedule)
        found, expected = table.fixed(costs, number, 0), outcome_of(replay(alone, kept).rounds, costs)
        assert attrs.evolve(found, modelled_ms=0, num_calls={}) == attrs.evolve(expected, modelled_ms=0, num_calls={})
        assert found.modelled_ms == pytest.approx(expected.modelled_ms)
        assert {name: count for name, count in found.num_calls.items() if count} == expected.num_calls
        total += found
    assert total.num_emitted == 8 * len(kept.tokens)
    assert total.accepted_per_round == total.num_accepted / total.num_rounds
    assert total.tokens_per_second == pytest.approx(1e3 * total.num_emitted / total.modelled_ms)
    assert Outcome().tokens_per_second is None and Outcome().accepted_per_round == 0.0
