"""`treegraft replay`: its figures are those of the Python interface, and what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import treegraft
from treegraft.cli import main
from treegraft.cli.replay_report import Tally, lines
from treegraft.replay import Outcome, ReplayTarget, outcome_of, record, replay, schedules, tabulate, wants_of
from treegraft.sampling import SamplingOptions

PROMPTS = {
    "loop": ("library", "for name in sorted(names):\n    print(name)\nfor key in sorted(keys):\n"),
    "test": ("tests", "self.assertEqual(a, b)\nself.assertEqual("),
}
COSTS = {"target": {1: 5.0, 64: 13.0}, "sources": {"small": 0.6, "middle": {1: 2.2, 32: 4.0}}}
FILE_COSTS = "costs={use: file, path: costs.json}"
NUM_TOKENS = 10


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [{"id": key, "category": task, "turns": [text]} for key, (task, text) in PROMPTS.items()]
    Path("prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    Path("costs.json").write_text(json.dumps(COSTS))


def run(*args):
    words = ["replay", *map(str, args), "--max-new-tokens", str(NUM_TOKENS)]
    return CliRunner().invoke(main, words if "--prompts" in words else [*words, "--prompts", "prompts.jsonl"])


def loaded(name, *overrides):
    target = treegraft.load("plain").target
    return target, treegraft.load(name, FILE_COSTS, *overrides, models={"target": ReplayTarget(target)})


def recordings(target, pipeline, temperature=0.0, seed=0):
    options = SamplingOptions(temperature)
    return {
        key: record(target, target.tokenizer(text)["input_ids"], NUM_TOKENS, options, seed, wants_of([pipeline]))
        for key, (_, text) in PROMPTS.items()
    }


def test_rows_of_pipelines_are_their_replayed_rounds():
    result = run(
        "treegraft_fixed,plain", "--temperature", "0,0.8", "--seed", 4, "--costs", "costs.json", "--json",
        "--out", "rounds.jsonl",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    target, pipeline = loaded("treegraft_fixed")
    written = [json.loads(line) for line in Path("rounds.jsonl").read_text().splitlines()]
    for temperature in (0.0, 0.8):
        total, by_key = Outcome(), {}
        for key, kept in recordings(target, pipeline, temperature, seed=4).items():
            rounds = replay(pipeline, kept).rounds
            by_key[key] = outcome_of(rounds, pipeline.costs)
            total += by_key[key]
            own = [
                line for line in written
                if (line["pipeline"], line["prompt_id"], line["temperature"]) == ("treegraft_fixed", key, temperature)
            ]  # fmt: skip
            assert [line["accepted"] for line in own] == [len(done.verdict.path) for done in rounds]
            assert sum(line["modelled_ms"] for line in own) == pytest.approx(by_key[key].modelled_ms)
        for category, outcome in ((None, total), ("library", by_key["loop"]), ("tests", by_key["test"])):
            (row,) = [
                row for row in rows
                if (row["pipeline"], row["temperature"], row["category"]) == ("treegraft_fixed", temperature, category)
            ]  # fmt: skip
            assert row["num_rounds"] == outcome.num_rounds and row["num_emitted"] == outcome.num_emitted
            assert row["accepted_per_round"] == outcome.accepted_per_round
            assert row["tokens_per_second"] == pytest.approx(outcome.tokens_per_second)
            assert row["calls_per_round"]["middle"] == outcome.num_calls["middle"] / outcome.num_rounds
            assert sum(row["accepted_histogram"].values()) == outcome.num_rounds
            assert row["ratio_to_plain"] == pytest.approx(outcome.tokens_per_second / 200.0)
    plain = [row for row in rows if row["pipeline"] == "plain"]
    assert len(plain) == 6 and all(row["tokens_per_second"] == pytest.approx(200.0) for row in plain)


def test_rows_of_schedules_are_their_tables():
    options = ("steps=2", "--schedules", "--budgets", "2,63", "--costs", "costs.json")
    result = run("treegraft", *options, "--json", "--out", "labels.jsonl")
    assert result.exit_code == 0, result.output
    rows = [row for row in json.loads(result.stdout)["rows"] if row["category"] is None]
    target, pipeline = loaded("treegraft", "steps=2", "calibration=off")
    tables = [
        tabulate(schedules(pipeline, kept, [2, 63]), len(kept.tokens)) for kept in recordings(target, pipeline).values()
    ]
    found = {(tuple(row["schedule"]), row["budget"]): row for row in rows}
    costs = pipeline.costs
    for index, schedule in enumerate(tables[0].schedules):
        for place, budget in enumerate((2, 63)):
            outcome = sum((table.fixed(costs, index, place) for table in tables), Outcome())
            row = found.pop((schedule, budget))
            assert row["num_rounds"] == outcome.num_rounds
            assert row["tokens_per_second"] == pytest.approx(outcome.tokens_per_second)
    oracle = sum((table.oracle(costs) for table in tables), Outcome())
    (both,) = [row for row in found.values() if row["schedule"] == row["budget"] == "oracle"]
    assert len(found) == 3 and both["tokens_per_second"] == pytest.approx(oracle.tokens_per_second)
    assert all(row["tokens_per_second"] <= both["tokens_per_second"] + 1e-9 for row in rows)
    labels = [json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()]
    assert len(labels) == sum(len(table.starts) for table in tables) * 4
    first = next(line for line in labels if line["schedule"] == ["middle", "small"])
    at = tables[0].schedules.index(("middle", "small"))
    assert first["accepted"] == tables[0].num_accepted[0, at].tolist()
    assert first["num_rows"] == tables[0].num_rows[0, at].tolist()

    shown = run("treegraft", *options).stdout.splitlines()
    assert shown[0] == "treegraft, temperature 0: schedules, each with its best budget"
    assert len(shown) == 2 + 4 + 3 and shown[-3].split()[:2] == ["oracle", "oracle"]


def test_positions_with_gaps_budgets_of_pipelines_and_no_costs():
    result = run("treegraft", "steps=1", "--schedules", "middle", "--every", 4, "--json")
    rows = {str(row["schedule"]): row for row in json.loads(result.stdout)["rows"] if row["category"] is None}
    assert set(rows) == {"['middle']", "oracle"} and rows["oracle"]["num_rounds"] == 6
    assert rows["oracle"]["tokens_per_second"] is None
    result = run("all_small,plain", "--budgets", "0,5", "--json")
    rows = [row for row in json.loads(result.stdout)["rows"] if row["category"] is None]
    assert [(row["pipeline"], row["budget"]) for row in rows] == [
        ("all_small", 0), ("plain", 0), ("all_small", 5), ("plain", 5)
    ]  # fmt: skip
    assert rows[0]["num_rounds"] == 2 * NUM_TOKENS and 0 < rows[2]["verified_per_round"] <= 5


def test_tables_show_what_differs():
    tally = Tally(is_modelled=False)
    for name in ("one", "other"):
        tally.add_round((name, None, None), 0.0, "x", Outcome(1, 2, 3, 9, {"small": 4}), plain_ms=3.0)
    assert lines(tally.rows(), False) == [
        "pipeline  rounds  accepted  emitted  verified  small calls",
        "one       1       2.00      3.00     9.00      4.00",
        "other     1       2.00      3.00     9.00      4.00",
    ]


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["all_smal"], "Did you mean 'all_small'"),
        (["plain"], "nothing that drafts"),
        (["treegraft", "--every", "2"], "--every needs --schedules"),
        (["treegraft", "--budgets", "5,2"], "not ascending"),
        (["treegraft", "--schedules", "smal"], "Did you mean 'small'"),
        (["treegraft", "--schedules", "--budgets", "1,99"], "from 0 to 63"),
        (["treegraft", "costs={use: measured}"], "costs={use: fixed}"),
        (["treegraft", "--costs", "none.json"], "none.json"),
        (["treegraft", "--temperature=-1"], "temperature"),
        (["treegraft", "--schedules", "steps=2"], "--schedules=all"),
        (["treegraft", "--out", "no/folder.jsonl"], "--out no/folder.jsonl"),
        (["treegraft", "--out", "prompts.jsonl"], "a file that exists"),
        (["all_middle", "--costs", "target.json"], "says nothing of middle"),
        (["treegraft", "--prompts", "long.jsonl"], "long.jsonl: prompt 'long': "),
        (["treegraft", "--prompts", "promts.jsonl"], "Did you mean 'prompts.jsonl'"),
    ],
)
def test_what_it_refuses(args, found):
    Path("target.json").write_text(json.dumps({"target": 5.0}))
    Path("long.jsonl").write_text(json.dumps({"id": "long", "category": "x", "turns": ["import os\n" * 1500]}))
    before = {path: path.read_bytes() for path in Path().iterdir()}
    result = run(*args)
    assert result.exit_code == 2 and found in result.output, result.output
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_refused_replay_leaves_no_file():
    assert run("treegraft", "--schedules=smal", "--out", "rounds.jsonl").exit_code == 2
    assert not Path("rounds.jsonl").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "plain,dflash_sampled"],
        ["fit", "budget", "--pipeline", "dflash_sampled", "--held-out", "prompts.jsonl", "--out", "fit"],
        ["fit", "collect", "--pipeline", "dflash_sampled", "--out", "fit"],
    ],
)
def test_a_pipeline_whose_text_depends_on_its_trees_is_refused_before_anything_else(words):
    result = CliRunner().invoke(main, [*words, "--prompts", "prompts.jsonl"])
    assert result.exit_code == 2
    assert result.stderr.startswith("RequestError: pipelines.dflash_sampled.verifier: 'block'\n  Allowed: match")


def test_a_scheduler_that_a_budget_changes_is_told():
    told = run("treegraft", "--budgets", "16,63")
    assert told.exit_code == 0 and "treegraft with 16 nodes: scheduler: " in told.stderr
    assert "treegraft with 63 nodes: scheduler: " in told.stderr
    assert "scheduler: " not in run("treegraft_fixed", "--budgets", "16,63").stderr
