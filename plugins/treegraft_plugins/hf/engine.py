"""A causal LM over a slot-addressed cache: committed tokens first, then tree nodes in the order they were forwarded."""

import hashlib
import inspect
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from treegraft.errors import RequestError
from treegraft.interfaces import Observation, Wants
from treegraft.sampling import top_tokens
from treegraft.tree import Bools, Ints
from treegraft_plugins.hf.cache import KeysValues, Past, SlotCache
from treegraft_plugins.hf.masks import MaskLayout

_CHUNK = 256  # prompt tokens a forward; bounds what the prompt's logits hold at once


def latency_identity(model: PreTrainedModel) -> str:
    """What this model's latencies depend on: weights' shapes, dtype, device, threads, versions."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    config = hashlib.sha256(model.config.to_json_string().encode()).hexdigest()[:16]
    parts = (type(model).__name__, model.config._name_or_path, config, model.dtype, device, name, threads)
    return " ".join(map(str, (*parts, f"torch {torch.__version__}", f"transformers {transformers.__version__}")))


class TreeEngine:
    """Forwards tree nodes through a model's own forward, and commits a path of them.

    Attributes:
        num_committed: tokens in the cache that belong to the sequence.
        num_slots: tree slots behind them.
        device: where input goes.
        vocab_size: V.
        max_length: positions the model has, or None without a limit.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocab_size: int = config.vocab_size
        self.max_length = max_length(config)
        self._dtype = model.dtype  # transformers looks through the parameters for it
        self._layout = MaskLayout.of(config)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.reset()

    @property
    def num_slots(self) -> int:
        """Tree slots behind the committed tokens."""
        return len(self._slot_positions)

    def reset(self) -> None:
        """Forget everything and free the cache."""
        self.num_committed = 0
        self._slot_positions = np.zeros(0, np.int64)
        self._cache = SlotCache()

    @torch.inference_mode()
    def prefill(
        self, tokens: Ints, wants: Wants, past: Past | None = None, chunk_size: int | None = None
    ) -> Observation:
        """Begin anew with `tokens` int64 [T] committed, and collect what `wants` asks for.

        Args:
            tokens: int64 [T].
            wants: what to collect.
            past: a cache's content, which covers the first of `tokens`: these are not forwarded, and what the model
                said after them is unknown (top tokens of log probability -inf).
            chunk_size: tokens a forward, 256 if None.
        """
        self.reset()
        tops, hidden = [], []
        num_known = 0
        if past is not None:
            num_known = past.length - past.num_unseen
            if wants.hidden_layers and num_known:
                raise RequestError(
                    "cache", "a passed cache, beside a drafter that needs the target's hidden states of the prompt",
                    "Allowed with this pipeline: an empty cache.",
                )  # fmt: skip
            self._cache.adopt(past)
            self.num_committed = past.length
            if wants.num_top:
                tops.append(
                    (np.zeros((num_known, wants.num_top), np.int64), np.full((num_known, wants.num_top), -np.inf))
                )
        chunk_size = chunk_size or _CHUNK
        options = {"logits_to_keep": 1} if self._keeps_logits and not wants.num_top else {}
        for start in range(num_known, len(tokens), chunk_size):
            chunk = tokens[start : start + chunk_size]
            position = self.num_committed
            # Without tree slots the model's own causal masks are right, windows included.
            output = self._run(chunk, np.arange(position, position + len(chunk)), None, wants.hidden_layers, options)
            if wants.num_top:
                tops.append(top_tokens(output.logits[0], wants.num_top))
            hidden.append(_stacked(output, wants.hidden_layers))
            self.num_committed += len(chunk)
        if not wants.num_top:
            top_ids = top_log_probs = None
        elif tops:
            top_ids, top_log_probs = (np.concatenate(parts) for parts in zip(*tops, strict=True))
        else:
            top_ids, top_log_probs = np.zeros((0, wants.num_top), np.int64), np.zeros((0, wants.num_top))
        return Observation(
            np.asarray(tokens), top_ids, top_log_probs, torch.cat(hidden) if hidden and wants.hidden_layers else None
        )

    @torch.inference_mode()
    def forward(
        self, tokens: Ints, positions: Ints, visible: Bools, hidden_layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append n tree slots.

        Args:
            tokens: int64 [n].
            positions: int64 [n], absolute.
            visible: bool [n, num_slots + n], which tree slots, old then new, each row sees; itself among them.
            hidden_layers: indices into the model's `hidden_states`.

        Returns:
            Logits [n, V], and hidden states [n, layers, h] or None.
        """
        slot_positions = np.concatenate([self._slot_positions, positions])
        key_positions = np.concatenate([np.arange(self.num_committed), slot_positions])
        mask = self._layout.masks(visible, positions, key_positions, self._dtype, self.device)
        output = self._run(tokens, positions, mask, hidden_layers, {})
        self._slot_positions = slot_positions
        return output.logits[0], _stacked(output, hidden_layers)

    @torch.inference_mode()
    def commit(self, slots: Ints | Sequence[int]) -> None:
        """Make tree slots `slots` int [k] the committed continuation, in this order, and drop all others."""
        self._cache.keep(self.num_committed, slots)
        self.num_committed += len(slots)
        self._slot_positions = self._slot_positions[:0]

    def committed(self) -> list[KeysValues]:
        """Keys and values [1, heads, T, dim] of every layer for the committed tokens, as views."""
        return self._cache.states(self.num_committed)

    def _run(
        self, tokens: Ints, positions: Ints, mask: Any, hidden_layers: Sequence[int], options: dict[str, Any]
    ) -> Any:
        if hidden_layers:
            options = {**options, "output_hidden_states": list(hidden_layers)}
        input_ids, position_ids = torch.from_numpy(np.array([tokens, positions])).to(self.device)[:, None]
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            cache=self._cache,
            use_cache=True,
            **options,
        )


def max_length(config: Any) -> int | None:
    """Positions that every forward treats alike, or None without a limit."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") == "longrope":
            # Beyond it the longest position of a forward turns the others' frequencies too, so that a prompt in
            # chunks, or a tree's deepest node, would change what the rest computes.
            original: int = parameters["original_max_position_embeddings"]
            limit = original if limit is None else min(limit, original)
    return limit


def _stacked(output: Any, hidden_layers: Sequence[int]) -> torch.Tensor | None:
    """Hidden states [n, layers, h] of the layers asked for, or None."""
    if not hidden_layers:
        return None
    states = [output.hidden_states[layer][0] for layer in hidden_layers]
    return torch.stack([state.to(states[0].device) for state in states], dim=1)
