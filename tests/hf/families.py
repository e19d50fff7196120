"""Tiny random models, one of every family that is served, and middles that mostly agree with them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from treegraft_plugins.hf.dflash.model import ARCHITECTURE, DFlashDraftModel, draft_config
from treegraft_plugins.hf.heads.model import HeadsDraftModel, heads_config

VOCAB_SIZE = 64
MAX_LENGTH = 256
WINDOW = 8

_SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_LENGTH,
    # Wider than a real initialisation: logits far from uniform, so that greedy text varies and errors show.
    "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Gemma scales its embeddings: tied to the head, a random model would repeat its last token for ever.
_UNTIED = {"tie_word_embeddings": False}
_EAGER = {"attn_implementation": "eager"}

# name: (class prefix, configuration beside or instead of _SHAPE; None takes an entry out)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral_window": ("Mistral", {"sliding_window": WINDOW, "head_dim": 8}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, **_UNTIED, **_EAGER}),
    "gemma3": (
        "Gemma3",
        {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": _MIXED, **_UNTIED},
    ),
    "gpt2": ("GPT2", {"num_key_value_heads": None, "intermediate_size": None}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None}),
    "olmo2": ("Olmo2", {}),
    "starcoder2": ("Starcoder2", {}),
    "stablelm": ("StableLm", {}),
    "cohere": ("Cohere", {}),
    "phi3": ("Phi3", {}),
    "opt": ("OPT", {"num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("Falcon", {"num_key_value_heads": None, "intermediate_size": None}),
    "mixtral": ("Mixtral", {**_MOE, "sliding_window": None}),
    "gpt_oss": ("GptOss", {**_MOE, "sliding_window": WINDOW, "head_dim": 8, "layer_types": _MIXED, **_ROPE, **_EAGER}),
}


def _configuration(prefix: str, options: dict[str, Any]) -> Any:
    settings = {key: value for key, value in {**_SHAPE, **options}.items() if value is not None}
    name = f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    return getattr(transformers, name)(**settings)


def build(prefix: str, options: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A random float64 model in evaluation mode, the same for the same arguments; global random state is restored."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = _configuration(prefix, {k: v for k, v in options.items() if k != "attn_implementation"})
        config._attn_implementation = options.get("attn_implementation", "sdpa")
        model = getattr(transformers, "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")(config)
    model = model.double().eval()
    if "num_local_experts" in options:
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    model.generation_config.eos_token_id = None
    return model


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    name: (lambda prefix=prefix, options=options: build(prefix, options))
    for name, (prefix, options) in _FAMILIES.items()
}
"""Factories of targets by name. Text has no end token; set `model.generation_config.eos_token_id` for one."""


def middle_of(model: PreTrainedModel, noise: float = 0.02, seed: int = 1) -> PreTrainedModel:
    """A copy of `model` whose weights carry relative noise: most of its guesses are the model's own."""
    middle = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in middle.parameters():
            parameter += (
                noise
                * parameter.std(correction=0)
                * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            )
    return middle


def dflash_of(model: PreTrainedModel, block_size: int = 12, seed: int = 1) -> DFlashDraftModel:
    """A random block-diffusion drafter that fits `model`: right by chance, now and then, in a wide tree."""
    config = model.config.get_text_config(decoder=True)
    settings = {
        "architectures": [ARCHITECTURE], "block_size": block_size, "num_target_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": config.vocab_size, "initializer_range": 0.3,
        "max_position_embeddings": MAX_LENGTH, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DFlashDraftModel(draft_config(settings, "a test")).to(model.dtype).eval()


def heads_of(model: PreTrainedModel, seed: int = 1) -> HeadsDraftModel:
    """Random heads that fit `model`."""
    config = model.config.get_text_config(decoder=True)
    settings = {
        "architectures": ["HeadsDraftModel"], "num_heads": 4, "hidden_size": config.hidden_size,
        "num_target_layers": config.num_hidden_layers, "vocab_size": config.vocab_size,
    }  # fmt: skip
    heads = HeadsDraftModel(heads_config(settings, "a test")).to(model.dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return heads
