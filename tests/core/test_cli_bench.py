"""`treegraft bench` from its command line: a run, its folder, its exit status, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import treegraft_plugins
from treegraft.bench.records import LINES, read_manifest, read_records
from treegraft.bench.run import Bench
from treegraft.cli import main
from treegraft.cli.progress import progress

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")

PROMPTS = [
    {"id": "a", "category": "library", "turns": ["import os\nimport sys\nimport os\nimport "]},
    {"id": "b", "category": "tests", "turns": ["self.assertEqual(a, b)\nself.assertEqual("]},
]
FIXED = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 7}", "target.self_check=false")
SMALL = ("--arms", "plain,all_small", "--max-new-tokens", "4", *FIXED)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """They take most of the time of so small a run, and one run with them will do."""
    if request.function is not test_a_run_from_the_command_line:
        monkeypatch.setattr("treegraft.bench.plots.write_plots", lambda *args: [])


def bench(*args):
    words = list(map(str, args))
    words += [] if "--prompts" in words else ["--prompts", "p.jsonl"]
    words += [] if "--out" in words else ["--out", "run"]
    return CliRunner().invoke(main, ["bench", *words])


def test_a_run_from_the_command_line():
    arms = "plain,all_small,hf_plain,hf_prompt_lookup"
    result = bench("--arms", arms, "--max-new-tokens", "3,6", "--temperature", "0,0.8", "--seed", "4", *FIXED)
    assert result.exit_code == 0, result.output
    assert result.stdout == Path("run/summary.md").read_text()
    names = [*arms.split(","), "plain (again)"]
    records, manifest = read_records(Path("run")), read_manifest(Path("run"))
    assert len(records) == 2 * 2 * 2 * len(names) and {record.seed for record in records} == {4}
    assert all(record.text_ok for record in records if record.temperature == 0 or not record.arm.startswith("hf_"))
    assert manifest["arms"] == names and manifest["complete"] and manifest["problems"] == []
    assert manifest["dtype"] == "float32" and manifest["device"] == "cpu" and manifest["num_threads"] >= 1
    assert manifest["models"]["target"] == "demo:target" and manifest["versions"]["torch"]
    assert manifest["prompts"][0]["num_prompts"] == 2 and len(manifest["prompt_hashes"]) == 2
    assert manifest["command"].startswith("treegraft bench --arms plain,all_small,")
    assert manifest["arm_settings"]["all_small"]["verify_nodes"] == 7
    assert set(manifest["searched"]["hf_prompt_lookup"]) == {"0.0", "0.8"}
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["valid"] and {row["arm"] for row in summary["rows"]} == set(names)
    assert list(Path("run/plots").glob("*.png"))
    lines = result.stderr.splitlines()
    assert any(line.split() == ["all_small", "5", "7", "10", "10", "fixed", "fixed", "fixed"] for line in lines)
    assert "measuring: 40 of 40" in lines
    again = bench(*SMALL)
    assert again.exit_code == 2 and "Finished runs are never changed" in again.stderr


def test_json_is_the_summary_and_nothing_else():
    result = bench(*SMALL, "--json", "--limit", "1")
    assert json.loads(result.stdout) == json.loads(Path("run/summary.json").read_text())
    assert {record.prompt_id for record in read_records(Path("run"))} == {"a"}


def test_a_drafter_that_remembers_makes_the_run_invalid():
    result = bench(*SMALL, "sources.small.draft.shared=true", "--max-new-tokens", "24")
    assert result.exit_code == 1
    summary = json.loads(Path("run/summary.json").read_text())
    assert not summary["valid"] and summary["problems"][0].startswith("all_small: it keeps state between prompts")


def test_an_interrupted_run_says_how_to_go_on_and_does(monkeypatch):
    measured, calls = Bench.measured, []

    def stops(self, *args):
        calls.append(args)
        if len(calls) == 6:  # three arms were warmed up, two requests are done
            raise KeyboardInterrupt
        return measured(self, *args)

    monkeypatch.setattr(Bench, "measured", stops)
    result = bench(*SMALL)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("Interrupted. The same command goes on with run.\n")
    done = Path("run", LINES).read_text()
    assert done.count("\n") == 2
    monkeypatch.setattr(Bench, "measured", measured)
    other = bench(*SMALL, "--seed", "9")
    assert other.exit_code == 2 and "begun otherwise: settings.seed was 0, is 9" in other.stderr
    assert bench(*SMALL).exit_code == 0
    first = [json.loads(line) for line in done.splitlines()]
    assert [record.total_ms for record in read_records(Path("run"))[:2]] == [each["total_ms"] for each in first]


def interrupted(monkeypatch, *words, at=6):
    """A run that was stopped after so many requests, warm-ups included."""
    measured, calls = Bench.measured, []

    def stops(self, *args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return measured(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "measured", stops)
        assert bench(*words).exit_code == 130


@pytest.mark.parametrize("what", ["weights", "costs"])
def test_a_run_is_not_gone_on_with_once_a_file_that_it_rests_on_has_changed(what, monkeypatch):
    shutil.copytree(Path(treegraft_plugins.__path__[0]) / "hf" / "demo_pair" / "middle", "middle")
    Path("costs.json").write_text(json.dumps({"target": 5.0, "sources": {"middle": 1.0}}))
    words = ("--arms", "plain,all_middle", "--max-new-tokens", "4", "costs={use: file, path: costs.json}", *FIXED[1:],
             "models.middle=middle", "models.target=demo:target")  # fmt: skip
    interrupted(monkeypatch, *words)
    if what == "costs":
        Path("costs.json").write_text(json.dumps({"target": 5.0, "sources": {"middle": 9.0}}))
    else:
        weights = load_file("middle/model.safetensors")
        weights["model.norm.weight"] = -weights["model.norm.weight"]
        save_file(weights, "middle/model.safetensors", {"format": "pt"})
    result = bench(*words)
    assert result.exit_code == 2 and "an interrupted run that was begun otherwise: " in result.stderr
    assert ("model_digests.middle" if what == "weights" else "files.all_middle.costs.path") in result.stderr


def test_a_run_that_was_interrupted_while_it_was_summed_up_is_summed_up(monkeypatch):
    def stops(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("treegraft.bench.plots.write_plots", stops)
        assert bench(*SMALL).exit_code == 130
    records = read_records(Path("run"))
    result = bench(*SMALL)
    assert result.exit_code == 0 and result.stdout == Path("run/summary.md").read_text()
    assert read_records(Path("run")) == records
    assert bench(*SMALL).exit_code == 2


@pytest.mark.parametrize("content", ["[]", "null", "{}", "{", '{"rows": 3}'])
@pytest.mark.parametrize("name", ["manifest.json", "summary.json", LINES])
def test_a_damaged_folder_is_named(name, content, monkeypatch):
    if name == LINES:
        interrupted(monkeypatch, *SMALL)
        Path("run", LINES).write_text(content + "\n")
        result = bench(*SMALL)
    else:
        assert bench(*SMALL).exit_code == 0
        Path("run", name).write_text(content)
        result = CliRunner().invoke(main, ["bench", "report", "run"])
    assert result.exit_code == 2 and "Not foreseen" not in result.stderr and "run" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--arms", "plain,tregraft"), "Did you mean 'treegraft'"),
        (("--arms", "hf_asisted"), "Did you mean 'hf_assisted'"),
        (("--arms", "plain,plain"), "names something twice"),
        (("--arms", ","), "is not a list of names"),
        (("--prompts", "q.jsonl"), "Did you mean 'p.jsonl'"),
        (("--max-new-tokens", "0"), "--max-new-tokens: 0"),
        (("--max-new-tokens", "4,x"), "'4,x' is not a list of whole numbers"),
        (("--temperature", "-1"), "temperature: -1.0"),
        (("--seed", "-1"), "seed: -1"),
        (("--vary", "stpes"), "Did you mean 'steps'"),
        (("sources.smal.width=3",), "Did you mean 'small'"),
        (("stpes=3",), "Did you mean 'steps'"),
        (("--arms", "plain,all_middle", "models.target=./mine"), "Name it: models.middle=PATH"),
    ],
)
def test_bad_use_is_refused_before_models_are_loaded(monkeypatch, args, message):
    monkeypatch.setattr("treegraft.bench.lineup.Lineup.build", lambda self: pytest.fail("models were loaded"))
    result = bench(*args)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert not Path("run").exists()


def test_arms_that_differ_in_shape_are_refused_unless_that_is_the_point():
    Path("registry.yaml").write_text("pipelines: {narrow: {extends: all_small, sources: {small: {width: 2}}}}\n")
    args = ("--arms", "all_small,narrow", "--max-new-tokens", "2", *FIXED)
    result = bench(*args)
    assert result.exit_code == 2 and "they differ in width: all_small 10, narrow 2" in result.stderr
    assert not Path("run").exists()
    assert bench(*args, "--vary", "width").exit_code == 0


def test_chat_needs_a_template():
    result = bench(*SMALL, "--chat")
    assert result.exit_code == 2 and "no chat template" in result.stderr


def test_a_missing_package_is_said_before_anything_runs(monkeypatch):
    monkeypatch.setattr("treegraft.bench.records.find_spec", lambda name: None)
    result = bench(*SMALL)
    assert result.exit_code == 2 and 'pip install "treegraft[bench]"' in result.stderr


def test_progress_is_lines_where_there_is_no_terminal(capsys):
    with progress() as report:
        for done in range(4):
            report("measuring", done, 3)
    assert capsys.readouterr().err.splitlines() == ["measuring: 0 of 3", "measuring: 3 of 3"]
