"""Facts of transformers that the adapter rests on; an upgrade that changes one fails here, by name."""

import inspect

import pytest
import torch
import transformers
from hf.families import FAMILIES, WINDOW
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import create_causal_mask, sliding_window_overlay
from transformers.utils import logging

from treegraft_plugins.hf.cache import SlotCache, SlotLayer

IDS = torch.arange(3, 23)[None]


@pytest.fixture(scope="module")
def llama():
    return FAMILIES["llama"]()


@pytest.fixture(scope="module")
def gemma3():
    return FAMILIES["gemma3"]()


def causal(num_tokens=IDS.shape[1], window=None):
    """Additive mask [1, 1, T, T]."""
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None, :]
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(1, 1, num_tokens, num_tokens, dtype=torch.float64).masked_fill(hidden, -torch.inf)


@torch.no_grad()
def logits(model, **options):
    return model(input_ids=IDS, **options).logits


def error(found, expected):
    return float((found - expected).detach().abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_served_forward_takes_cache_positions_and_logits_to_keep(name):
    model = FAMILIES[name]()
    assert {"cache", "position_ids", "logits_to_keep", "attention_mask"} <= set(
        inspect.signature(model.forward).parameters
    )


def test_the_container_makes_layers_of_a_given_class_as_the_model_writes_to_them(llama):
    cache = SlotCache()
    assert isinstance(cache, Cache)
    assert cache.layers == []
    output = llama(input_ids=IDS, cache=cache, use_cache=True)
    assert output.cache is cache
    assert [type(layer) for layer in cache.layers] == [SlotLayer] * 3
    assert cache.get_seq_length() == IDS.shape[1]
    assert cache.get_mask_sizes(4, 0) == (IDS.shape[1] + 4, 0)


def test_a_4d_mask_passes_through_as_it_is():
    mask = causal()
    made = create_causal_mask(LlamaConfig(), torch.zeros(1, IDS.shape[1], 8), mask, None)
    assert made is mask


def test_additive_masks_serve_sdpa_and_eager(llama):
    eager = FAMILIES["llama"]()
    eager.set_attn_implementation("eager")
    assert error(logits(llama, attention_mask=causal()), logits(llama)) < 1e-12
    assert error(logits(eager, attention_mask=causal()), logits(llama)) < 1e-4


def test_a_bool_mask_is_silently_wrong_under_eager():
    eager = FAMILIES["llama"]()
    eager.set_attn_implementation("eager")
    assert error(logits(eager, attention_mask=causal() == 0), logits(eager)) > 1e-2


def test_a_dict_of_masks_is_refused_without_layer_types(llama):
    with pytest.raises(AttributeError):
        logits(llama, attention_mask={"full_attention": causal()})


def test_a_dict_of_masks_by_layer_type_is_used_as_it_is(gemma3):
    masks = {"full_attention": causal(), "sliding_attention": causal(window=WINDOW)}
    assert error(logits(gemma3, attention_mask=masks), logits(gemma3)) < 1e-12


def test_one_mask_for_several_layer_types_is_silently_wrong(gemma3):
    assert error(logits(gemma3, attention_mask=causal(), cache=DynamicCache()), logits(gemma3)) > 1e-2


def test_a_window_sees_itself_and_the_window_minus_one_before():
    sees = sliding_window_overlay(3)
    assert [bool(sees(0, 0, 10, key)) for key in (7, 8, 9)] == [False, True, True]


def test_with_a_full_length_cache_the_models_own_masks_hold_the_window(gemma3):
    cache, parts = DynamicCache(), []
    for chunk in IDS.split(7, dim=1):
        parts.append(gemma3(input_ids=chunk, cache=cache).logits)
    assert error(torch.cat(parts, dim=1), logits(gemma3)) < 1e-12


def test_cache_layers_tell_sliding_from_full_but_not_from_chunked():
    config = FAMILIES["gemma3"]().config
    layers = DynamicCache(config=config).layers
    assert [type(layer) for layer in layers] == [DynamicSlidingWindowLayer, DynamicLayer, DynamicSlidingWindowLayer]
    assert layers[0].sliding_window == WINDOW
    chunked = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=32
    )
    assert "chunked_attention" in chunked.layer_types
    assert {type(layer) for layer in DynamicCache(config=chunked).layers} <= {DynamicSlidingWindowLayer, DynamicLayer}


def test_hidden_states_asked_for_by_index_come_alone_at_that_index(llama):
    states = llama(input_ids=IDS, output_hidden_states=[1, 3]).hidden_states
    assert [state is not None for state in states] == [False, True, False, True]


def test_logits_to_keep_keeps_the_last(llama):
    assert error(logits(llama, logits_to_keep=1), logits(llama)[:, -1:]) < 1e-12


def test_gpt2_calls_its_positions_max_position_embeddings_too():
    assert transformers.GPT2Config(n_positions=77).max_position_embeddings == 77


def test_a_custom_generate_callable_gets_everything_built(llama):
    got = {}

    def capture(model, input_ids, **kwargs):
        got.update(kwargs, model=model)
        return input_ids

    returned = llama.generate(
        IDS, custom_generate=capture, do_sample=True, temperature=0.5, top_k=3, eos_token_id=[4, 5],
        repetition_penalty=1.1, max_new_tokens=7,
    )  # fmt: skip
    assert got["model"] is llama
    assert torch.equal(returned, IDS)
    assert [type(p).__name__ for p in got["logits_processor"]] == [
        "RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper",
    ]  # fmt: skip
    by_name = {type(criterion).__name__: criterion for criterion in got["stopping_criteria"]}
    assert set(by_name) == {"MaxLengthCriteria", "EosTokenCriteria"}
    assert by_name["EosTokenCriteria"].eos_token_id.tolist() == [4, 5]
    assert got["generation_config"].get_generation_mode() == "sample"


def test_stop_strings_need_a_tokenizer_that_never_reaches_the_callable(llama):
    with pytest.raises(ValueError, match="tokenizer"):
        llama.generate(
            IDS, custom_generate=lambda *args, **kwargs: IDS, tokenizer=object(), stop_strings="x", max_new_tokens=3
        )


def test_the_switch_for_progress_bars_covers_the_loading_of_weights(llama, tmp_path, capfd):
    llama.save_pretrained(tmp_path)
    was_on = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar()
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert "Loading weights" in capfd.readouterr().err
        logging.disable_progress_bar()
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert capfd.readouterr().err == ""
    finally:
        (logging.enable_progress_bar if was_on else logging.disable_progress_bar)()
