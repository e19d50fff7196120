"""A benchmark run over a table for a target: interleaving, one clock and counter, resuming, texts; and planted
unfairness, which must be found.
"""

import json
from collections import Counter

import attrs
import pytest

from treegraft.bench import checks
from treegraft.bench.arms import Answer, Arm, Request, Told
from treegraft.bench.prompts import Prompt
from treegraft.bench.records import (
    LINES,
    MANIFEST,
    SUMMARY,
    TABLE,
    Round,
    read_divergences,
    read_manifest,
    read_records,
)
from treegraft.bench.run import Bench, Plan, Task, check_same, earlier_manifest, run
from treegraft.errors import RequestError
from treegraft.testing import MarkovTarget, markov_table

pytest.importorskip("pyarrow")

EOS = 6
TABLE_OF_LOGITS = markov_table(7, order=1, seed=3)
TABLE_OF_LOGITS[:, EOS] = -20.0  # never, save where a test says so
IDS = ((1, 2, 3), (4, 5), (2, 2, 2))
PLAN = Plan(max_new_tokens=(6,), temperatures=(0.0,), seed=5, repeats=2)


class Clock:
    """Seconds that pass when an arm says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@attrs.define(eq=False)
class TableArm(Arm):
    """Greedy, off the table; a token takes `ms`."""

    name: str
    clock: Clock
    ms: float = 1.0
    is_ours: bool = True
    repeats_plain: bool = True
    drafts: bool = True
    verify_nodes: int = 9
    log: list = attrs.field(factory=list)

    def settings(self):
        return {
            "steps": 3, "verify_nodes": self.verify_nodes, "sources.small.width": 4, "sources.small.branching": 2,
        }  # fmt: skip

    def asked(self):
        return {"verify_nodes": 9}

    def run(self, prompt, request):
        ids = self.decoded(list(prompt), request)
        self.clock.now += self.ms * len(ids) / 1e3
        self.log.append((tuple(prompt), request))
        return Answer(ids, lambda: self.told(ids, request))

    def decoded(self, text, request):
        ids = []
        while len(ids) < request.max_new_tokens and EOS not in ids:
            ids.append(int(self.table()[(text + ids)[-1]].argmax()))
        return ids

    def table(self):
        return TABLE_OF_LOGITS

    def told(self, ids, request):
        settings = {"max_new_tokens": request.max_new_tokens, "temperature": request.temperature}
        return Told(settings=settings, rounds=[Round(1, 0, 0, 0) for _ in ids])


def bench_of(*arms, plan=PLAN, clock=None, ids=IDS):
    tasks = [
        Task(Prompt(str(n), "even" if n % 2 == 0 else "odd", ("x",), "p.jsonl"), each) for n, each in enumerate(ids)
    ]
    return Bench(arms, MarkovTarget(TABLE_OF_LOGITS, eos_ids={EOS}), tasks, plan, clock=clock or arms[0].clock)


def manifest_of(bench):
    return {
        "arms": [arm.name for arm in bench.arms], "dtype": "float64", "settings": {"vary": []},
        "arm_settings": {arm.name: {"drafts": arm.drafts, **arm.settings()} for arm in bench.arms},
    }  # fmt: skip


def finished(bench, folder):
    """Run, and what is wrong with it."""
    run(bench, folder, manifest_of(bench), earlier_manifest(folder))
    return checks.problems(read_manifest(folder), read_records(folder), read_divergences(folder))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fair(clock):
    return [TableArm("plain", clock), TableArm("fast", clock, ms=0.25)]


# -- a fair run -------------------------------------------------------------------------------------------------------


def test_every_arm_answers_every_prompt_by_one_clock_and_one_counter(fair, tmp_path):
    folder = tmp_path / "run"
    assert finished(bench_of(*fair), folder) == []
    records = read_records(folder)
    assert len(records) == 2 * 3 * 2
    assert {record.cell for record in records if record.arm == "plain"} == {record.cell for record in records}
    assert {record.total_ms for record in records if record.arm == "plain"} == {6.0}
    assert {record.total_ms for record in records if record.arm == "fast"} == {1.5}
    assert {(record.prompt_id, record.category) for record in records} == {("0", "even"), ("1", "odd"), ("2", "even")}
    assert all(record.text_ok and record.num_new_tokens == 6 and record.finish_reason == "length" for record in records)
    assert {record.seed - record.repeat for record in records} == {5}
    manifest = read_manifest(folder)
    assert manifest["complete"] and manifest["warm_ups"] == {"plain": 1, "fast": 1}
    assert (folder / TABLE).exists() and not (folder / LINES).exists()


def test_arms_take_turns_within_a_prompt_in_an_order_of_its_own(clock, tmp_path):
    names = ["plain", "b", "c", "d"]
    bench = bench_of(*(TableArm(name, clock) for name in names), plan=attrs.evolve(PLAN, repeats=8))
    finished(bench, tmp_path / "run")
    records = read_records(tmp_path / "run")
    turns = [records[begin : begin + 4] for begin in range(0, len(records), 4)]
    assert all(len({record.cell for record in turn}) == 1 for turn in turns)
    assert all({record.arm for record in turn} == set(names) for turn in turns)
    assert [record.order for record in records] == [0, 1, 2, 3] * len(turns)
    assert len({tuple(record.arm for record in turn) for turn in turns}) > 8
    firsts = Counter(turn[0].arm for turn in turns)
    assert all(2 <= firsts[name] <= 12 for name in names), "of 24"


def test_lengths_and_temperatures_are_crossed(fair, tmp_path):
    plan = attrs.evolve(PLAN, max_new_tokens=(2, 4), temperatures=(0.0, 0.5), repeats=1)
    finished(bench_of(*fair, plan=plan), tmp_path / "run")
    found = Counter((r.max_new_tokens, r.temperature) for r in read_records(tmp_path / "run"))
    assert found == {(length, temperature): 6 for length in (2, 4) for temperature in (0.0, 0.5)}


def test_eos_counts_and_nothing_behind_it(clock, tmp_path, monkeypatch):
    table = TABLE_OF_LOGITS.copy()
    table[int(table[3].argmax()), EOS] = 20.0  # the second token after (1, 2, 3)
    monkeypatch.setattr(TableArm, "table", lambda self: table)
    bench = bench_of(TableArm("plain", clock), ids=IDS[:1])
    finished(attrs.evolve(bench, target=MarkovTarget(table, eos_ids={EOS})), tmp_path / "run")
    (record, _) = read_records(tmp_path / "run")
    assert (record.num_new_tokens, record.token_ids[-1], record.finish_reason) == (2, EOS, "eos")


def test_prompts_without_room_are_refused(fair):
    bench = bench_of(*fair)
    bench.target.max_length = 8
    with pytest.raises(RequestError, match=r"p\.jsonl: prompt '0': 3 tokens, and 6 to come"):
        bench.check_lengths()


# -- interruption -----------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@attrs.define(eq=False)
class Stops(TableArm):
    """Is interrupted in its n-th measured request (after a warm-up and three probes)."""

    stop_at: int = 7

    def run(self, prompt, request):
        if len(self.log) == self.stop_at:
            raise Interrupted
        return TableArm.run(self, prompt, request)


def test_an_interrupted_run_goes_on_where_it_stopped_and_ends_as_if_it_had_not(fair, clock, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finished(bench_of(*fair), whole)
    with pytest.raises(Interrupted):
        finished(bench_of(fair[0], Stops("fast", clock, ms=0.25)), parts)
    before = (parts / LINES).read_text()
    assert 3 <= before.count("\n") <= 8 and not read_manifest(parts)["complete"]
    with (parts / LINES).open("a") as file:
        file.write('{"arm": "plain", "pro')  # what a killed process may leave
    for arm in fair:
        arm.log.clear()
    assert finished(bench_of(*fair), parts) == []
    redone = sum(len(arm.log) - 4 for arm in fair)  # three probes and a warm-up each
    assert redone == 12 - before.count("\n"), "what was done is not done again"

    def stripped(folder):
        return [attrs.evolve(record, cpu_load=None) for record in read_records(folder)]

    assert stripped(parts) == stripped(whole)
    assert len(read_manifest(parts)["sessions"]) == 2


def test_a_finished_folder_is_never_written_to_again(fair, tmp_path):
    folder = tmp_path / "run"
    finished(bench_of(*fair), folder)
    assert earlier_manifest(folder)["complete"], "nothing is left but to sum it up"
    (folder / SUMMARY).write_text("{}")
    with pytest.raises(RequestError, match=r"a run that finished.*\n.*Finished runs are never changed"):
        earlier_manifest(folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("...")
    with pytest.raises(RequestError, match="neither new nor a run's folder"):
        earlier_manifest(tmp_path / "mine")
    assert earlier_manifest(tmp_path / "new") is None


def test_a_run_begun_otherwise_is_not_gone_on_with(fair, tmp_path):
    earlier = {"arms": ["plain"], "settings": {"seed": 1, "limit": None}, "versions": {"torch": "2.1"}}
    check_same(tmp_path, earlier, json.loads(json.dumps(earlier)))
    check_same(tmp_path, earlier, {"arms": ("plain",)})
    now = {"arms": ["plain"], "settings": {"seed": 2, "limit": None}, "versions": {"torch": "2.2"}}
    with pytest.raises(RequestError, match=r"settings\.seed was 1, is 2 \(and 1 more\)"):
        check_same(tmp_path, earlier, now)


# -- planted unfairness -----------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Remembers(TableArm):
    """Answers a prompt that it has seen before in one round."""

    seen: set = attrs.field(factory=set)

    def told(self, ids, request):
        told, prompt = TableArm.told(self, ids, request), self.log[-1][0]
        rounds = [Round(len(ids), len(ids) - 1, 5, 5)] if prompt in self.seen else told.rounds
        self.seen.add(prompt)
        return attrs.evolve(told, rounds=rounds)


@attrs.define(eq=False)
class GoesOn(TableArm):
    """Does not stop at EOS."""

    def decoded(self, text, request):
        ids = TableArm.decoded(self, text, request)
        return ids + [0] * (request.max_new_tokens - len(ids))


@attrs.define(eq=False)
class CutsShort(TableArm):
    """Makes do with half the tokens."""

    def decoded(self, text, request):
        return TableArm.decoded(self, text, attrs.evolve(request, max_new_tokens=request.max_new_tokens // 2))


@attrs.define(eq=False)
class Hotter(TableArm):
    """Takes another temperature than it was asked to."""

    def told(self, ids, request):
        return TableArm.told(self, ids, attrs.evolve(request, temperature=1.0))


@attrs.define(eq=False)
class Cold(TableArm):
    """Does nothing until it is measured: three probes, a warm-up, and then in earnest."""

    def decoded(self, text, request):
        return [] if len(self.log) < 4 else TableArm.decoded(self, text, request)


@attrs.define(eq=False)
class Invents(TableArm):
    """Emits one wrong token."""

    def decoded(self, text, request):
        ids = TableArm.decoded(self, text, request)
        return [*ids[:2], (ids[2] + 1) % EOS, *ids[3:]]


@attrs.define(eq=False)
class Boasts(TableArm):
    """Says that its rounds emitted more than they did."""

    def told(self, ids, request):
        told = TableArm.told(self, ids, request)
        return attrs.evolve(told, rounds=[*told.rounds, Round(1, 0, 0, 0)])


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Remembers, "planted: it keeps state between prompts"),
        (CutsShort, "planted: it ended after 3 of 6 tokens without EOS"),
        (Hotter, "planted: temperature was to be 0.0 and was 1.0"),
        (Cold, "planted: measured after 0 warm-up requests, others after 1"),
        (Invents, "planted: its text differs"),
        (Boasts, "planted: its rounds emitted 7 tokens, it says 6"),
    ],
)
def test_planted_unfairness_is_found(fair, clock, tmp_path, kind, sentence):
    found = finished(bench_of(*fair, kind("planted", clock)), tmp_path / "run")
    assert any(each.startswith(sentence) for each in found), found
    assert all(each.startswith("planted: ") or "planted" in each for each in found), "and the others are not blamed"


def test_tokens_after_eos_are_found_and_do_not_count(clock, tmp_path, monkeypatch):
    table = TABLE_OF_LOGITS.copy()
    table[int(table[3].argmax()), EOS] = 20.0
    monkeypatch.setattr(TableArm, "table", lambda self: table)
    bench = bench_of(TableArm("plain", clock), GoesOn("planted", clock), ids=IDS[:1])
    found = finished(attrs.evolve(bench, target=MarkovTarget(table, eos_ids={EOS})), tmp_path / "run")
    assert any(each.startswith("planted: 4 tokens after EOS") for each in found), found
    assert {record.num_new_tokens for record in read_records(tmp_path / "run")} == {2}


def test_an_option_that_is_ignored_is_found(fair, clock, tmp_path):
    found = finished(bench_of(*fair, TableArm("planted", clock, verify_nodes=5)), tmp_path / "run")
    assert "planted: verify_nodes was to be 9 and is 5" in found


def test_arms_that_must_share_a_setting_and_do_not_are_refused(fair, clock):
    arms = [*fair, TableArm("planted", clock, verify_nodes=5)]
    with pytest.raises(
        RequestError, match=r"differ in verify_nodes: plain 9, fast 9, planted 5.*\n.*--vary verify_nodes"
    ):
        checks.check_shared(arms, [])
    checks.check_shared(arms, ["verify_nodes"])
    checks.check_shared([*fair, TableArm("aside", clock, verify_nodes=0, drafts=False)], [])
    with pytest.raises(RequestError, match=r"--vary node.*\n.*Did you mean 'width'|--vary widht.*\n.*'width'"):
        checks.check_vary(["widht"])


@pytest.mark.parametrize("name", ["max_new_tokens", "temperature", "verify_nodes"])
def test_records_that_differ_in_what_they_must_share_are_found(fair, tmp_path, name):
    bench = bench_of(*fair)
    assert finished(bench, tmp_path / "run") == []
    manifest, records = read_manifest(tmp_path / "run"), read_records(tmp_path / "run")
    for index, record in enumerate(records):
        record.settings_read_back["verify_nodes"] = 9
        if record.arm == "fast":
            records[index] = attrs.evolve(record, settings_read_back={**record.settings_read_back, name: 3})
    (found,) = checks.problems(manifest, records, [])
    assert found.startswith(f"arms differ in {name}: ") and "fast 3" in found


def test_missing_requests_and_wrong_counts_are_found(fair, tmp_path):
    finished(bench_of(*fair), tmp_path / "run")
    manifest, records = read_manifest(tmp_path / "run"), read_records(tmp_path / "run")
    assert checks.problems(manifest, records[:-1], []) == [f"{records[-1].arm}: 1 requests are missing"]
    counted_on = [attrs.evolve(records[0], num_new_tokens=9), *records[1:]]
    assert checks.problems(manifest, counted_on, []) == [f"{records[0].arm}: another count than its ids"]


# -- texts ------------------------------------------------------------------------------------------------------------


def test_a_divergence_has_its_place_and_its_gap(fair, clock, tmp_path):
    bench = bench_of(*fair, Invents("planted", clock), plan=attrs.evolve(PLAN, repeats=1))
    finished(bench, tmp_path / "run")
    divergences = read_divergences(tmp_path / "run")
    assert [each["prompt_id"] for each in divergences] == ["0", "1", "2"]
    first = divergences[0]
    assert (first["arm"], first["reference"], first["index"], first["position"]) == ("planted", "plain", 2, 5)
    right = fair[0].decoded([1, 2, 3], Request(6, 0.0, 5))
    assert (first["expected_id"], first["found_id"]) == (right[2], (right[2] + 1) % EOS)
    row = TABLE_OF_LOGITS[right[1]]
    assert first["logit_gap"] == pytest.approx(row[right[2]] - row[first["found_id"]], rel=1e-6)
    assert (first["expected_gap"], first["found_gap"]) == (0.0, pytest.approx(first["logit_gap"], rel=1e-6))
    assert {record.text_ok for record in read_records(tmp_path / "run") if record.arm == "planted"} == {False}


def test_in_half_precision_a_divergence_is_listed_and_no_more(fair, clock, tmp_path):
    bench = bench_of(*fair, Invents("planted", clock))
    manifest = manifest_of(bench) | {"dtype": "bfloat16"}
    run(bench, tmp_path / "run", manifest, None)
    found = (read_manifest(tmp_path / "run"), read_records(tmp_path / "run"), read_divergences(tmp_path / "run"))
    assert checks.problems(*found) == [] and len(found[2]) == 6


def test_arms_whose_sampled_text_is_another_are_compared_at_temperature_0_only(fair, clock, tmp_path):
    plan = attrs.evolve(PLAN, temperatures=(0.0, 0.7), repeats=1)
    finished(bench_of(*fair, Invents("theirs", clock, repeats_plain=False), plan=plan), tmp_path / "run")
    records = [record for record in read_records(tmp_path / "run") if record.arm == "theirs"]
    assert {record.temperature: record.text_ok for record in records} == {0.0: False, 0.7: None}
    assert {each["temperature"] for each in read_divergences(tmp_path / "run")} == {0.0}


# -- settings that an arm looks for -----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Searches(TableArm):
    """Takes the faster of two speeds."""

    def tune(self, prompts, requests, timed):
        rates = {}
        for ms in (1.0, 0.5):
            self.ms = ms
            rates[str(ms)] = sum(timed(ids, requests[0]) for ids in prompts)
        return {"chosen": max(rates, key=rates.get), "rates": rates}

    def choose(self, found):
        self.ms = float(found["chosen"])


def test_what_an_arm_found_is_kept_for_when_the_run_is_gone_on_with(fair, clock, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        finished(bench_of(Stops("plain", clock), Searches("searches", clock)), folder)
    searched = read_manifest(folder)["searched"]["searches"]
    assert searched["chosen"] == "0.5" and searched["rates"]["0.5"] == pytest.approx(6000.0)
    num_done = sum(record.arm == "searches" for record in read_records(folder))
    again = Searches("searches", clock)
    assert finished(bench_of(fair[0], again), folder) == []
    assert (again.ms, len(again.log)) == (0.5, 4 + 6 - num_done), "three probes, a warm-up, and what was left"
    assert {r.total_ms for r in read_records(folder) if r.arm == "searches"} == {3.0}
    assert json.loads((folder / MANIFEST).read_text())["searched"]["searches"] == searched
