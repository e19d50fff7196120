"""`treegraft fit collect` and `fit scheduler`: what they make of each other's files, and what they refuse."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import treegraft
import treegraft_plugins
from treegraft.cli import main
from treegraft_plugins.schedulers.distilled.collect import read_collection
from treegraft_plugins.schedulers.distilled.trajectories import COLUMNS
from treegraft_plugins.schedulers.distilled.weights import ABLATIONS, read_weights

PROMPTS = {
    "loop": ("library", "for name in sorted(names):\n    print(name)\nfor key in sorted(keys):\n"),
    "test": ("tests", "self.assertEqual(a, b)\nself.assertEqual("),
}
COSTS = "costs={use: fixed, target: {1: 5.0, 64: 13.0}, sources: {small: 0.6, middle: {1: 2.2, 32: 4.0}}}"
SIGNALS = ("--signals", "frontier_depth,selected_score")
TINY = ("--folds", 2, "--resamples", 2, "--training-steps", 4)


def run(*args):
    return CliRunner().invoke(main, ["fit", *map(str, args)])


def collect(out: Path, *args, costs: str = COSTS):
    """Two steps, so that four schedules are replayed in each round."""
    prompts = out.parent / "prompts.jsonl"
    lines = [{"id": key, "category": task, "turns": [text]} for key, (task, text) in PROMPTS.items()]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--temperature", "0,0.8", "--max-new-tokens", 10, "steps=2", costs)
    return run("collect", "--prompts", prompts, "--out", out, *options, *args)


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fit") / "collected"
    result = collect(folder)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1] == f"{folder}: 4 continuations of demo:target + demo:middle"
    return folder


# -- collect ----------------------------------------------------------------------------------------------------------


def test_a_collection_says_what_it_was_made_of_and_is_not_made_again(collected):
    said, rounds = read_collection(collected)
    assert (said.target, said.middle, said.vocab_size, said.steps) == ("demo:target", "demo:middle", 4096, 2)
    assert (said.setup.small, said.setup.middle, said.setup.width, said.setup.max_nodes) == ("small", "middle", 10, 63)
    assert said.pipeline["calibration"] == "on" and said.pipeline["sources"]["middle"]["draft"]["rescore_limit"] == 32
    assert said.costs["target"]["64"] == 13.0
    assert set(rounds.report.tolist()) == {f"{said.pair} x {category}" for category in ("library", "tests")}
    assert rounds.rows.max() > 1 and rounds.missed.max() > 0 and rounds.num_nodes.max() > 63
    parts = {path: path.stat().st_mtime_ns for path in collected.rglob("*.parquet")}
    assert collect(collected).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in parts} == parts


def test_a_cost_table_goes_into_the_manifest_whichever_way_it_is_given_and_changes_no_label(collected, tmp_path):
    table = {"target": {"1": 3.0, "64": 9.0}, "sources": {"small": 0.1, "middle": 2.0}, "context_ms": 0.5}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(table))
    for number, (args, costs) in enumerate(
        ((("--costs", file), "steps=2"), ((), f"costs={{use: file, path: {json.dumps(str(file))}}}"))
    ):
        result = collect(tmp_path / str(number), *args, costs=costs)
        assert result.exit_code == 0, result.output
        said, rounds = read_collection(tmp_path / str(number))
        assert said.costs["target"]["64"] == 9.0 and said.costs["context_ms"] == 0.5
        _, others = read_collection(collected)
        for name in COLUMNS:
            assert np.array_equal(getattr(rounds, name), getattr(others, name)), name


@pytest.mark.parametrize(
    ("option", "reports"), [("file", {"prompts"}), ("id", {"loop", "test"}), ("category", {"library", "tests"})]
)
def test_datasets_are_categories_files_or_what_ids_begin_with(tmp_path, option, reports):
    result = collect(tmp_path / "some", "--dataset", option, "--temperature", 0, "--max-new-tokens", 2)
    assert result.exit_code == 0, result.output
    said, rounds = read_collection(tmp_path / "some")
    assert set(rounds.report.tolist()) == {f"{said.pair} x {report}" for report in reports}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--every", 2), "manifest.json: every: 1; now 2"),
        (("--limit", 1), "manifest.json: prompts: "),
        (("models.middle=demo:target",), "manifest.json: middle: 'demo:middle'; now 'demo:target'"),
        (("sources.middle.draft.rescore_limit=4",), "pipeline.sources.middle.draft.rescore_limit: 32; now 4"),
        (("calibration=off",), "manifest.json: pipeline.calibration: 'on'; now 'off'"),
    ],
)
def test_another_collection_needs_another_folder(collected, args, message):
    result = collect(collected, *args)
    assert result.exit_code == 2
    assert message in result.stderr and "Take another --out, or the options it was begun with." in result.stderr


def test_a_folder_of_another_version_is_refused_by_both(collected, tmp_path):
    said = json.loads((collected / "manifest.json").read_text())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(said | {"format": 1}))
    for result in (collect(tmp_path / "old"), run("scheduler", tmp_path / "old", "--out", tmp_path / "x.safetensors")):
        assert result.exit_code == 2
        assert "format 1" in result.stderr and "Collect anew" in result.stderr


@pytest.mark.parametrize("words", [("steps=11",), ("--temperature", "nan"), ("--temperature=-1",), ("--seed", -1)])
def test_what_cannot_be_collected_leaves_the_folder_to_what_can(words, tmp_path):
    result = collect(tmp_path / "c", *words)
    assert result.exit_code == 2 and "Not foreseen" not in result.output
    assert not (tmp_path / "c").exists()


def test_a_prompt_that_fills_the_context_is_refused_by_name_before_anything_is_made(tmp_path):
    long = {"id": "long", "category": "x", "turns": ["import os\n" * 1500]}
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    result = run("collect", "--prompts", tmp_path / "long.jsonl", "--out", tmp_path / "c")
    assert result.exit_code == 2 and "long.jsonl: prompt 'long': " in result.stderr
    assert not (tmp_path / "c").exists()


def test_prompts_of_two_files_may_have_the_same_ids(tmp_path):
    for name in "ab":
        line = {"id": 1, "category": name, "turns": [f"for {name} in range(10):\n    print({name})\n"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
    files = f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}"
    words = ("--temperature", 0, "--max-new-tokens", 4, "steps=1", COSTS)
    result = run("collect", "--prompts", files, "--out", tmp_path / "c", *words)
    assert result.exit_code == 0, result.output
    said, rounds = read_collection(tmp_path / "c")
    assert set(rounds.report.tolist()) == {f"{said.pair} x a", f"{said.pair} x b"}


def test_another_model_at_the_same_place_needs_another_folder(tmp_path):
    middle = tmp_path / "middle"
    shutil.copytree(Path(treegraft_plugins.__path__[0]) / "hf" / "demo_pair" / "middle", middle)
    words = (f"models.middle={middle}", "models.target=demo:target", "--temperature", 0, "--max-new-tokens", 2)
    assert collect(tmp_path / "c", *words).exit_code == 0
    weights = load_file(middle / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, middle / "model.safetensors", {"format": "pt"})
    result = collect(tmp_path / "c", *words)
    assert result.exit_code == 2 and "manifest.json: models.middle.digest" in result.stderr


def test_missing_prompts_and_pipelines_of_one_source_are_refused(tmp_path):
    result = run("collect", "--prompts", tmp_path / "none.jsonl", "--out", tmp_path / "c")
    assert result.exit_code == 2 and "none.jsonl: No such file" in result.stderr
    result = collect(tmp_path / "c", "--pipeline", "all_small", costs="costs={use: fixed}")
    assert result.exit_code == 2 and "1 sources of ranks [0]" in result.stderr
    assert not (tmp_path / "c").exists()


# -- scheduler --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(collected) -> Path:
    """Weights, their ablations and their report."""
    out = collected.parent / "made" / "mine.safetensors"
    result = run(
        "scheduler", collected, "--out", out, "--signals", "frontier_depth,selected_score", "--ablations", *TINY
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == (out.parent / "mine-report" / "report.md").read_text() + "\n"
    return out


def test_weights_ablations_and_a_report_are_written(fitted):
    names = {None: fitted.stem} | {name: f"{fitted.stem}-{name}" for name in ABLATIONS}
    made = {name: read_weights(fitted.with_name(f"{stem}.safetensors")) for name, stem in names.items()}
    assert {name: weights.header.ablation for name, weights in made.items()} == {name: name for name in names}
    assert [len(weights.header.signals) for weights in made.values()] == [2, 2, 1, 15]
    assert [weights.value is not None for weights in made.values()] == [False, True, False, False]
    assert made[None].header.pairs == (("demo:target", "demo:middle"),)
    report = (fitted.parent / "mine-report" / "report.md").read_text()
    for part in ("## Modelled throughput", "## Ablations", "| pair | costs | whole | value_online |", "margin's sign"):
        assert part in report
    assert {path.name for path in (fitted.parent / "mine-report").glob("*.png")} == {"reliability.png", "calls.png"}


@pytest.mark.parametrize(("name", "mode"), [("mine", "predictor"), ("mine-value_online", "value")])
def test_the_scheduler_takes_what_was_fitted(fitted, name, mode):
    weights = fitted.with_stem(name)
    pipeline = treegraft.load(
        "treegraft", "steps=2", COSTS, f"scheduler={{use: distilled, weights: '{weights}', mode: {mode}}}"
    )
    assert pipeline.parts.scheduler.note().startswith(f"weights {name};")
    plain = treegraft.load("plain")
    prompt = PROMPTS["test"][1]
    found = pipeline.generate(prompt, 12)
    assert found.token_ids == plain.generate(prompt, 12).token_ids and not found.faults


def test_an_interrupted_fit_goes_on_and_makes_the_same(fitted, collected, tmp_path):
    """With what finished steps have left in the report's folder nothing is trained."""
    again = tmp_path / "mine.safetensors"
    beside = fitted.parent / "mine-report"
    result = run("scheduler", collected, "--out", again, *SIGNALS, *TINY, "--report", beside)
    assert result.exit_code == 0 and "value system" not in result.stderr and "predictor of" not in result.stderr
    assert again.read_bytes() == fitted.read_bytes()


def test_excluded_categories_and_other_collections_are_reported_on_only(collected, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROMPTS, "more", ("other", "x = 1\ny = x\n"))
        assert collect(tmp_path / "three", "--temperature", 0, "--max-new-tokens", 4).exit_code == 0
    out = tmp_path / "mine.safetensors"
    options = ("--exclude", "other", "--held-out", collected, *SIGNALS, *TINY)
    result = run("scheduler", tmp_path / "three", "--out", out, *options)
    assert result.exit_code == 0, result.output
    fitted_to, held_out = result.stdout.split("## Modelled throughput on what was held out")
    assert "middle x other" not in fitted_to and "middle x other, temperature 0 | flat, ratio 2 |" in held_out
    assert "middle x library, temperature 0 |" in fitted_to
    assert held_out.count("middle x library, temperature 0.8 | flat, ratio 2 |") == 1


def test_signals_are_selected_where_none_are_named(collected, tmp_path):
    out = tmp_path / "selected.safetensors"
    result = run("scheduler", collected, "--out", out, "--num-signals", 1, "--exclude", "tests", *TINY)
    assert result.exit_code == 2 and "1 reports (demo:target + demo:middle x library) cannot fill 2" in result.stderr
    result = run("scheduler", collected, "--out", out, "--num-signals", 1, "--selection-steps", 2, *TINY)
    assert result.exit_code == 0, result.output
    assert len(read_weights(out).header.signals) == 1 and (tmp_path / "selected-report" / "selection.png").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--signals", "frontier_dept"), "Did you mean 'frontier_depth'?"),
        (("--exclude", "test"), "Did you mean 'tests'?"),
        (("--folds", 3), "2 reports"),
        (("--out", "weights.bin"), "ends in .safetensors"),
        (("--num-signals", 16), "--num-signals: 16"),
        (("--held-out", "{collected}"), "named twice"),
        (("--report", "{collected}"), "a folder that holds something else"),
    ],
)
def test_what_cannot_be_fitted_is_refused(collected, tmp_path, args, message):
    args = [str(arg).format(collected=collected) for arg in args]
    result = run("scheduler", collected, "--out", tmp_path / "x.safetensors", *args)
    assert result.exit_code == 2 and message in result.stderr
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("what, message", [("missing", "3 of 4 continuations"), ("damaged", "damaged")])
def test_a_collection_that_is_not_whole_is_refused(what, message, collected, tmp_path):
    shutil.copytree(collected, tmp_path / "c")
    part = next((tmp_path / "c" / "parts").iterdir())
    if what == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-20])
    result = run("scheduler", tmp_path / "c", "--out", tmp_path / "x.safetensors", *SIGNALS, *TINY)
    assert result.exit_code == 2 and message in result.stderr and "fit collect" in result.stderr


def test_a_middle_that_costs_nothing_is_no_choice_to_learn(tmp_path):
    free = "costs={use: fixed, target: 5.0}"
    assert collect(tmp_path / "c", "--temperature", 0, "--max-new-tokens", 2, costs=free).exit_code == 0
    result = run("scheduler", tmp_path / "c", "--out", tmp_path / "x.safetensors", *SIGNALS, *TINY)
    assert result.exit_code == 2 and "a target or middle that costs nothing" in result.stderr


def test_weights_with_what_is_no_number_are_refused(fitted, tmp_path):
    with safe_open(fitted, "np") as file:
        header = file.metadata()
    arrays = load_file(fitted)
    name = next(name for name, array in arrays.items() if array.is_floating_point())
    arrays[name].view(-1)[0] = float("nan")
    save_file(arrays, tmp_path / "nan.safetensors", header)
    with pytest.raises(treegraft.ComposeError, match="holds what is no finite number"):
        treegraft.load("treegraft", "steps=2", f"scheduler={{use: distilled, weights: {tmp_path / 'nan.safetensors'}}}")


def test_what_exists_is_not_written_over(fitted, collected):
    before = fitted.read_bytes()
    result = run("scheduler", collected, "--out", fitted, *TINY)
    assert result.exit_code == 2 and f"{fitted} exists" in result.stderr and fitted.read_bytes() == before
    result = run("scheduler", collected, "--out", fitted.with_stem("mine-one"), "--signals", "frontier_depth", *TINY)
    assert result.exit_code == 0, result.output
    (fitted.with_stem("mine-two-one_signal")).write_text("mine")
    result = run("scheduler", collected, "--out", fitted.with_stem("mine-two"), "--ablations", *TINY)
    assert result.exit_code == 2 and "mine-two-one_signal.safetensors exists" in result.stderr


def test_collections_of_different_pipelines_are_not_fitted_together(collected, tmp_path):
    result = collect(tmp_path / "deeper", "steps=1", "--temperature", 0, "--max-new-tokens", 2)
    assert result.exit_code == 0, result.output
    result = run("scheduler", collected, tmp_path / "deeper", "--out", tmp_path / "x.safetensors", *TINY)
    assert result.exit_code == 2
    assert f"{tmp_path / 'deeper'}: steps: 1, and 2 in {collected}" in result.stderr
    assert "Fit them apart." in result.stderr
    (tmp_path / "nothing").mkdir()
    result = run("scheduler", tmp_path / "nothing", "--out", tmp_path / "x.safetensors")
    assert result.exit_code == 2 and "made by treegraft fit collect" in result.stderr
