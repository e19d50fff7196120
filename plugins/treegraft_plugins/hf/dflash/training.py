"""Training a DFlash drafter: blocks at random anchors of a text, all of a group in one forward."""

import attrs
import torch
from transformers import PreTrainedModel, Qwen3Config

from treegraft.errors import RequestError
from treegraft_plugins.hf.dflash.model import (
    ARCHITECTURE,
    DFlashDraftModel,
    default_target_layer_ids,
    draft_config,
)
from treegraft_plugins.hf.training.course import Fit, Student
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
    """The drafter's size.

    Args:
        block_size: tokens in a block, the anchor included.
        num_layers: of the drafter.
        num_heads, num_key_value_heads, head_dim: of its attention.
        intermediate_size: of its feed-forward.
        target_layer_ids: the target's layers that feed it; None for the published choice.
        mask_token_id: what stands at the places to fill; None for the tokenizer's mask token, else its padding.
    """

    block_size: int = attrs.field(default=8, validator=whole(2))
    num_layers: int = attrs.field(default=2, validator=whole(1))
    num_heads: int = attrs.field(default=4, validator=whole(1))
    num_key_value_heads: int = attrs.field(default=2, validator=whole(1))
    head_dim: int = attrs.field(default=32, validator=whole(2))
    intermediate_size: int = attrs.field(default=384, validator=whole(1))
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None

    def config(self, target: PreTrainedModel, mask_token_id: int) -> Qwen3Config:
        """The configuration of a drafter of this shape for `target`."""
        of_target = target.config.get_text_config(decoder=True)
        ids = self.target_layer_ids or default_target_layer_ids(self.num_layers, of_target.num_hidden_layers)
        settings = {
            "architectures": [ARCHITECTURE],
            "vocab_size": of_target.vocab_size,
            "hidden_size": of_target.hidden_size,
            "max_position_embeddings": of_target.max_position_embeddings,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "block_size": self.block_size,
            "num_target_layers": of_target.num_hidden_layers,
            "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(ids)},
        }
        return draft_config(settings, "the drafter to train")


def fit_dflash(fit: Fit, shape: DFlashShape) -> None:
    """Train a drafter of this shape, or go on with one.

    Raises:
        ModelError: the target cannot be loaded.
        RequestError: no text, no mask token, a start of another shape, or a folder that holds a training with other
            settings.
    """
    target, tokenizer = fit.load_target()
    choices = (shape.mask_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id)
    mask_token_id = next((token for token in choices if token is not None), None)
    if mask_token_id is None:
        raise RequestError(
            "mask_token_id", "a tokenizer with neither a mask nor a padding token", "Allowed: any token of its own."
        )
    with torch.random.fork_rng():
        torch.manual_seed(fit.schedule.seed)
        network = fit.network(DFlashDraftModel, shape.config(target, mask_token_id), draft_config).to(target.device)
        if fit.start is None:
            _begin_flat(network, target)
    fit.run(DFlashStudent(network), target, tokenizer, attrs.asdict(shape))


@torch.no_grad()
def _begin_flat(network: DFlashDraftModel, target: PreTrainedModel) -> None:
    """Hidden states as those that the target's head is used to, channel by channel, but smaller: drafts begin flat."""
    ids = torch.randint(target.config.get_text_config(decoder=True).vocab_size, (1, 64), device=target.device)
    last = target(input_ids=ids, use_cache=False, output_hidden_states=[-1]).hidden_states[-1]
    network.norm.weight.copy_(_FIRST_SCALE * last[0].float().pow(2).mean(0).sqrt())
