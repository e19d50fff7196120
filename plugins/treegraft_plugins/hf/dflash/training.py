"""Training a DFlash drafter: blocks at random anchors of a text, all of a group in one forward."""

from typing import Any

import attrs
import torch
from attrs.validators import optional
from transformers import PreTrainedModel, Qwen3Config

from treegraft.errors import RequestError
from treegraft_plugins.hf.dflash.model import (
    ARCHITECTURE,
    DFlashDraftModel,
    default_target_layer_ids,
    draft_config,
)
from treegraft_plugins.hf.training.course import Fit, Student, ties
from treegraft_plugins.hf.training.teacher import Lesson
from treegraft_plugins.options import whole

_FIRST_SCALE = 0.15


class DFlashStudent(Student):
    """Blocks that see the target's hidden states strictly before their anchor, and themselves.

    Args:
        network: the drafter.
    """

    def __init__(self, network: DFlashDraftModel):
        self.network: DFlashDraftModel = network
        self.hidden_layers = [layer + 1 for layer in network.target_layer_ids]
        self.num_places = network.block_size - 1

    def places(self, target: PreTrainedModel, taught: Lesson, anchors: torch.Tensor) -> torch.Tensor:
        size, device, (num_rows, num_anchors) = self.network.block_size, anchors.device, anchors.shape
        num_texts, length = taught.tokens.shape
        tokens = torch.full((num_rows, num_anchors, size), self.network.mask_token_id, device=device)
        tokens[:, :, 0] = taught.tokens.repeat_interleave(num_rows // num_texts, dim=0).gather(1, anchors)
        with torch.no_grad():
            block = target.get_input_embeddings()(tokens.flatten(1)).float()
        positions = (anchors[:, :, None] + torch.arange(size, device=device)).flatten(1)
        context = torch.arange(length, device=device).expand(num_texts, -1)
        before = context[0] < anchors[:, :, None]
        own = torch.eye(num_anchors, dtype=torch.bool, device=device).repeat_interleave(size, dim=1)
        mask = torch.cat([before, own.expand(num_rows, -1, -1)], dim=2).repeat_interleave(size, dim=1)
        hidden = self.network(block, positions, taught.hidden, context, mask[:, None])
        return hidden.unflatten(1, (num_anchors, size))[:, :, 1:]


@attrs.frozen(kw_only=True)
class DFlashShape:
    """The drafter's size. What is None is as the start has it; of a drafter that begins anew, as said here.

    Args:
        block_size: tokens in a block, the anchor included; 8.
        num_layers: of the drafter; 2.
        num_heads, num_key_value_heads, head_dim: of its attention; 4, 2, 32.
        intermediate_size: of its feed-forward; 384.
        target_layer_ids: the target's layers that feed it, different ones; the published choice.
        mask_token_id: what stands at the places to fill; the tokenizer's mask token, else its padding.
    """

    block_size: int | None = attrs.field(default=None, validator=optional(whole(2)))
    num_layers: int | None = attrs.field(default=None, validator=optional(whole(1)))
    num_heads: int | None = attrs.field(default=None, validator=optional(whole(1)))
    num_key_value_heads: int | None = attrs.field(default=None, validator=optional(whole(1)))
    head_dim: int | None = attrs.field(default=None, validator=optional(whole(2)))
    intermediate_size: int | None = attrs.field(default=None, validator=optional(whole(1)))
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = attrs.field(default=None, validator=optional(whole(0)))

    @property
    def asked(self) -> dict[str, Any]:
        """What is said, by the names of config.json; what stands in its `dflash_config` is beside the rest."""
        said = attrs.asdict(self, filter=lambda _, value: value is not None)
        return {_NAMES.get(name, name): value for name, value in said.items()}

    def config(self, target: PreTrainedModel, tokenizer: Any) -> Qwen3Config:
        """The configuration of a drafter of this shape for `target`, beginning anew.

        Raises:
            RequestError: what no drafter of this target can have.
        """
        settings = {**_FIRST, **ties(target), **self.asked}
        settings["max_position_embeddings"] = target.config.get_text_config(decoder=True).max_position_embeddings
        num_target_layers, num_layers = settings["num_target_layers"], settings["num_hidden_layers"]
        named = self.target_layer_ids
        layers = default_target_layer_ids(num_layers, num_target_layers) if named is None else named
        if not layers or len(set(layers)) < len(layers) or not all(0 <= layer < num_target_layers for layer in layers):
            allowed = f"Allowed: different ones of 0 to {num_target_layers - 1}."
            raise RequestError("target_layer", f"{list(layers)}", allowed)
        mask_token_id = _mask_token_id(tokenizer) if self.mask_token_id is None else self.mask_token_id
        if mask_token_id is None or not 0 <= mask_token_id < settings["vocab_size"]:
            raise RequestError(
                "mask_token", "none, of a tokenizer without mask and padding token" if mask_token_id is None
                else f"{mask_token_id}", f"Allowed: 0 to {settings['vocab_size'] - 1}, best one that no text holds.",
            )  # fmt: skip
        if settings["num_attention_heads"] % settings["num_key_value_heads"]:
            found = f"{settings['num_key_value_heads']} for {settings['num_attention_heads']} heads"
            raise RequestError("key_value_heads", found, "Allowed: a divisor of the number of heads.")
        if settings["head_dim"] % 2:
            raise RequestError("head_dim", str(settings["head_dim"]), "Allowed: an even number, for its rotation.")
        settings["dflash_config"] = {"mask_token_id": mask_token_id, "target_layer_ids": list(layers)}
        return draft_config(settings, "the drafter to train")


_NAMES = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
_FIRST = {
    "architectures": [ARCHITECTURE], "block_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def _mask_token_id(tokenizer: Any) -> int | None:
    choices = (tokenizer.mask_token_id, tokenizer.pad_token_id)
    return next((token for token in choices if token is not None), None)


def fit_dflash(fit: Fit, shape: DFlashShape) -> None:
    """Train a drafter of this shape, or go on with one.

    Raises:
        ModelError: the target or the start cannot be loaded.
        RequestError: no text, no mask token, a shape that no drafter of this target can have, a start of another
            shape, or a folder that holds something else than this training.
    """
    target, tokenizer = fit.load_target()
    with torch.random.fork_rng():
        torch.manual_seed(fit.schedule.seed)
        network = fit.network(
            DFlashDraftModel, draft_config, lambda: shape.config(target, tokenizer), {**ties(target), **shape.asked}
        ).to(target.device)
        if fit.start is None:
            _begin_flat(network, target)
    fit.run(DFlashStudent(network), target, tokenizer, attrs.asdict(shape))


@torch.no_grad()
def _begin_flat(network: DFlashDraftModel, target: PreTrainedModel) -> None:
    """Hidden states as those that the target's head is used to, channel by channel, but smaller: drafts begin flat."""
    ids = torch.randint(target.config.get_text_config(decoder=True).vocab_size, (1, 64), device=target.device)
    last = target(input_ids=ids, use_cache=False, output_hidden_states=[-1]).hidden_states[-1]
    network.norm.weight.copy_(_FIRST_SCALE * last[0].float().pow(2).mean(0).sqrt())
