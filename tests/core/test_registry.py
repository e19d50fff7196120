"""The registry that comes with treegraft: every pipeline of it composes, and they differ in what they say they do."""

import pytest

from treegraft.compose import ResolvedPipeline, resolve
from treegraft.errors import ComposeError
from treegraft.interfaces import ModelSpec
from treegraft.plugins import installed_plugins
from treegraft.registry import Registry, packaged_registry

PIPELINES = (
    "plain", "all_small", "all_suffix", "all_middle", "opt_tree", "csd", "treegraft", "treegraft_fixed", "middle_first",
    "treegraft_opt_tree", "overwrite", "newest_only", "neural_small", "suffix_small", "dflash_chain",
    "dflash_sampled", "ddtree",
    "ddtree_tdes", "ddtree_saba", "graft", "medusa_heads", "treegraft_dflash", "treegraft_graft", "treegraft_saba",
)  # fmt: skip
GRAFTS = {
    "ddtree_tdes": ("ddtree", True, False), "ddtree_saba": ("ddtree", False, True), "graft": ("ddtree", True, True),
    "treegraft_graft": ("treegraft_dflash", True, True), "treegraft_saba": ("treegraft", False, True),
}  # fmt: skip
"""What GRAFT's pipelines extend, and which of its two parts, edge scores and budget, they have."""
ABLATIONS = {
    f"treegraft_{name}": name for name in ("value_online", "one_signal", "all_signals")
}  # of the distilled scheduler


@pytest.fixture(scope="module")
def resolved() -> dict[str, ResolvedPipeline]:
    return {name: resolve(name, registry=packaged_registry()) for name in PIPELINES}


@pytest.fixture(autouse=True, scope="module")
def without_the_environments_models():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TREEGRAFT_TARGET", raising=False)
        patch.delenv("TREEGRAFT_MIDDLE", raising=False)
        patch.delenv("TREEGRAFT_DFLASH", raising=False)
        patch.delenv("TREEGRAFT_HEADS", raising=False)
        yield


def test_every_pipeline_composes_and_is_lossless(resolved):
    named = Registry.read(packaged_registry()).concrete()
    assert [name for name in named if name not in ABLATIONS] == list(PIPELINES) and set(ABLATIONS) < set(named)
    assert all(pipeline.lossless for pipeline in resolved.values())


def test_all_parts_come_through_the_entry_point(resolved):
    assert not installed_plugins().failures
    providers = {str(part.provider) for pipeline in resolved.values() for part in pipeline.parts.values()}
    assert len(providers) == 1 and providers.pop().startswith("treegraft ")


def test_all_but_plain_share_width_branching_steps_budget_and_costs(resolved):
    for name in PIPELINES[1:]:
        pipeline = resolved[name]
        assert {
            (source.width, source.branching)
            for key, source in pipeline.sources.items()
            if key not in ("dflash", "heads")
        } <= {(10, 10)}
        assert pipeline.config["steps"] == 5
        _, _, has_budget = GRAFTS.get(name, (None, False, False))
        budget = "saba" if has_budget else "fixed" if name == "dflash_sampled" else "gain_over_cost"
        assert pipeline.config["budget"] == {"use": budget, "verify_nodes": 63}
        assert pipeline.config["costs"] == {"use": "measured"}


def parts(pipeline: ResolvedPipeline) -> dict[str, tuple[str, dict]]:
    return {path: (part.use, part.arguments) for path, part in pipeline.parts.items()}


def test_ablations_differ_from_treegraft_in_one_thing(resolved):
    base = parts(resolved["treegraft"])
    expected = {
        "treegraft_fixed": {"scheduler": ("fixed", {"pattern": ["middle", "small", "middle", "small", "middle"]})},
        "middle_first": {"scheduler": ("fixed", {"pattern": ["middle", *["small"] * 4]})},
        "treegraft_opt_tree": {"scheduler": ("opt_tree", {"pattern": ["middle", "small"], "threshold": 0.1})},
        "overwrite": {"sources.small.graft": ("overwrite", {}), "sources.middle.graft": ("overwrite", {})},
        "newest_only": {"sources.middle.select": ("newest", {})},
        "neural_small": {"sources.small.draft": ("hf_causal_lm", {"model": "small"})},
        "suffix_small": {"sources.small.draft": ("suffix", {})},
    }
    for name, changes in expected.items():
        found = parts(resolved[name])
        assert {path: part for path, part in found.items() if base[path] != part} == changes


@pytest.mark.parametrize(("name", "ablation"), ABLATIONS.items())
def test_ablations_of_the_distilled_scheduler_are_refused_where_no_weights_ship(name, ablation):
    """And say what makes them."""
    others = ("models.target=some/model", "models.middle=some/other")
    with pytest.raises(ComposeError) as error:
        resolve(name, others, registry=packaged_registry())
    message = str(error.value)
    assert f"pipelines.{name}.scheduler" in message and f"{ablation!r}: no weights that ship fit" in message
    assert "treegraft fit scheduler DIR... --ablations --out NAME.safetensors" in message
    assert f"scheduler.weights=NAME-{ablation}.safetensors" in message


def test_endpoints_are_the_standard_tree_of_one_drafter(resolved):
    for name, source, use in (
        ("all_small", "small", "ngram"), ("all_suffix", "small", "suffix"), ("all_middle", "middle", "hf_causal_lm"),
    ):  # fmt: skip
        pipeline = resolved[name]
        assert list(pipeline.sources) == [source] and not pipeline.sources[source].rescore
        assert pipeline.parts[f"sources.{source}.draft"].use == use
        assert pipeline.parts[f"sources.{source}.select"].use == "newest"
        assert pipeline.parts["scheduler"].arguments == {"pattern": [source]}
    assert parts(resolved["all_small"])["sources.small.draft"] == parts(resolved["treegraft"])["sources.small.draft"]


def test_opt_tree_differs_from_all_middle_in_when_it_stops(resolved):
    base, found = parts(resolved["all_middle"]), parts(resolved["opt_tree"])
    changes = {path: part for path, part in found.items() if base[path] != part}
    assert changes == {"scheduler": ("opt_tree", {"pattern": ["middle"], "threshold": 0.2})}


def test_csd_drafts_one_chain_a_round(resolved):
    found = parts(resolved["csd"])
    assert found["sources.cascade.draft"][0] == "csd"
    assert found["scheduler"] == ("fixed", {"pattern": ["cascade", None]})


def test_models_default_to_the_embedded_pair_and_only_used_ones_count(resolved):
    target, middle = ModelSpec("demo:target"), ModelSpec("demo:middle")
    assert resolved["plain"].models == resolved["all_small"].models == {"target": target}
    assert resolved["treegraft"].models == {"target": target, "middle": middle}
    assert resolved["neural_small"].models == {"target": target, "middle": middle, "small": middle}


def test_models_follow_the_environment(monkeypatch):
    monkeypatch.setenv("TREEGRAFT_TARGET", "mine")
    monkeypatch.setenv("TREEGRAFT_MIDDLE", "yours")
    models = resolve("neural_small", registry=packaged_registry()).models
    assert {name: model.path for name, model in models.items()} == {
        "target": "mine",
        "small": "yours",
        "middle": "yours",
    }


def test_the_file_opens_with_the_command_that_runs_it():
    assert packaged_registry().read_text().startswith('# treegraft run treegraft --prompt "def main():"\n')


def test_one_pass_drafters_draft_once_a_round_at_the_root(resolved):
    chain, tree, shared = (resolved[name] for name in ("dflash_chain", "ddtree", "treegraft_dflash"))
    assert parts(chain)["scheduler"] == parts(tree)["scheduler"] == ("fixed", {"pattern": ["dflash", None]})
    assert [each.sources["dflash"].branching for each in (chain, tree, shared)] == [1, 32, 32]
    assert parts(shared)["sources.dflash.draft"] == parts(tree)["sources.dflash.draft"]
    assert parts(shared)["scheduler"][1]["pattern"].count("dflash") == 1
    for path, part in parts(resolved["treegraft"]).items():
        assert path == "scheduler" or parts(shared)[path] == part


def test_the_drawn_chain_differs_from_the_best_one_in_what_drawing_asks_for(resolved):
    best, drawn = parts(resolved["dflash_chain"]), parts(resolved["dflash_sampled"])
    assert {path for path in drawn if drawn[path] != best[path]} == {"sources.dflash.draft", "verifier", "budget"}
    assert drawn["sources.dflash.draft"] == ("dflash_sampled", {"model": "dflash"}) and drawn["verifier"][0] == "block"
    assert [name for name in PIPELINES if not resolved[name].repeats_plain] == ["dflash_sampled"]


@pytest.mark.parametrize("name", GRAFTS)
def test_grafts_parts_are_all_that_its_pipelines_change_and_say_what_they_do(resolved, name):
    extended, has_edges, has_budget = GRAFTS[name]
    base, found = parts(resolved[extended]), parts(resolved[name])
    changes = {path: part for path, part in found.items() if base.get(path) != part}
    edges = {"sources.dflash.edges": ("tdes", {})} if has_edges else {}
    budget = {"budget": ("saba", {"verify_nodes": 63})} if has_budget else {}
    assert changes == edges | budget and set(base) <= set(found)
    notes = resolved[name].notes
    assert set(notes) == set(changes) | set(resolved[extended].notes)
    for note in notes.values():
        assert note.startswith("weights ") or "because no weights that ship fit" in note
