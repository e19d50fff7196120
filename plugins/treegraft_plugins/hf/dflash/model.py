"""The DFlash drafter's network, in the layout of the published checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from treegraft.errors import ModelError
from treegraft_plugins.hf.cache import SlotCache

ARCHITECTURE = "DFlashDraftModel"

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [1, T, dim] each."""


def default_target_layer_ids(num_layers: int, num_target_layers: int) -> list[int]:
    """The target's layers that feed a drafter of `num_layers`, where its configuration names none.

    From the second to the last but two, evenly spaced; of a target too small for that from the first to the last.
    """
    number = min(num_layers, num_target_layers)
    if number == 1:
        return [num_target_layers // 2]
    first, last = (1, num_target_layers - 3) if num_target_layers - 3 >= number else (0, num_target_layers - 1)
    return [round(first + index * (last - first) / (number - 1)) for index in range(number)]


def draft_config(settings: Mapping[str, Any], where: str) -> Qwen3Config:
    """The configuration that a checkpoint's config.json holds; both spellings of the rotary settings are read.

    Raises:
        ModelError: it is none of a DFlash drafter, lacks something, holds what cannot be, or asks for layers that are
            not served.
    """
    allowed = f"Allowed: a checkpoint with architectures: [{ARCHITECTURE}]."
    if ARCHITECTURE not in (settings.get("architectures") or ()):
        found = f"architectures: {settings.get('architectures')}, no DFlash drafter"
        raise ModelError(where, found, allowed, "A causal LM drafts with {use: hf_causal_lm}.")
    own = settings.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise ModelError(where, f"dflash_config {own!r}", "Allowed: {mask_token_id: ..., target_layer_ids: [...]}.")
    needed = {key: settings.get(key) for key in ("block_size", "num_target_layers", "num_hidden_layers", "hidden_size")}
    needed["dflash_config.mask_token_id"] = own.get("mask_token_id")
    missing = [key for key, value in needed.items() if value is None]
    if missing:
        raise ModelError(where, f"config.json without {', '.join(missing)}", allowed)
    for key, value in needed.items():
        least = {"block_size": 2, "dflash_config.mask_token_id": 0}.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(where, f"{key} {value!r}", f"Allowed: an int >= {least}.")
    config = Qwen3Config.from_dict({**settings, "model_type": Qwen3Config.model_type})
    if set(config.layer_types) != {"full_attention"}:
        raise ModelError(where, f"layer types {sorted(set(config.layer_types))}", "Served: full attention.")
    ids = own.get("target_layer_ids")
    if ids is None:
        ids = default_target_layer_ids(config.num_hidden_layers, config.num_target_layers)
    known = range(config.num_target_layers)
    if not isinstance(ids, list) or not ids or not all(isinstance(layer, int) and layer in known for layer in ids):
        raise ModelError(where, f"target_layer_ids {ids!r}", f"Allowed: a list of layers from 0 to {known[-1]}.")
    config.dflash_config = {**own, "target_layer_ids": ids}
    return config


def _rotated(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = (part.unsqueeze(1) for part in rotation)
    return states * cos + rotate_half(states) * sin


class DFlashAttention(Qwen3Attention):
    """Attention from the block to [context ; block], without a causal order inside the block."""

    def forward(
        self,
        block: torch.Tensor,
        features: torch.Tensor,
        rotations: tuple[Rotation, Rotation],
        mask: torch.Tensor | None,
        cache: SlotCache | None,
    ) -> torch.Tensor:
        of_block, of_features = rotations
        queries = _rotated(self.q_norm(self._heads(self.q_proj(block))).transpose(1, 2), of_block)
        num_sharing = len(block) // len(features)
        context = (part.repeat_interleave(num_sharing, dim=0) for part in self._keys_values(features, of_features))
        own = self._keys_values(block, of_block)
        keys, values = (torch.cat(parts, dim=2) for parts in zip(context, own, strict=True))
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self.scaling, enable_gqa=self.num_key_value_groups > 1
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _keys_values(self, states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        keys = _rotated(self.k_norm(self._heads(self.k_proj(states))).transpose(1, 2), rotation)
        return keys, self._heads(self.v_proj(states)).transpose(1, 2)

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim))


class DFlashLayer(nn.Module):
    """One layer: the block attends to [context ; block], then a feed-forward; the features are not updated."""

    def __init__(self, config: Qwen3Config, index: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block: torch.Tensor, *context: Any) -> torch.Tensor:
        block = block + self.self_attn(self.input_layernorm(block), *context)
        return block + self.mlp(self.post_attention_layernorm(block))


class DFlashDraftModel(Qwen3PreTrainedModel):
    """A small stack of layers that fills a block of masked tokens at once; embedding and head are the target's.

    Args:
        config: with `block_size`, `num_target_layers` and `dflash_config: {mask_token_id, target_layer_ids}`.

    Source: DFlash (z-lab), the published checkpoints' layout.
    """

    base_model_prefix = ""
    _no_split_modules = ("DFlashLayer",)

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        self.layers = nn.ModuleList(DFlashLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(self.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()

    @property
    def target_layer_ids(self) -> Sequence[int]:
        """The target's layers whose outputs are the features."""
        ids: list[int] = self.config.dflash_config["target_layer_ids"]
        return ids

    @property
    def mask_token_id(self) -> int:
        """The token that stands at the places to fill."""
        token: int = self.config.dflash_config["mask_token_id"]
        return token

    @property
    def block_size(self) -> int:
        """Tokens in a block: the anchor and those to fill."""
        size: int = self.config.block_size
        return size

    def forward(
        self,
        block: torch.Tensor,
        block_positions: torch.Tensor,
        features: torch.Tensor,
        feature_positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: SlotCache | None = None,
    ) -> torch.Tensor:
        """Hidden states [B, Q, h] of the block, for the target's head: each row predicts the token at its own place.

        Args:
            block: [B, Q, h], the target's embeddings of the anchor and the mask tokens.
            block_positions: [B, Q], absolute.
            features: [C, S, layers, h], the target's hidden states of S context tokens; each of C contexts serves
                B / C blocks in a row.
            feature_positions: [C, S], absolute.
            mask: bool [B or 1, 1, Q, S + Q], which of [features ; block] each query sees; None for all of them.
            cache: holds the keys and values of earlier context; those of features and block are added behind.
        """
        context = self.hidden_norm(self.fc(features.flatten(2)))
        rotations = (self.rotary_emb(block, block_positions), self.rotary_emb(features, feature_positions))
        for layer in self.layers:
            block = layer(block, context, rotations, mask, cache)
        return self.norm(block)


def as_assistant(network: DFlashDraftModel) -> MuseGlimmerAssistantModel:
    """The same network, its weights shared, in the class that transformers' own `generate` drafts blocks with.

    `target.generate(..., assistant_model=as_assistant(network), speculation_type="dflash")` is its chain.

    Raises:
        ModelError: the network has what that class has not.
    """
    if network.config.attention_bias:
        raise ModelError("dflash", "attention_bias: true, for transformers' own assistant", "Allowed there: false.")
    config = network.config
    shared = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "layer_types",
        "block_size",
    )  # fmt: skip
    settings = {name: getattr(config, name) for name in shared}
    assistant = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **settings, mask_token_id=network.mask_token_id, target_layer_ids=list(network.target_layer_ids)
        )
    )
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = {names.get(name, name): weight for name, weight in network.state_dict().items()}
    assistant.load_state_dict(weights, assign=True)
    return assistant.to(network.device).eval()
