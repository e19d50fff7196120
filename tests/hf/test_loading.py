"""Loading from everything a registry file may name, and errors that say what is wrong and what to do."""

import gc
import importlib.util
import json

import numpy as np
import pytest
import torch
from hf.families import FAMILIES
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import treegraft
from treegraft.errors import ModelError
from treegraft.interfaces import ModelSpec
from treegraft.registry import packaged_registry
from treegraft_plugins.hf.loading import load_causal_lm
from treegraft_plugins.hf.target import HFCausalLMTarget


@pytest.fixture
def folder(tmp_path):
    """A saved model without a tokenizer."""
    FAMILIES["llama"]().bfloat16().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("name", ["target", "middle"])
def test_the_demo_pair_is_embedded_and_passes_the_self_check(name):
    target = HFCausalLMTarget(ModelSpec(f"demo:{name}"))
    assert target.vocab_size == 4096
    assert target.max_length == 2048
    assert target.model.dtype == torch.float32  # the checkpoint is in bfloat16; auto is float32 on a CPU
    assert target.tokenizer.decode(target.tokenizer("import os").input_ids) == "import os"
    assert target.tokenizer.mask_token_id is not None


def test_a_folder_loads_without_a_tokenizer_where_there_is_none(folder):
    model, tokenizer = load_causal_lm(ModelSpec(str(folder)))
    assert tokenizer is None
    assert model.dtype == torch.float32
    assert not model.training


def test_dtype_and_attention_are_honoured(folder):
    model, _ = load_causal_lm(ModelSpec(str(folder), dtype="float64", attn_implementation="eager", device="cpu"))
    assert (model.dtype, model.config._attn_implementation) == (torch.float64, "eager")


def test_what_transformers_honours_is_handed_on(monkeypatch):
    pytest.importorskip("accelerate", reason="device_map needs the extra device-map")
    calls = []

    def from_pretrained(name, **options):
        calls.append((name, options))
        model = FAMILIES["llama"]()
        return (model, {"missing_keys": set()}) if options.pop("output_loading_info", False) else model

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", from_pretrained)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    load_causal_lm(
        ModelSpec("some/model", device_map="balanced", dtype="bfloat16", revision="v2", trust_remote_code=True)
    )
    load_causal_lm(ModelSpec("some/other:w.gguf", dtype="float16", attn_implementation="sdpa"))
    hub = {"revision": "v2", "trust_remote_code": True}
    gguf = {"trust_remote_code": False, "gguf_file": "w.gguf"}
    assert calls == [
        ("some/model", {"dtype": torch.bfloat16, "device_map": "balanced", **hub}),
        ("some/model", hub),
        ("some/other", {"dtype": torch.float16, "attn_implementation": "sdpa", **gguf}),
        ("some/other", gguf),
    ]


def test_the_same_spec_shares_its_weights_while_they_live(folder):
    first, _ = load_causal_lm(ModelSpec(str(folder)))
    assert load_causal_lm(ModelSpec(str(folder)))[0] is first
    assert load_causal_lm(ModelSpec(str(folder), dtype="float64"))[0] is not first
    marker = first.marker = object()
    del first
    gc.collect()
    assert not hasattr(load_causal_lm(ModelSpec(str(folder)))[0], "marker"), marker


def test_a_loaded_model_is_handed_back():
    model = FAMILIES["llama"]()
    assert load_causal_lm(model) == (model, None)


def test_nothing_is_printed_and_progress_bars_are_left_as_they_were(folder, capfd):
    was_on = logging.is_progress_bar_enabled()
    try:
        for switch, is_on in ((logging.enable_progress_bar, True), (logging.disable_progress_bar, False)):
            switch()
            model, _ = load_causal_lm(ModelSpec(str(folder)))
            assert logging.is_progress_bar_enabled() is is_on
            del model
            gc.collect()
        assert capfd.readouterr() == ("", "")
    finally:
        (logging.enable_progress_bar if was_on else logging.disable_progress_bar)()


def test_a_gguf_file_is_loaded_by_transformers(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = FAMILIES["llama"]()
    write_gguf(gguf, tmp_path / "tiny.gguf", model.config)
    target = HFCausalLMTarget(ModelSpec(str(tmp_path / "tiny.gguf")))
    assert type(target.model).__name__ == "LlamaForCausalLM"
    assert target.vocab_size == model.config.vocab_size
    assert target.tokenizer.decode(target.tokenizer("0123").input_ids) == "0123"


def write_gguf(gguf, path, config):
    """A random Llama with a byte-level BPE of single characters."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(48 + i) for i in range(config.vocab_size - 1)), "01"])
    writer.add_token_merges(["0 1"])
    for special in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        special(1)
    width, key_width, inner = config.hidden_size, config.hidden_size // 2, config.intermediate_size
    shapes = {
        "token_embd": (config.vocab_size, width), "output_norm": (width,), "output": (config.vocab_size, width),
        "blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,), "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (key_width, width), "blk.0.attn_v": (key_width, width), "blk.0.attn_output": (width, width),
        "blk.0.ffn_gate": (inner, width), "blk.0.ffn_up": (inner, width), "blk.0.ffn_down": (width, inner),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32) * 0.3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- errors -----------------------------------------------------------------------------------------------------------


def refusal(spec):
    with pytest.raises(ModelError) as caught:
        load_causal_lm(spec)
    assert caught.value.where in {f"model {spec.path!r}", "model"}
    return str(caught.value)


def test_an_unknown_demo_model_gets_a_suggestion():
    assert refusal(ModelSpec("demo:taget")).endswith("Did you mean 'demo:target'?")


def test_a_missing_folder_or_file_gets_a_suggestion(folder):
    assert f"Did you mean '{folder}'?" in refusal(ModelSpec(f"{folder}y"))
    (folder / "model.gguf").touch()
    assert "no such file" in (message := refusal(ModelSpec(f"{folder}/modle.gguf")))
    assert f"Did you mean '{folder}/model.gguf'?" in message


def test_a_folder_without_a_model_is_named(tmp_path):
    assert "config.json" in refusal(ModelSpec(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "model.safetensors" in refusal(ModelSpec(str(tmp_path)))


def test_an_encoder_decoder_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert "T5Config" in refusal(ModelSpec(str(tmp_path)))


def test_a_checkpoint_that_lacks_weights_is_refused_instead_of_filled_with_random_ones(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    message = refusal(ModelSpec(str(folder)))
    assert "no whole LlamaForCausalLM: it lacks model.norm.weight" in message and "models.dflash" not in message


@pytest.mark.parametrize(
    ("override", "found", "allowed", "action"),
    [
        ("models.middle=demo:dflash", "no whole Qwen3ForCausalLM: it lacks lm_head.weight, model.embed_tokens.weight",
         "a causal LM with all its weights", "saved as DFlashDraftModel; block drafters go by models.dflash"),
        ("models.middle=demo:heads", "treegraft_heads", "a folder, a hub id", None),
        ("models.dflash=demo:middle", "no DFlash drafter", "DFlashDraftModel", "{use: hf_causal_lm}"),
        ("models.dflash=demo:heads", "no DFlash drafter", "DFlashDraftModel", "{use: hf_causal_lm}"),
        ("models.heads=demo:dflash", "DFlashDraftModel", "HeadsDraftModel", "{use: hf_causal_lm}"),
    ],
)  # fmt: skip
def test_one_kind_of_drafter_is_not_taken_for_another(override, found, allowed, action):
    pipeline = {"middle": "all_middle", "dflash": "ddtree", "heads": "medusa_heads"}[override[7:].partition("=")[0]]
    with pytest.raises(ModelError) as caught:
        treegraft.load(pipeline, "costs={use: fixed}", override, registry=packaged_registry())
    error = caught.value
    assert override.partition("=")[2] in error.where
    assert found in error.found and allowed in error.allowed
    assert action is None or action in error.action


@pytest.mark.parametrize("path", ["nobody/no-such-model", "nobody/no-such-model:weights.gguf"])
def test_a_hub_id_out_of_reach_is_a_model_error(path, monkeypatch):
    if path.endswith(".gguf"):
        pytest.importorskip("gguf", reason="GGUF files need the extra gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "Allowed: a folder, a hub id" in refusal(ModelSpec(path))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"dtype": "float23"}, "no dtype 'float23'"),
        ({"device": "toaster"}, "no device 'toaster' here"),
        ({"device": "meta"}, "no device 'meta' here"),
        ({"device": "cpu", "device_map": "auto"}, "device 'cpu' beside device_map"),
        ({"attn_implementation": "flash_attention_2"}, "'flash_attention_2' cannot express a tree mask"),
    ],
)
def test_options_are_honoured_or_refused(options, found):
    assert found in refusal(ModelSpec("demo:target", **options))


@pytest.mark.parametrize(("extra", "package"), [("device-map", "accelerate"), ("gguf", "gguf")])
def test_a_missing_package_names_the_extra(extra, package, tmp_path, monkeypatch):
    (tmp_path / "some.gguf").touch()
    specs = {"device-map": ModelSpec("demo:target", device_map="auto"), "gguf": ModelSpec(f"{tmp_path}/some.gguf")}
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    message = refusal(specs[extra])
    assert f"needs the package {package}" in message
    assert f'pip install "treegraft[{extra}]"' in message


def test_something_else_than_a_model_is_refused():
    with pytest.raises(ModelError, match="a str"):
        load_causal_lm("demo:target")


def test_latencies_are_kept_apart_for_models_dtypes_and_rescore_limits():
    from treegraft_plugins.hf.drafter import HFCausalLMDrafter
    from treegraft_plugins.hf.engine import latency_identity

    target, _ = load_causal_lm(ModelSpec("demo:target"))
    double, _ = load_causal_lm(ModelSpec("demo:target", dtype="float64"))
    middle, _ = load_causal_lm(ModelSpec("demo:middle"))
    identities = {latency_identity(model) for model in (target, double, middle)}
    drafters = {HFCausalLMDrafter(model=middle, rescore_limit=limit).identity for limit in (None, 16, 32)}
    assert len(identities | drafters) == 6
    assert latency_identity(target) == latency_identity(target)
