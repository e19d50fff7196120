"""Training a DFlash drafter for a target: random anchors over text, the target's own distributions as labels."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from torch.nn.functional import kl_div
from transformers import PreTrainedModel, Qwen3Config

from treegraft.tree import Ints
from treegraft_plugins.hf.dflash.model import (
    ARCHITECTURE,
    DFlashDraftModel,
    default_target_layer_ids,
    draft_config,
)
from treegraft_plugins.hf.loading import Loadable, load_causal_lm
from treegraft_plugins.hf.training.corpus import Continuations, Report, TextPlan, prepared
from treegraft_plugins.hf.training.loop import Schedule, Trainer
from treegraft_plugins.hf.training.teacher import Lesson, accepted_along, lesson
from treegraft_plugins.options import whole


def blocks(model: DFlashDraftModel, target: PreTrainedModel, lesson: Lesson, anchors: torch.Tensor) -> torch.Tensor:
    """Hidden states [B, A, block_size, h] of blocks anchored at tokens `anchors` [B, A], all in one forward.

    A block sees the features strictly before its anchor and itself, as when it drafts.
    """
    size, (num_rows, num_anchors) = model.block_size, anchors.shape
    tokens = torch.full((num_rows, num_anchors, size), model.mask_token_id, device=anchors.device)
    tokens[:, :, 0] = lesson.tokens.gather(1, anchors)
    with torch.no_grad():
        block = target.get_input_embeddings()(tokens.flatten(1)).float()
    positions = (anchors[:, :, None] + torch.arange(size, device=anchors.device)).flatten(1)
    length = lesson.tokens.shape[1]
    before = torch.arange(length, device=anchors.device)[None, None] < anchors[:, :, None]
    own = torch.eye(num_anchors, dtype=torch.bool, device=anchors.device)[None].expand(num_rows, -1, -1)
    mask = torch.cat([before, own.repeat_interleave(size, dim=2)], dim=2).repeat_interleave(size, dim=1)
    feature_positions = torch.arange(length, device=anchors.device)[None].expand(num_rows, -1)
    hidden = model(block, positions, lesson.hidden, feature_positions, mask[:, None])
    return hidden.unflatten(1, (num_anchors, size))


@attrs.frozen(eq=False)
class Course:
    """What a drafter is trained on, and how.

    Attributes:
        model: the drafter.
        target: what it drafts for, frozen.
        text: int [N, T], windows of the corpus.
        num_windows: B, windows a step.
        num_anchors: A, blocks a window, in groups that do not see each other.
        group: anchors a group: a group's attention is quadratic in it.
        gamma: row k weighs exp(-(k - 1) / gamma).
        temperature: of the target's distributions.
    """

    model: DFlashDraftModel
    target: PreTrainedModel
    text: Ints
    num_windows: int = 4
    num_anchors: int = 128
    group: int = 16
    gamma: float = 4.0
    temperature: float = 1.0

    @property
    def hidden_layers(self) -> list[int]:
        """Indices into the target's `hidden_states`."""
        return [layer + 1 for layer in self.model.target_layer_ids]

    def loss(self, rng: np.random.Generator) -> torch.Tensor:
        """The weighted divergence from the target's distributions (nats), over random windows and anchors."""
        size, length = self.model.block_size, self.text.shape[1]
        rows = self.text[rng.integers(0, len(self.text), self.num_windows)]
        taught = lesson(self.target, rows, self.hidden_layers, self.temperature)
        num_groups = self.num_anchors // self.group
        anchors = torch.from_numpy(rng.integers(1, length - size + 1, (self.num_windows * num_groups, self.group)))
        anchors = anchors.to(taught.tokens.device)
        hidden = blocks(self.model, self.target, taught.repeated(num_groups), anchors)[:, :, 1:]
        drafted = self.target.get_output_embeddings()(hidden.flatten(0, 2)).log_softmax(-1)
        # Row k fills place anchor + k, which the target's distribution after token anchor + k - 1 decides.
        ahead = torch.arange(size - 1, device=anchors.device)
        window = torch.arange(len(anchors), device=anchors.device) // num_groups
        wanted = taught.log_probs[window[:, None, None], anchors[:, :, None] + ahead].flatten(0, 2)
        divergence = kl_div(drafted, wanted, log_target=True, reduction="none").sum(-1)
        weight = torch.exp(-ahead / self.gamma)
        return (divergence.unflatten(0, (-1, size - 1)) * weight).sum(-1).mean() / weight.sum()


@torch.no_grad()
def chain_accepted(model: DFlashDraftModel, target: PreTrainedModel, text: Continuations, group: int = 16) -> float:
    """Mean accepted tokens a round of decoding what the target wrote with chains of the drafter."""
    size, length = model.block_size, text.tokens.shape[1]
    layers = [layer + 1 for layer in model.target_layer_ids]
    num_accepted = num_rounds = 0
    for row, first in zip(text.tokens, text.first, strict=True):
        taught = lesson(target, row[None], layers, 1.0)
        anchors = torch.arange(first, length - size + 1, device=taught.tokens.device)
        padded = torch.cat([anchors, anchors[-1:].repeat(-len(anchors) % group)]).view(-1, group)
        hidden = blocks(model, target, taught.repeated(len(padded)), padded)[:, :, 1:].flatten(0, 1)[: len(anchors)]
        drafts = np.zeros((length, size - 1), np.int64)
        drafts[first : length - size + 1] = target.get_output_embeddings()(hidden).argmax(-1).cpu().numpy()
        accepted, rounds = accepted_along(drafts, row, first)
        num_accepted, num_rounds = num_accepted + accepted, num_rounds + rounds
    return num_accepted / num_rounds


@attrs.frozen(kw_only=True)
class Shape:
    """The drafter's size.

    Args:
        block_size: tokens in a block, the anchor included.
        num_layers: of the drafter.
        num_heads, num_key_value_heads, head_dim: of its attention.
        intermediate_size: of its feed-forward.
        target_layer_ids: the target's layers that feed it; None for the published choice.
    """

    block_size: int = attrs.field(default=8, validator=whole(2))
    num_layers: int = attrs.field(default=2, validator=whole(1))
    num_heads: int = attrs.field(default=4, validator=whole(1))
    num_key_value_heads: int = attrs.field(default=2, validator=whole(1))
    head_dim: int = attrs.field(default=32, validator=whole(2))
    intermediate_size: int = attrs.field(default=384, validator=whole(1))
    target_layer_ids: tuple[int, ...] | None = None

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


def fit_dflash(
    target: Loadable,
    out: Path,
    *,
    texts: Sequence[Path],
    held_out: Sequence[Path],
    plan: TextPlan,
    shape: Shape,
    schedule: Schedule,
    report: Report,
    num_windows: int = 4,
    num_anchors: int = 128,
    gamma: float = 4.0,
    temperature: float = 1.0,
) -> None:
    """Train a drafter for `target` and write it to the folder `out`; a training that was interrupted goes on.

    Args:
        target: what to draft for.
        out: the folder of the drafter, its text, its checkpoint and its held-out curve.
        texts, held_out: files and folders, see `read_texts`.
        plan, shape, schedule: the text, the drafter's size, how long to train.
        report: where lines of progress go.
        num_windows, num_anchors, gamma, temperature: see `Course`.

    Raises:
        ModelError: the target cannot be loaded.
        RequestError: no text, or `out` holds a training with other settings.
    """
    model, tokenizer = load_causal_lm(target)
    model = model.requires_grad_(False)
    out.mkdir(parents=True, exist_ok=True)
    text = prepared(
        plan, model, tokenizer, texts=texts, held_out=held_out, file=out / "text.npz", report=report
    )  # fmt: skip
    mask_token_id = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.pad_token_id
    with torch.random.fork_rng():
        torch.manual_seed(schedule.seed)
        drafter = DFlashDraftModel(shape.config(model, mask_token_id)).to(model.device)
    # Hidden states of the size that the target's head is used to.
    drafter.norm.weight.data.copy_(model.base_model.norm.weight.float())
    course = Course(
        drafter, model, text.train, num_windows=num_windows, num_anchors=num_anchors, gamma=gamma,
        temperature=temperature,
    )  # fmt: skip
    settings = {"text": attrs.asdict(plan), "shape": attrs.asdict(shape), "num_windows": num_windows,
                "num_anchors": num_anchors, "gamma": gamma, "temperature": temperature}  # fmt: skip

    def measure() -> Mapping[str, float]:
        return {
            f"accepted at {each:g}": chain_accepted(drafter, model, text.held_out.at(each))
            for each in sorted(set(plan.temperatures))
        }

    Trainer(drafter, course.loss, measure, schedule, settings, out, report).run()
