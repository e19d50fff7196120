"""Which models can be forwarded under a tree mask: refusal by name first, then a self-check on the model itself."""

import inspect
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from treegraft.errors import ModelError
from treegraft.interfaces import Wants
from treegraft_plugins.hf.engine import TreeEngine

ATTENTION = ("sdpa", "eager")
"""Attention kernels that take an arbitrary mask in the form that `masks` builds."""

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SERVED_CACHE_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer}
_WHY_NOT = {
    "conv": "short convolutions mix neighbouring slots, so siblings would leak into each other",
    "linear_attention": "a recurrent state folds all tokens into one and cannot branch",
    "hybrid": "a recurrent state folds all tokens into one and cannot branch",
    "hybrid_sliding": "a recurrent state folds all tokens into one and cannot branch",
    "chunked_attention": "its chunks are counted in slots, which siblings would shift",
    "indexed_attention": "its index of keys cannot be rolled back to a path",
    "dummy": "its layers share keys and values, which no test has proved under trees",
}


def refuse_unserved(model: PreTrainedModel) -> None:
    """Check what can be known without a forward.

    Raises:
        ModelError: the model cannot be served under tree masks; with its class and the reason.
    """
    reason = _reason_against(model)
    if reason is not None:
        found, action = reason
        allowed = "Served: decoders with full or sliding-window attention, under sdpa or eager."
        raise ModelError(type(model).__name__, found, allowed, action)


def _reason_against(model: PreTrainedModel) -> tuple[str, str | None] | None:
    """What was found and what to do about it, or None."""
    if model.config.is_encoder_decoder:
        return "an encoder-decoder model", "Use a decoder-only causal LM."
    if model.training:
        return "the model is in training mode, where dropout makes every forward different", "Call model.eval() first."
    config = model.config.get_text_config(decoder=True)
    for found in (_unserved_layers(config), _positions_from_slots(model, config)):
        if found is not None:
            return found, "Decode it with transformers' own generate()."
    if config._attn_implementation not in ATTENTION:
        return (
            f"attention implementation {config._attn_implementation!r}, which cannot express a tree mask",
            'Load it with attn_implementation=sdpa, or call model.set_attn_implementation("sdpa").',
        )
    return None


def _unserved_layers(config: Any) -> str | None:
    """The layers no test has proved under trees, by type and with the reason, or None."""
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError, ValueError) as error:
        return f"its cache layers are unknown ({type(error).__name__}: {error})"
    types = set(getattr(config, "layer_types", None) or ())
    types |= {"chunked_attention"} if getattr(config, "attention_chunk_size", None) is not None else set()
    for kind in sorted(types - _SERVED_LAYER_TYPES):
        return f"{kind} layers: {_WHY_NOT.get(kind, 'no test has proved them under trees')}"
    for kind in sorted({type(layer) for layer in layers} - _SERVED_CACHE_LAYERS, key=str):
        return f"cache layers of class {kind.__name__}: no test has proved them under trees"
    if len({layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)}) > 1:
        return "sliding windows of several sizes"
    return None


def _positions_from_slots(model: PreTrainedModel, config: Any) -> str | None:
    """Why siblings could not share a position, or None."""
    if getattr(config, "alibi", False):
        return "alibi attention: its bias is counted in slots, which siblings would shift"
    missing = {"position_ids", "cache"} - set(inspect.signature(model.forward).parameters)
    if missing:
        return f"its forward takes no {' and no '.join(sorted(missing))}, so siblings could not share a position"
    return None


# -- self-check -------------------------------------------------------------------------------------------------------

# Two branches below the root, each extended in a second forward; the second is accepted, then two siblings follow it.
#   root - a - c
#        - b - d   accepted, then the next root with the siblings e and f
_PROMPT, _ROOT, _A, _B, _C, _D, _NEXT, _E, _F = range(3), 3, 4, 5, 6, 7, 8, 9, 10


def check_trees(engine: TreeEngine) -> None:
    """Compare tree forwards and a commit with plain forwards along each path.

    Costs five forwards of a few rows. Whatever a model does that the masks, positions or the cache do not foresee
    shows here, before it can show in text.

    Raises:
        ModelError: they differ, or the model cannot be called like this at all.
    """
    name = type(engine.model).__name__
    try:
        found, expected = _tree_logits(engine), _path_logits(engine)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise ModelError(
            name, f"its forward fails under a tree mask ({type(error).__name__}: {error})", None,
            "Decode it with transformers' own generate().",
        ) from error  # fmt: skip
    finally:
        engine.reset()
    if found.shape != expected.shape or found.shape[-1] != engine.vocab_size:
        raise ModelError(name, f"logits {list(found.shape)} for a vocabulary of {engine.vocab_size}")
    error, limit = relative_error(found, expected), tolerance(engine.model)
    if not error <= limit:
        raise ModelError(
            name, f"self-check failed: tree and plain logits differ by {error:.1e} of their spread",
            f"Allowed: {limit:.0e}.", "It would emit wrong text; decode it with transformers' own generate().",
        )  # fmt: skip


def tolerance(model: PreTrainedModel) -> float:
    """Largest error that rounding explains, relative to the spread of the logits."""
    if torch.finfo(model.dtype).bits < 32:
        return 0.05
    exact = model.dtype == torch.float64 and model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
    return 1e-9 if exact else 1e-4  # eager attention takes its softmax in float32


@torch.no_grad()
def head_is_all(model: PreTrainedModel) -> bool:
    """Whether the head alone gives the forward's logits, from the last hidden states."""
    head = model.get_output_embeddings()
    ids = torch.tensor([[0, 1, 2]], device=model.get_input_embeddings().weight.device)
    output = model(input_ids=ids, use_cache=False, output_hidden_states=[-1])
    made = head(output.hidden_states[-1].to(head.weight.device))
    return relative_error(made, output.logits) <= tolerance(model)


def _tokens(engine: TreeEngine) -> np.ndarray:
    return np.random.default_rng(0).integers(0, engine.vocab_size, _F + 1)


def _tree_logits(engine: TreeEngine) -> torch.Tensor:
    """Logits [8, V] after root, a, b, c, d, next root, e, f, all but the prompt's by tree forwards."""
    tokens = _tokens(engine)
    at = len(_PROMPT)
    engine.prefill(tokens[_PROMPT], Wants())
    seen = np.eye(5, dtype=np.bool_)  # root, a, b, c, d
    seen[1:, 0] = seen[3, 1] = seen[4, 2] = True
    first, _ = engine.forward(tokens[[_ROOT, _A, _B]], np.array([at, at + 1, at + 1]), seen[:3, :3])
    second, _ = engine.forward(tokens[[_C, _D]], np.array([at + 2, at + 2]), seen[3:])
    engine.commit(np.array([0, 2, 4]))
    third, _ = engine.forward(tokens[[_NEXT, _E, _F]], np.array([at + 3, at + 4, at + 4]), seen[:3, :3])
    return torch.cat([first, second, third])


@torch.inference_mode()
def _path_logits(engine: TreeEngine) -> torch.Tensor:
    """The same logits [8, V] from one plain forward of three whole sequences, without a cache."""
    tokens = _tokens(engine)
    prompt = list(_PROMPT)
    paths = [[*prompt, _ROOT, _B, _D, _NEXT, _E], [*prompt, _ROOT, _B, _D, _NEXT, _F], [*prompt, _ROOT, _A, _C, _E, _E]]
    output = engine.model(input_ids=torch.tensor(tokens[paths], device=engine.device), use_cache=False)
    rows = [(0, _ROOT), (2, _A), (0, _B), (2, _C), (0, _D), (0, _NEXT), (0, _E), (1, _F)]
    return torch.stack([output.logits[path, paths[path].index(node)] for path, node in rows])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square difference over the root mean square spread of the expected logits."""
    expected = expected.double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((found.double() - expected).norm() / spread)
