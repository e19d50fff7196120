"""Where models live and in what precision: two devices, mixed dtypes, device_map, quantised weights."""

import pytest
import torch
from hf.families import FAMILIES, middle_of
from hf.reference import generated
from hf.test_loading import write_gguf

import treegraft
from treegraft.registry import packaged_registry

ALWAYS = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 16}")
PROMPT = [7, 41, 3, 18, 7, 41, 3, 29]
NUM_TOKENS = 12


def run(models, *overrides, name="treegraft_fixed", **options):
    pipeline = treegraft.load(name, *ALWAYS, *overrides, models=models, registry=packaged_registry())
    result = pipeline.generate(PROMPT, NUM_TOKENS, **options)
    assert result.faults == []
    return pipeline, result


def accepted(result):
    return sum(number * count for number, count in result.accepted_histogram.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}])
def test_drafter_and_target_of_different_dtypes(dtype, options):
    target = FAMILIES["llama"]()
    middle = middle_of(target).to(dtype)
    _, plain = run({"target": target}, name="plain", **options)
    _, result = run({"target": target, "middle": middle}, name="all_middle", **options)
    assert result.token_ids == plain.token_ids and accepted(result) > 0
    assert middle.dtype == dtype and target.dtype == torch.float64


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator beside the CPU")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("on_accelerator", [("target",), ("middle",), ("target", "middle")])
def test_drafter_and_target_on_different_devices(on_accelerator, options):
    target = FAMILIES["llama"]()
    models = {"target": target, "middle": middle_of(target)}
    for name in on_accelerator:
        models[name].to(torch.accelerator.current_accelerator())
    _, plain = run({"target": target}, name="plain", **options)
    _, result = run(models, **options)
    assert result.token_ids == plain.token_ids and accepted(result) > 0


def test_a_device_map_places_a_model_with_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    target = FAMILIES["llama"]()
    target.save_pretrained(tmp_path / "target")
    middle_of(target).save_pretrained(tmp_path / "middle")
    paths = {name: str(tmp_path / name) for name in ("target", "middle")}
    exact = ("models.target.dtype=float64", "models.middle.dtype=float64")
    _, result = run(paths, *exact, "models.target.device_map=auto", "models.middle.device_map=auto")
    assert result.token_ids == generated(target, PROMPT, NUM_TOKENS) and accepted(result) > 0


def test_layers_in_several_places_are_served_through_accelerates_hooks(tmp_path):
    """A layer on disk stands for one on another device: its weights are on none between forwards."""
    accelerate = pytest.importorskip("accelerate")
    target = FAMILIES["llama"]()
    expected, middle = generated(target, PROMPT, NUM_TOKENS), middle_of(target)
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    layers = {f"model.layers.{index}": "disk" if index == 1 else "cpu" for index in range(3)}
    placed = accelerate.dispatch_model(target, places | layers, main_device="cpu", offload_dir=tmp_path)
    assert placed.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    _, result = run({"target": placed, "middle": middle})
    assert result.token_ids == expected and accepted(result) > 0


def test_a_quantised_gguf_target_decodes_as_transformers_decodes_it(tmp_path):
    gguf = pytest.importorskip("gguf")
    write_gguf(gguf, tmp_path / "tiny.gguf", FAMILIES["llama"]().config)
    paths = {name: str(tmp_path / "tiny.gguf") for name in ("target", "middle")}
    pipeline, result = run(paths, name="all_middle")
    assert result.token_ids == generated(pipeline.target.model, PROMPT, NUM_TOKENS)
    assert accepted(result) > 0 and result.text


def test_a_target_quantised_by_bitsandbytes_decodes_as_transformers_decodes_it(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    FAMILIES["llama"]().float().save_pretrained(tmp_path)
    eight_bit = BitsAndBytesConfig(load_in_8bit=True)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=eight_bit, dtype=torch.float32)
    _, result = run({"target": target.eval(), "middle": str(tmp_path)}, name="all_middle")
    assert result.token_ids == generated(target, PROMPT, NUM_TOKENS) and accepted(result) > 0
