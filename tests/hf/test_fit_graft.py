"""`treegraft fit edges` and `fit budget` on the demo models: from prompts to a pipeline with the weights they made."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import treegraft
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
        (["--betas", "0,0.2"], "Allowed: numbers > 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_anything_is_loaded(words, message, tmp_path):
    (tmp_path / "p.jsonl").write_text(HELD_OUT[0] + "\n")
    given = ("--prompts", tmp_path / "p.jsonl", "--held-out", tmp_path / "p.jsonl", "--out", tmp_path / "out")
    result = run("edges", *given, *words)
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "out").exists()
