"""`treegraft fit edges` and `fit budget` on the demo models: from prompts to a pipeline with the weights they made."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import treegraft
import treegraft_plugins
from treegraft.cli import main
from treegraft.registry import packaged_registry

ROOT = Path(__file__).parents[2]
COSTS = ROOT / "benchmarks" / "data" / "demo_costs.json"
HELD_OUT = (ROOT / "benchmarks" / "data" / "demo_heldout.jsonl").read_text().splitlines()
SMALL = ("--temperature", "0", "--max-new-tokens", "8", "--steps", "2", "--costs", COSTS)


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in ("fit", *words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both fits, one after the other."""
    folder = tmp_path_factory.mktemp("graft")
    for name, lines in (("prompts", HELD_OUT[:2]), ("held_out", HELD_OUT[20:22])):
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    given = ("--prompts", folder / "prompts.jsonl", "--held-out", folder / "held_out.jsonl", *SMALL)
    edges = run("edges", *given, "--out", folder / "edges", "--nodes", 15, "--rank", 4, "--betas", "0.2,1")
    assert edges.exit_code == 0, edges.output
    assert "## all (2 texts)" in edges.stdout and "report: " in edges.stderr
    budget = run("budget", *given, "--out", folder / "budget", "--pipeline", "graft", *weights(folder)[:2])
    assert budget.exit_code == 0, budget.output
    assert "## linear costs, all" in budget.stdout
    return folder


def weights(folder):
    return (
        f"sources.dflash.edges.weights={folder / 'edges' / 'tdes.safetensors'}", "budget.verify_nodes=15",
        f"budget.weights={folder / 'budget' / 'saba.safetensors'}",
    )  # fmt: skip


def test_the_weights_serve_the_pipeline_and_the_text_stays_the_targets(folder):
    costs = f"costs={{use: file, path: {json.dumps(str(COSTS))}}}"
    pipeline = treegraft.load("graft", *weights(folder), costs, registry=packaged_registry())
    (source,) = pipeline.sources
    assert source.edge_scorer.note().startswith("weights tdes, beta ")
    assert pipeline.parts.budget.note().startswith("weights saba; expected_gain in rounds without mean_top1")
    prompt = json.loads(HELD_OUT[30])["turns"][0]
    result = pipeline.generate(prompt, 24, keep_rounds=True)
    plain = treegraft.load("plain", registry=packaged_registry()).generate(prompt, 24)
    assert not result.faults and result.token_ids == plain.token_ids
    assert result.accepted_per_round > 0
    assert any(done.choice.gain is not None for done in result.rounds)


def test_another_pipeline_refuses_them_by_name(folder):
    *_, budget = weights(folder)
    with pytest.raises(treegraft.ComposeError, match=r"budget: weights: .*fitted for verify_nodes 15, not 63"):
        treegraft.load("graft", budget, registry=packaged_registry())
    with pytest.raises(treegraft.ComposeError, match=r"budget: weights: .*fitted for sources"):
        treegraft.load("ddtree_saba", "budget.verify_nodes=15", budget, registry=packaged_registry())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pipeline", "treegraft"], "Allowed: a pipeline of one source, whose drafter takes an edge scorer"),
        (["--pipeline", "all_small"], "such as ddtree"),
        (["--betas", "0,0.2"], "not a list of finite numbers > 0"),
        (["--betas", "inf"], "not a list of finite numbers > 0"),
        (["--temperature", "nan"], "not a list of finite numbers >= 0"),
        (["--temperature=-1"], "not a list of finite numbers >= 0"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--edge-loss", "-1"], "--edge-loss"),
        (["budget.verify_nodes=3"], "Give its size by --nodes"),
        (["scheduler={use: fixed}"], "It draws one tree a round"),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_anything_is_loaded(words, message, tmp_path):
    (tmp_path / "p.jsonl").write_text(HELD_OUT[0] + "\n")
    given = ("--prompts", tmp_path / "p.jsonl", "--held-out", tmp_path / "p.jsonl", "--out", tmp_path / "out")
    result = run("edges", *given, *words)
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "out").exists()


def given(folder, *more):
    return ("--prompts", folder / "prompts.jsonl", "--held-out", folder / "held_out.jsonl", *SMALL, *more)


@pytest.mark.parametrize("command", ["edges", "budget"])
def test_a_folder_of_anything_else_is_left_alone(command, folder, tmp_path):
    other = folder / {"edges": "budget", "budget": "edges"}[command]
    (tmp_path / "report.md").write_text("mine")
    for out in (other, tmp_path):
        report = (out / "report.md").read_text()
        result = run(command, *given(folder), "--out", out)
        assert result.exit_code == 2 and str(out) in result.output
        assert (out / "report.md").read_text() == report


@pytest.mark.parametrize("command, more", [("edges", ("--nodes", 15, "--rank", 4, "--betas", "0.2,1")), ("budget", ())])
def test_another_table_is_not_passed_over(command, more, folder, tmp_path):
    costs = json.loads(COSTS.read_text())
    (tmp_path / "costs.json").write_text(json.dumps(costs | {"context_ms": 7.0}))
    result = run(command, *given(folder, "--costs", tmp_path / "costs.json", *more), "--out", folder / command)
    assert result.exit_code == 2 and "another table than" in result.output
    (tmp_path / "costs.json").write_text(json.dumps(costs | {"target": 0}))
    result = run(command, *given(folder, "--costs", tmp_path / "costs.json", *more), "--out", tmp_path / "out")
    assert result.exit_code == 2 and "a target that costs nothing" in result.output


@pytest.mark.parametrize("command", ["edges", "budget"])
def test_prompts_that_are_fitted_to_are_not_held_out(command, folder, tmp_path):
    (tmp_path / "both.jsonl").write_text("\n".join(HELD_OUT[1:3]) + "\n")
    files = ("--prompts", folder / "prompts.jsonl", "--held-out", tmp_path / "both.jsonl")
    result = run(command, *files, *SMALL, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "which is among --prompts too" in result.output


@pytest.mark.parametrize("words, message", [(("--pipeline", "plain"), "no sources"),
                                            (("budget.verify_nodes=0",), "a budget of no nodes")])  # fmt: skip
def test_a_budget_is_fitted_where_there_is_a_choice(words, message, folder, tmp_path):
    result = run("budget", *given(folder), "--out", tmp_path / "out", *words)
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "out").exists()


def test_what_was_made_of_another_drafter_is_not_used_again(folder, tmp_path):
    """Also where the drafter lies at the same place, after one more round of its training."""
    drafter = tmp_path / "drafter"
    shutil.copytree(Path(treegraft_plugins.__path__[0]) / "hf" / "demo_pair" / "dflash", drafter)
    words = given(folder, "--nodes", 7, "--rank", 4, "--betas", "1")
    models = ("models.target=demo:target", f"models.dflash={drafter}")
    assert run("edges", *words, "--out", tmp_path / "edges", *models).exit_code == 0
    weights = load_file(drafter / "model.safetensors")
    weights["norm.weight"] = -weights["norm.weight"]
    save_file(weights, drafter / "model.safetensors", {"format": "pt"})
    result = run("edges", *words, "--out", tmp_path / "edges", *models)
    assert result.exit_code == 2 and "models" in result.output and "Take another --out" in result.output


@pytest.mark.parametrize("file", ["costs.json", "manifest.json", "labels/fit/manifest.json", "labels/fit/*.npz"])
def test_a_damaged_file_of_a_fit_is_named(file, folder, tmp_path):
    shutil.copytree(folder / "budget", tmp_path / "budget")
    path = next((tmp_path / "budget").glob(file))
    path.write_bytes(path.read_bytes()[:-20])
    more = ("--pipeline", "graft", *weights(folder)[:2])
    result = run("budget", *given(folder, *more), "--out", tmp_path / "budget")
    assert result.exit_code == 2 and f"{path}: damaged" in result.output


def test_prompts_of_two_files_may_have_the_same_ids(folder, tmp_path):
    files = []
    for name, lines in (("a", HELD_OUT[:2]), ("b", HELD_OUT[2:4])):
        rows = [json.loads(line) | {"id": number} for number, line in enumerate(lines)]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = ("--prompts", ",".join(map(str, files)), "--held-out", folder / "held_out.jsonl", *SMALL)
    result = run("budget", *words, "--out", tmp_path / "out", "budget.verify_nodes=15")
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "out" / "labels").glob("*/*.npz"))) == 4 + 2
