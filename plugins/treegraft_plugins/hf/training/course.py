"""What a drafter that reads the target's hidden states learns: the target's own distributions at the next places."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel

from treegraft.errors import ModelError, RequestError
from treegraft.interfaces import ModelSpec
from treegraft_plugins.hf.engine import max_length
from treegraft_plugins.hf.fingerprint import asked_otherwise
from treegraft_plugins.hf.loading import Loadable, load_causal_lm, load_network
from treegraft_plugins.hf.probe import head_is_all
from treegraft_plugins.hf.training.corpus import Continuations, Report, TextPlan, prepared
from treegraft_plugins.hf.training.loop import STATE, Schedule, Trainer
from treegraft_plugins.hf.training.teacher import Lesson, Lessons, accepted_along, lesson
from treegraft_plugins.options import number, whole

Network = TypeVar("Network", bound=PreTrainedModel)


class Student(ABC):
    """A drafter's network as it is trained.

    Attributes:
        network: saved with its own `save_pretrained`.
        hidden_layers: indices into the target's `hidden_states` that it reads.
        num_places: L, places that one pass covers.
    """

    network: PreTrainedModel
    hidden_layers: Sequence[int]
    num_places: int

    @abstractmethod
    def places(self, target: PreTrainedModel, taught: Lesson, anchors: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, A, L, h] for the places after tokens `anchors` [B, A]; nothing behind an anchor is read.

        Each of the N texts of `taught` serves B / N rows of anchors in a row.
        """


def ties(target: PreTrainedModel) -> dict[str, int]:
    """What of a drafter's configuration is its target's."""
    config = target.config.get_text_config(decoder=True)
    return {
        "hidden_size": config.hidden_size, "num_target_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }  # fmt: skip


@attrs.frozen(kw_only=True)
class Course:
    """How a student is taught.

    Args:
        num_windows: windows of text a step.
        num_anchors: anchors a window, at different random places as far as it has so many.
        group: anchors that are computed together; a group's attention may be quadratic in it.
        gamma: place k weighs exp(-(k - 1) / gamma).
        temperature: of the target's distributions.
    """

    num_windows: int = attrs.field(default=4, validator=whole(1))
    num_anchors: int = attrs.field(default=128, validator=whole(1))
    group: int = attrs.field(default=8, validator=whole(1))
    gamma: float = attrs.field(default=4.0, validator=number(0.1))
    temperature: float = attrs.field(default=1.0, validator=number(0.01))

    def __attrs_post_init__(self) -> None:
        if self.num_anchors % self.group:
            raise ValueError(f"num_anchors: got {self.num_anchors}; allowed: a multiple of {self.group}.")

    def loss(self, student: Student, lessons: Lessons, rng: np.random.Generator) -> torch.Tensor:
        """Weighted cross-entropy to the target's distributions (nats), at random anchors of random windows of text."""
        target, num_places = lessons.model, student.num_places
        taught = lessons[rng.choice(len(lessons), self.num_windows, replace=self.num_windows > len(lessons))]
        num_groups = self.num_anchors // self.group
        last = taught.tokens.shape[1] - num_places
        places = [
            rng.choice(np.arange(1, last), self.num_anchors, replace=self.num_anchors >= last)
            for _ in range(self.num_windows)
        ]
        anchors = torch.from_numpy(np.reshape(places, (-1, self.group))).to(taught.tokens.device)
        hidden = student.places(target, taught, anchors)
        drafted = _read_by_head(target, hidden.flatten(0, 2))
        # What stands at place anchor + k, the target's distribution after token anchor + k - 1 decides.
        ahead = torch.arange(num_places, device=anchors.device)
        window = torch.arange(len(anchors), device=anchors.device) // num_groups
        wanted = taught.probs[window[:, None, None], anchors[:, :, None] + ahead].flatten(0, 2)
        losses = cross_entropy(drafted, wanted, reduction="none").unflatten(0, (-1, num_places))
        weight = torch.exp(-ahead / self.gamma)
        return (losses * weight).sum(-1).mean() / weight.sum()


def _read_by_head(target: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits float32 [..., V] of hidden states [..., h], whatever the target's own precision is."""
    head = target.get_output_embeddings()
    logits: torch.Tensor = head(hidden.to(head.weight.dtype)).float()
    return logits


@torch.no_grad()
def chain_accepted(student: Student, target: PreTrainedModel, text: Continuations, group: int = 16) -> float:
    """Mean accepted tokens a round of decoding, with the student's chains, what the target wrote."""
    num_places, length = student.num_places, text.tokens.shape[1]
    num_accepted = num_rounds = 0
    for row, first in zip(text.tokens, text.first.tolist(), strict=True):
        taught = lesson(target, row[None], student.hidden_layers, 1.0)
        anchors = torch.arange(first, length - num_places, device=taught.tokens.device)
        padded = torch.cat([anchors, anchors[-1:].repeat(-len(anchors) % group)]).view(-1, group)
        hidden = student.places(target, taught, padded).flatten(0, 1)[: len(anchors)]
        drafts = np.zeros((length, num_places), np.int64)
        drafts[first : length - num_places] = _read_by_head(target, hidden).argmax(-1).cpu().numpy()
        accepted, rounds = accepted_along(drafts, row, first)
        num_accepted, num_rounds = num_accepted + accepted, num_rounds + rounds
    return num_accepted / num_rounds


@attrs.frozen(kw_only=True)
class Fit:
    """Everything a training is given beside the drafter itself.

    Args:
        target: what to draft for.
        texts, held_out: files and folders, see `read_texts`.
        out: the folder of the drafter, its text and the target's hidden states of it, its checkpoint and its curve.
        plan, course, schedule: which text, how it is taught, how long.
        report: where lines of progress go.
        start: the drafter whose weights are the first ones; None for random ones.
    """

    target: Loadable
    texts: Sequence[Path]
    held_out: Sequence[Path]
    out: Path
    plan: TextPlan
    course: Course
    schedule: Schedule
    report: Report
    start: ModelSpec | None = None

    def load_target(self) -> tuple[PreTrainedModel, Any]:
        """The target, its weights frozen, and its tokenizer.

        Raises:
            ModelError: it cannot be loaded, or does not lend its head.
            RequestError: it has no tokenizer.
        """
        model, tokenizer = load_causal_lm(self.target)
        if tokenizer is None:
            raise RequestError("target", "a model without a tokenizer", "Allowed: a folder or hub id that holds both.")
        if not head_is_all(model):
            raise ModelError(
                "target", f"a {type(model).__name__}, whose forward scales or caps the logits behind its head",
                "Allowed: targets that lend their head.",
            )  # fmt: skip
        return model.requires_grad_(False), tokenizer

    def network(
        self,
        kind: type[Network],
        read: Callable[[dict[str, Any], str], PreTrainedConfig],
        fresh: Callable[[], PreTrainedConfig],
        asked: Mapping[str, Any],
    ) -> Network:
        """The network to train, in float32: with random weights, or the one that `start` is.

        Args:
            kind: its class.
            read: the configuration of a checkpoint's config.json, see `load_network`.
            fresh: the configuration of one that begins with random weights.
            asked: settings that a start has to have: the target's, and those of its own that were asked for.

        Raises:
            ModelError: `start` cannot be loaded.
            RequestError: it has another shape, or was made for another target.
        """
        if self.start is None:
            return kind(fresh())
        network = load_network(self.start, kind, read)
        found = network.config.to_dict()
        unlike = asked_otherwise({**found, **found.get("dflash_config", {})}, asked)
        if unlike:
            raise RequestError(
                "start", f"{self.start.path!r} with {'; '.join(unlike.values())}",
                "Allowed: a drafter for this target, of the shape that is asked for.",
            )  # fmt: skip
        return network.float()

    def run(self, student: Student, target: PreTrainedModel, tokenizer: Any, shape: Mapping[str, Any]) -> None:
        """Train, or go on where an interrupted training stopped, and write the drafter to `out`.

        Raises:
            RequestError: a length that does not suit target and drafter, no text, or an `out` that holds a training
                with other settings, or something else.
        """
        self._require_length(student, target)
        text_file = self.out / "text.npz"
        if (self.out / "config.json").exists() and not (text_file.exists() or (self.out / STATE).exists()):
            raise RequestError(
                str(self.out), "a model that no training here wrote", "Allowed: a new folder, or one to go on with."
            )
        self.out.mkdir(parents=True, exist_ok=True)
        groups = {"text": attrs.asdict(self.plan), "course": attrs.asdict(self.course), "shape": shape}
        settings = {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
        settings["start"] = None if self.start is None else self.start.path
        trainer = Trainer(student.network, self.schedule, settings, self.out, self.report)
        trainer.resume()
        text = prepared(
            self.plan, target, tokenizer, texts=self.texts, held_out=self.held_out, file=text_file, report=self.report
        )
        lessons = Lessons.of(
            target, text.train, student.hidden_layers, self.course.temperature, self.out, self.report
        )  # fmt: skip

        def measure() -> Mapping[str, float]:
            return {
                f"accepted at {temperature:g}": chain_accepted(student, target, text.held_out.at(temperature))
                for temperature in sorted(set(self.plan.temperatures))
            }

        trainer.run(lambda rng: self.course.loss(student, lessons, rng), measure)

    def _require_length(self, student: Student, target: PreTrainedModel) -> None:
        """Refuse windows that leave no place for anchors behind a beginning of half a window, or that are too long."""
        least = 2 * student.num_places + 1
        most = max_length(target.config.get_text_config(decoder=True))
        if self.plan.length < least or (most is not None and self.plan.length > most):
            raise RequestError(
                "length", f"windows of {self.plan.length} tokens",
                f"Allowed: at least {least}, for {student.num_places} places"
                + ("." if most is None else f"; at most {most}, as the target reads."),
            )  # fmt: skip
