"""Figures of a benchmark from records with known answers: rates, ratios, intervals, what makes a run invalid."""

import json
import re

import attrs
import numpy as np
import pytest
from click.testing import CliRunner

from treegraft.bench import intervals
from treegraft.bench.intervals import Work, ratio
from treegraft.bench.pairs import compare_arms
from treegraft.bench.plots import arm_looks, draw_plots
from treegraft.bench.records import Record, Round, write_manifest, write_records
from treegraft.bench.report import compare_runs, markdown, pairs_table
from treegraft.bench.summary import PARTS, Row, summarize, write_summary
from treegraft.cli import main

MANIFEST = {
    "complete": True,
    "dtype": "float32",
    "device": "cpu",
    "versions": {"treegraft": "0.1.0", "torch": "2.13.0"},
    "models": {"target": "demo:target"},
    "prompts": [{"file": "prompts.jsonl", "sha256": "ab", "num_prompts": 2}],
    "settings": {"seed": 1, "repeats": 2},
    "eos_ids": [0],
}


def manifest_of(records, **others):
    arms = list(dict.fromkeys(each.arm for each in records))
    return MANIFEST | {"arms": arms, "warm_ups": dict.fromkeys(arms, 1)} | others


def record(arm, prompt=0, repeat=0, *, num_tokens=10, ms=100.0, prefill_ms=20.0, **others):
    values = {
        "arm": arm, "prompt_id": str(prompt), "category": "even" if prompt % 2 == 0 else "odd", "file": "prompts.jsonl",
        "temperature": 0.0, "max_new_tokens": 16, "seed": 1 + repeat, "repeat": repeat, "order": 0,
        "num_prompt_tokens": 5, "token_ids": list(range(1, num_tokens + 1)), "num_new_tokens": num_tokens,
        "finish_reason": "length", "prefill_ms": prefill_ms, "total_ms": ms,
    }  # fmt: skip
    return Record(**values | others)


def a_round(accepted=0, **others):
    ms = {"schedule": 1.0, "draft": 2.0, "build": 3.0, "target": 20.0, "verify": 4.0, "commit": 5.0, "learn": 1.0}
    values = {"emitted": accepted + 1, "accepted": accepted, "verified": 8, "drafted": 12, "ms": ms}
    return Round(**values | others)


def rows_of(records, category=None, **manifest):
    summary = summarize(manifest_of(records, **manifest), records, [])
    return {row["arm"]: row for row in summary["rows"] if row["category"] == category}


# -- rates and ratios -------------------------------------------------------------------------------------------------


def test_a_rate_is_all_tokens_over_all_time_and_not_a_mean_of_rates():
    records = [record("plain", 0, num_tokens=10, ms=100.0), record("plain", 1, num_tokens=2, ms=500.0)]
    assert rows_of(records)["plain"]["tokens_per_second"] == pytest.approx(12 / 0.6)


def test_rates_are_medians_over_repeats_with_their_range():
    records = [record("plain", 0, repeat, ms=ms) for repeat, ms in enumerate((100.0, 50.0, 400.0))]
    row = rows_of(records)["plain"]
    assert row["tokens_per_second"] == pytest.approx(100.0)
    assert row["tokens_per_second_range"] == pytest.approx((25.0, 200.0))
    assert row["num_repeats"] == 3


def test_without_prefill_its_time_and_the_tokens_it_brought_are_left_out():
    ours = record("plain", num_tokens=10, ms=120.0, prefill_ms=20.0)
    theirs = record("hf_plain", num_tokens=10, ms=120.0, prefill_ms=30.0, num_prefill_tokens=1)
    rows = rows_of([ours, theirs])
    assert rows["plain"]["tokens_per_second"] == pytest.approx(10 / 0.12)
    assert rows["plain"]["tokens_per_second_decode"] == pytest.approx(10 / 0.1)
    assert rows["hf_plain"]["tokens_per_second_decode"] == pytest.approx(9 / 0.09)
    assert rows["hf_plain"]["ratio_to_plain"] == pytest.approx(1.0)


def test_an_arm_that_cannot_tell_its_prefill_has_no_rate_without_it():
    rows = rows_of([record("plain"), record("fast", prefill_ms=None)])
    assert rows["fast"]["tokens_per_second_decode"] is None
    assert rows["fast"]["ratio_to_plain_decode"] is None
    assert rows["fast"]["ratio_to_plain"] is not None


def test_a_request_that_prefill_answers_has_no_rate_without_it():
    whole = record("hf_plain", num_tokens=1, ms=30.0, prefill_ms=30.0, num_prefill_tokens=1)
    rows = rows_of([record("plain", num_tokens=1, ms=30.0), whole])
    assert rows["hf_plain"]["tokens_per_second"] == pytest.approx(1 / 0.03)
    assert rows["hf_plain"]["tokens_per_second_decode"] is rows["hf_plain"]["ratio_to_plain_decode"] is None
    assert rows["plain"]["tokens_per_second_decode"] == pytest.approx(1 / 0.01)


def test_ratios_pair_requests_and_are_medians_over_repeats():
    records = []
    for repeat, (plain_ms, fast_ms) in enumerate([(100.0, 50.0), (100.0, 25.0), (300.0, 100.0)]):
        records += [record("plain", 0, repeat, ms=plain_ms), record("fast", 0, repeat, ms=fast_ms)]
    records.append(record("plain", 1, 0, ms=1e6))  # a request that the other arm lacks
    row = rows_of(records)["fast"]
    assert row["ratio_to_plain"] == pytest.approx(3.0)
    assert row["ratio_range"] == pytest.approx((2.0, 4.0))


def test_prompts_of_two_files_with_one_id_are_two_prompts():
    records = [
        record(arm, 0, file=file, ms=ms)
        for file, ms in (("a.jsonl", 100.0), ("b.jsonl", 300.0))
        for arm in ("plain", "fast")
    ]
    row = rows_of(records)["fast"]
    assert row["num_prompts"] == 2
    assert row["tokens_per_second"] == pytest.approx(20 / 0.4)


def test_categories_have_rows_of_their_own_and_null_stands_for_all():
    records = [
        record(arm, prompt, ms=ms / (2 if arm == "fast" and prompt == 1 else 1))
        for prompt, ms in ((0, 100.0), (1, 100.0))
        for arm in ("plain", "fast")
    ]
    assert rows_of(records, "even")["fast"]["ratio_to_plain"] == pytest.approx(1.0)
    assert rows_of(records, "odd")["fast"]["ratio_to_plain"] == pytest.approx(2.0)
    assert rows_of(records)["fast"]["ratio_to_plain"] == pytest.approx(200 / 150)


def test_lengths_and_temperatures_are_kept_apart():
    records = [
        record(arm, max_new_tokens=length, temperature=temperature, ms=ms if arm == "plain" else ms / factor)
        for length, temperature, factor in ((16, 0.0, 2.0), (32, 0.0, 3.0), (16, 0.8, 1.5))
        for arm, ms in (("plain", 100.0), ("fast", 100.0))
    ]
    rows = summarize(manifest_of(records), records, [])["rows"]
    found = {(row["temperature"], row["max_new_tokens"]): row["ratio_to_plain"] for row in rows
             if row["arm"] == "fast" and row["category"] is None}  # fmt: skip
    assert found == pytest.approx({(0.0, 16): 2.0, (0.0, 32): 3.0, (0.8, 16): 1.5})


def test_the_ratio_to_the_faster_plain_takes_the_faster_one():
    records = [record("plain", ms=100.0), record("fast", ms=50.0)]
    slower = rows_of([*records, record("hf_plain", ms=200.0)])["fast"]
    faster = rows_of([*records, record("hf_plain", ms=80.0)])["fast"]
    assert (slower["faster_plain"], slower["ratio_to_faster_plain"]) == ("plain", pytest.approx(2.0))
    assert (faster["faster_plain"], faster["ratio_to_faster_plain"]) == ("hf_plain", pytest.approx(1.6))
    assert faster["ratio_to_plain"] == pytest.approx(2.0)


def test_without_a_plain_arm_there_is_no_ratio():
    row = rows_of([record("fast")])["fast"]
    assert row["ratio_to_plain"] is row["ratio_interval"] is row["faster_plain"] is row["plain_spread"] is None


def test_the_spread_of_plain_stands_beside_every_ratio():
    records = []
    for repeat, again_ms in enumerate((80.0, 100.0, 125.0)):
        records += [record(arm, 0, repeat, ms=ms) for arm, ms in
                    (("plain", 100.0), ("fast", 50.0), ("plain (again)", again_ms))]  # fmt: skip
    summary = summarize(manifest_of(records), records, [])
    (spread,) = summary["plain_spread"]
    assert spread["value"] == pytest.approx(1.0)
    assert spread["range"] == pytest.approx((0.8, 1.25))
    assert all(row["plain_spread"] == pytest.approx((0.8, 1.25)) for row in summary["rows"])
    assert any("0.80 to 1.25 times as fast as itself" in note for note in summary["notes"])


# -- intervals --------------------------------------------------------------------------------------------------------


def simulated(rng, num_prompts, num_repeats=3):
    """Prompts whose gain varies, under a clock that does too: an arm and its base."""
    tokens = np.tile(rng.integers(20, 129, num_prompts).astype(float), (num_repeats, 1))
    base_ms = tokens * rng.lognormal(1.6, 0.1, num_prompts)
    gain = rng.lognormal(0.5, 0.4, num_prompts)
    noise = rng.lognormal(0.0, 0.03, (2, num_repeats, num_prompts))
    return Work(tokens, base_ms / gain * noise[0]), Work(tokens, base_ms * noise[1])


@pytest.mark.parametrize("num_prompts", [8, 30])
def test_intervals_contain_the_truth_about_as_often_as_they_say(monkeypatch, num_prompts):
    monkeypatch.setattr(intervals, "NUM_RESAMPLES", 500)
    rng = np.random.default_rng(0)
    truth = ratio(*simulated(rng, 20_000, num_repeats=1)).range[0]
    found = [ratio(*simulated(rng, num_prompts)) for _ in range(150)]
    hits = sum(low <= truth <= high for low, high in (each.interval for each in found))
    assert 0.86 <= hits / len(found) < 1.0
    assert np.median([each.value for each in found]) == pytest.approx(truth, rel=0.05)


def test_intervals_repeat_themselves_and_hold_the_ratio():
    arm, base = simulated(np.random.default_rng(1), 12)
    first, second = ratio(arm, base), ratio(arm, base)
    assert first == second
    assert first.interval[0] < first.value < first.interval[1]


def test_more_prompts_make_narrower_intervals():
    few, many = (ratio(*simulated(np.random.default_rng(2), number)).interval for number in (6, 200))
    assert many[1] - many[0] < 0.5 * (few[1] - few[0])


def test_one_prompt_has_no_interval_and_identical_gains_have_an_empty_one():
    tokens = np.array([[10.0]])
    assert ratio(Work(tokens, tokens), Work(tokens, 2 * tokens)).interval is None
    tokens = np.array([[10.0, 20.0, 30.0]])
    assert ratio(Work(tokens, tokens), Work(tokens, 2 * tokens)).interval == pytest.approx((2.0, 2.0))


def test_an_interval_pairs_prompts():
    """What prompts cost varies a hundredfold, what the arm gains does not: unpaired intervals would be wide."""
    tokens = np.full((1, 20), 10.0)
    ms = np.random.default_rng(3).lognormal(3.0, 1.5, (1, 20))
    low, high = ratio(Work(tokens, ms / 1.5), Work(tokens, ms)).interval
    assert high - low < 1e-9
    assert low == pytest.approx(1.5)


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)])
def test_students_quantiles_are_those_of_the_tables(freedom, quantile):
    assert intervals._student_quantile(0.975, freedom) == pytest.approx(quantile, abs=0.01)


# -- what rounds brought ----------------------------------------------------------------------------------------------


@pytest.fixture
def drafted():
    """Two requests of an arm: rounds that accept 3, 1 and 0 tokens."""
    by_source = {"accepted_by_source": {"small": 2, "middle": 1}, "source_calls": {"small": 2, "middle": 1},
                 "source_ms": {"small": 0.5, "middle": 1.5}}  # fmt: skip
    first = record(
        "fast", 0, num_tokens=6, ms=130.0, prefill_ms=20.0, rounds=[a_round(3, **by_source), a_round(1)],
        num_copied=3, by_depth=[[2, 2], [2, 1], [1, 1]], calibration={"small": bins({2: (4, 1.0, 2)})},
    )  # fmt: skip
    second = record(
        "fast", 1, num_tokens=1, ms=70.0, prefill_ms=20.0, rounds=[a_round(0, source_calls={"small": 1})],
        num_copied=0, by_depth=[[1, 0]], calibration={"small": bins({2: (4, 1.0, 0), 9: (2, 1.9, 1)})},
    )  # fmt: skip
    return [first, second]


def bins(filled):
    return [list(filled.get(index, (0, 0.0, 0))) for index in range(10)]


def test_rounds_are_counted_over_all_requests(drafted):
    row = rows_of(drafted)["fast"]
    assert row["num_rounds"] == 3
    assert (row["emitted_per_round"], row["accepted_per_round"]) == pytest.approx((7 / 3, 4 / 3))
    assert (row["verified_per_round"], row["drafted_per_round"]) == (8.0, 12.0)
    assert row["accepted_histogram"] == {0: 1, 1: 1, 3: 1}
    assert row["emitted_histogram"] == {1: 1, 2: 1, 4: 1}
    assert row["accepted_by_source"] == pytest.approx({"small": 2 / 3, "middle": 1 / 3})
    assert row["source_calls"] == pytest.approx({"small": 1.0, "middle": 1 / 3})
    assert row["by_depth"] == [(3, 2), (2, 1), (1, 1)]
    assert row["copied_share"] == pytest.approx(3 / 7)


def test_the_time_is_split_without_a_rest(drafted):
    row = rows_of(drafted)["fast"]
    assert set(row["time_split"]) == set(PARTS)
    assert sum(row["time_split"].values()) == pytest.approx(1.0)
    assert row["time_split"]["prefill"] == pytest.approx(40 / 200)
    assert row["time_split"]["target"] == pytest.approx(60 / 200)
    assert row["time_split"]["other"] == pytest.approx((200 - 40 - 3 * 36) / 200)
    assert row["draft_split"] == pytest.approx({"small": 0.5 / 200, "middle": 1.5 / 200})
    assert row["ms_per_token"] == pytest.approx(200 / 7)


def test_an_arm_that_cannot_tell_says_null():
    row = rows_of([record("hf_assisted")])["hf_assisted"]
    for name in ("num_rounds", "accepted_per_round", "by_depth", "copied_share", "time_split", "accepted_histogram"):
        assert row[name] is None


def test_calibration_is_pooled_and_its_error_weighted(drafted):
    (table,) = summarize(manifest_of(drafted), drafted, [])["calibration"]
    assert (table["arm"], table["source"], table["num_labels"]) == ("fast", "small", 10)
    assert table["bins"][2] == {"low": 0.2, "high": 0.3, "count": 8, "mean_probability": 0.25, "accepted_share": 0.25}
    assert table["bins"][9]["mean_probability"] == pytest.approx(0.95)
    assert table["bins"][5]["accepted_share"] is None
    assert table["expected_calibration_error"] == pytest.approx(0.2 * abs(0.95 - 0.5))


# -- what is wrong, and what to know ----------------------------------------------------------------------------------


def problems_of(records, divergences=(), **manifest):
    return summarize(manifest_of(records, **manifest), records, list(divergences))["problems"]


DIVERGENCE = {"arm": "fast", "prompt_id": "0", "temperature": 0.0, "index": 3, "logit_gap": 2.5}


def test_a_clean_run_is_valid():
    records = [record("plain"), record("fast")]
    assert summarize(manifest_of(records), records, [])["valid"]


@pytest.mark.parametrize(
    ("records", "manifest", "expected"),
    [
        ([], {}, "no records"),
        ([record("plain")], {"complete": False}, "not finished"),
        ([record("fast", num_tokens=10, token_ids=[1, 2])], {}, "fast: another count than its ids"),
        ([record("fast", num_tokens=4, token_ids=[5, 0, 7, 0])], {}, "fast: tokens after EOS are counted"),
        ([record("plain"), record("plain", 1), record("fast")], {}, "fast: 1 requests are missing"),
        ([record("fast", problems=["steps=3 was asked for, 5 ran"])], {}, "fast: steps=3 was asked for, 5 ran"),
        ([record("plain")], {"problems": ["fast keeps state between requests"]}, "keeps state"),
    ],
)  # fmt: skip
def test_what_is_wrong_makes_a_run_invalid(records, manifest, expected):
    summary = summarize(manifest_of(records, **manifest), records, [])
    assert not summary["valid"]
    assert any(expected in problem for problem in summary["problems"])


def test_text_that_ends_with_eos_is_counted_up_to_it():
    assert not problems_of([record("plain", num_tokens=3, token_ids=[5, 7, 0], finish_reason="eos")])
    assert rows_of([record("plain", num_tokens=3, token_ids=[5, 7, 0])])["plain"]["num_new_tokens"] == 3


def test_a_divergence_is_a_problem_in_float32_and_a_note_in_half_precision():
    records = [record("plain"), record("fast")]
    assert any("fast: its text differs" in problem for problem in problems_of(records, [DIVERGENCE]))
    summary = summarize(manifest_of(records, dtype="bfloat16"), records, [DIVERGENCE])
    assert summary["valid"] and summary["num_divergences"] == 1
    assert any("bfloat16" in note for note in summary["notes"])


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([record("fast", drafted_nothing=True), record("fast", 1)], "fast drafted nothing in 1 of 2 requests"),
        ([record("fast", faults=[{"source": "small", "error": "E: x"}])], "fast: the drafter of small failed"),
        ([record("plain", cpu_load=3.0)], "The machine was busy"),
        ([record("plain")], "Intervals over 1 prompts are rough"),
    ],
)
def test_what_a_reader_should_know_is_said(records, expected):
    summary = summarize(manifest_of(records), records, [])
    assert summary["valid"]
    assert any(expected in note for note in summary["notes"])


def test_plain_drafting_nothing_is_nothing_to_mention():
    records = [record("plain", drafted_nothing=True)]
    notes = summarize(manifest_of(records), records, [])["notes"]
    assert not any("drafted nothing" in note for note in notes)


# -- files ------------------------------------------------------------------------------------------------------------


def write_run(folder, records, divergences=(), **manifest):
    folder.mkdir()
    write_records(folder, records)
    (folder / "divergences.jsonl").write_text("".join(json.dumps(each) + "\n" for each in divergences))
    write_manifest(folder, manifest_of(records, **manifest))
    return folder


@pytest.fixture
def some_records(drafted):
    plain = [record("plain", prompt, ms=150.0, rounds=[a_round() for _ in range(10)]) for prompt in (0, 1)]
    again = [attrs.evolve(each, arm="plain (again)") for each in plain]
    many = [attrs.evolve(each, rounds=each.rounds * 10, by_depth=[[10, 5], [10, 2]]) for each in drafted]
    return [*plain, *many, *again, record("hf_plain", 0), record("hf_plain", 1)]


def test_a_run_folder_gets_summary_report_and_plots(tmp_path, some_records):
    folder = write_run(tmp_path / "run", some_records)
    returned = write_summary(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["valid"] is returned["valid"] is True
    promised = {"arm", "temperature", "category", "tokens_per_second", "ratio_to_plain", "emitted_per_round"}
    for row in summary["rows"]:
        assert set(row) == {field.name for field in attrs.fields(Row)} >= promised
    plots = {path.name for path in (folder / "plots").glob("*.png")}
    assert plots == {
        "ratio_by_category.png", "accepted_histogram.png", "time_split.png", "acceptance_by_depth.png",
        "reliability_small.png",
    }  # fmt: skip
    assert all((folder / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in plots)
    report = (folder / "summary.md").read_text()
    assert all(f"plots/{name}" in report for name in plots)


@pytest.fixture
def no_plots(monkeypatch):
    monkeypatch.setattr("treegraft.bench.plots.write_plots", lambda folder, manifest, summary: [])


def test_the_main_table_comes_last_and_names_every_arm(tmp_path, some_records, no_plots):
    folder = write_run(tmp_path / "run", some_records)
    write_summary(folder)
    report = (folder / "summary.md").read_text()
    last = report.rstrip().rpartition("\n\n")[2].splitlines()
    assert last[0].startswith("| arm | tokens/s")
    assert [line.split(" | ")[0].removeprefix("| ") for line in last[2:]] == [
        "plain", "fast", "plain (again)", "hf_plain",
    ]  # fmt: skip


def test_an_invalid_run_says_so_before_anything_else(tmp_path, some_records, no_plots):
    folder = write_run(tmp_path / "run", some_records, [DIVERGENCE])
    assert not write_summary(folder)["valid"]
    report = (folder / "summary.md").read_text()
    first_words = report.split("\n\n")[1]
    assert "NOT VALID" in first_words
    assert report.index("fast: its text differs") < report.index("## Divergences") < report.index("## What ran")
    assert re.search(r"^\| fast \| 0 \| 0 \| 3 \| 2.5 \|$", report, re.MULTILINE)


def test_an_interrupted_run_can_be_summarized(tmp_path, some_records, no_plots):
    folder = write_run(tmp_path / "run", some_records[:3], complete=False)
    summary = write_summary(folder)
    assert not summary["valid"]
    assert summary["rows"]


def test_a_ratio_within_plains_own_spread_is_marked(some_records):
    again = [attrs.evolve(each, total_ms=each.total_ms * 1.2) for each in some_records if each.arm == "plain (again)"]
    slightly_slower = [record("almost", prompt, ms=160.0) for prompt in (0, 1)]
    others = [each for each in some_records if each.arm != "plain (again)"]
    records = [*others, *again, *slightly_slower]
    manifest = manifest_of(records)
    assert "| ~0.94" in markdown(manifest, summarize(manifest, records, []), [], [])


# -- plots ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def figures(some_records):
    """Plots of a run at two temperatures: at the second, rounds accept far less and the arm gains far more."""
    hotter = [
        attrs.evolve(
            each, temperature=0.8, total_ms=each.total_ms / (5 if each.arm == "fast" else 1),
            rounds=each.rounds and [a_round(accepted) for accepted in (0,) * 18 + (1, 2)],
        )
        for each in some_records
    ]  # fmt: skip
    records = [*some_records, *hotter]
    return draw_plots(summarize(manifest_of(records), records, []))


def test_every_panel_shows_all_that_is_drawn_in_it(figures):
    num_lines = 0
    for name, figure in figures.items():
        for panel in figure.axes:
            (left, right), (low, high) = panel.get_xlim(), sorted(panel.get_ylim())
            for line in panel.lines:
                num_lines += 1
                x, y = (np.asarray(each, dtype=float) for each in line.get_data())
                assert ((left <= x) & (x <= right) & (low <= y) & (y <= high)).all(), name
    assert num_lines > 10


def test_axes_have_names_and_arms_one_look_in_all_plots(figures):
    colours = {}
    for name, figure in figures.items():
        assert figure.get_suptitle()
        first, *_ = figure.axes
        assert first.get_xlabel() and first.get_ylabel(), name
        for panel in figure.axes:
            for line in panel.lines:
                if line.get_label() in ("plain", "fast"):
                    colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert {arm: len(found) for arm, found in colours.items()} == {"fast": 1, "plain": 1}
    assert arm_looks(["plain", "a", "b"])["a"] == arm_looks(["a", "plain (again)", "b"])["a"]
    looks = arm_looks([f"arm {number}" for number in range(40)])
    assert len(set(looks.values())) == 40


# -- several runs -----------------------------------------------------------------------------------------------------


def finish_run(folder, records, **manifest):
    """A run with its summary, without report and plots."""
    write_run(folder, records, **manifest)
    (folder / "summary.json").write_text(json.dumps(summarize(manifest_of(records, **manifest), records, [])))
    return folder


@pytest.fixture
def two_runs(tmp_path, some_records):
    def make(**manifest):
        return [finish_run(tmp_path / "first", some_records), finish_run(tmp_path / "second", some_records, **manifest)]

    return make


def test_runs_are_compared_arm_by_arm(two_runs):
    comparison = compare_runs(two_runs())
    assert not comparison.warnings
    assert [(row["arm"], row["run"]) for row in comparison.rows][:4] == [
        ("plain", "first"), ("plain", "second"), ("fast", "first"), ("fast", "second"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        ({"dtype": "bfloat16"}, "second differs from first in dtype: bfloat16, not float32"),
        ({"device": "cuda"}, "device"),
        ({"versions": {"treegraft": "0.1.0", "torch": "2.14.0"}}, "versions.torch: 2.14.0, not 2.13.0"),
        ({"prompts": [{"file": "prompts.jsonl", "sha256": "cd", "num_prompts": 2}]}, "prompts: file prompts"),
        ({"machine": {"num_cores": 64}}, "machine.num_cores: 64, not -"),
        ({"settings": {"seed": 2, "repeats": 2}}, "settings.seed: 2, not 1"),
        ({"models": {"target": "elsewhere"}}, "models.target"),
        ({"complete": False}, "second is not valid: The run has not finished"),
    ],
)  # fmt: skip
def test_runs_that_differ_in_what_they_measured_are_warned_about(two_runs, manifest, expected):
    warnings = compare_runs(two_runs(**manifest)).warnings
    assert len(warnings) == 1
    assert expected in warnings[0]


def test_the_same_prompts_elsewhere_are_the_same(two_runs):
    moved = [each | {"file": "elsewhere/prompts.jsonl"} for each in MANIFEST["prompts"]]
    assert not compare_runs(two_runs(prompts=moved)).warnings


def test_settings_of_arms_are_compared_where_both_runs_have_the_arm(tmp_path, some_records):
    one = finish_run(tmp_path / "one", some_records, arm_settings={"fast": {"steps": 5}, "plain": {"steps": 5}})
    two = finish_run(tmp_path / "two", some_records, arm_settings={"fast": {"steps": 3}, "other": {"steps": 1}})
    assert compare_runs([one, two]).warnings == ["two differs from one in settings of fast.steps: 3, not 5."]


def test_arms_of_a_run_are_compared_by_the_requests_that_both_answered(tmp_path, some_records):
    folder = finish_run(tmp_path / "run", some_records)
    rows = compare_arms(folder, [("fast", "plain"), ("plain", "fast"), ("plain", "plain")])
    summary = {
        (row["arm"], row["category"]): row for row in summarize(manifest_of(some_records), some_records, [])["rows"]
    }
    categories = {row["category"] for row in summary.values()}
    assert {row.category for row in rows} == categories and len(rows) == 3 * len(categories)
    for row in rows:
        if row.arm == row.base:
            assert row.ratio == 1 and row.range == (1, 1)
        elif row.base == "plain":
            of_summary = summary[row.arm, row.category]
            assert (row.ratio, row.interval) == (of_summary["ratio_to_plain"], of_summary["ratio_interval"])
            assert row.ratio != 1
    columns, lines = pairs_table(rows)
    assert columns[:4] == ["temperature", "tokens", "arms", "all prompts"] and len(lines) == 3
    with pytest.raises(ValueError, match=r"'slow'\n  Allowed, the arms of .*: plain, fast"):
        compare_arms(folder, [("slow", "plain")])


def test_a_folder_without_a_finished_run_is_refused(tmp_path, some_records):
    folder = write_run(tmp_path / "run", some_records)
    with pytest.raises(ValueError, match=r"no readable summary\.json"):
        compare_runs([folder])
    with pytest.raises(ValueError, match=r"no readable manifest\.json"):
        compare_runs([tmp_path])


def test_folders_of_one_name_are_told_apart(tmp_path, some_records):
    folders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        folders.append(finish_run(tmp_path / name / "run", some_records))
    assert {row["run"] for row in compare_runs(folders).rows} == {"a/run", "b/run"}
    with pytest.raises(ValueError, match="twice"):
        compare_runs([folders[0], folders[0]])


def test_the_command_prints_one_table_and_warns_on_stderr(two_runs):
    folders = [str(folder) for folder in two_runs(dtype="bfloat16")]
    result = CliRunner().invoke(main, ["bench", "report", *folders])
    assert result.exit_code == 0
    assert re.search(r"^0 +16 +fast +second +2 ", result.stdout, re.MULTILINE)
    assert "warning: second differs from first in dtype: bfloat16, not float32." in result.stderr
    as_json = CliRunner().invoke(main, ["bench", "report", *folders, "--json"])
    found = json.loads(as_json.stdout)
    assert len(found["warnings"]) == 1
    assert {row["run"] for row in found["rows"]} == {"first", "second"}


def test_the_command_sets_arms_of_one_run_against_each_other(two_runs):
    first, second = map(str, two_runs())
    result = CliRunner().invoke(main, ["bench", "report", first, "--pairs", "fast/plain,plain/fast"])
    assert result.exit_code == 0 and "fast / plain" in result.stdout and "plain / fast" in result.stdout
    result = CliRunner().invoke(main, ["bench", "report", first, "--pairs", "fast/plain", "--json"])
    assert {row["base"] for row in json.loads(result.stdout)["rows"]} == {"plain"}
    for args in [(first, second, "--pairs", "fast/plain"), (first, "--pairs", "fast"), (first, "--pairs", "fast/none")]:
        assert CliRunner().invoke(main, ["bench", "report", *args]).exit_code == 2


def test_the_command_refuses_what_is_no_run(tmp_path):
    result = CliRunner().invoke(main, ["bench", "report", str(tmp_path)])
    assert result.exit_code == 2
    assert "no readable manifest.json" in result.stderr
