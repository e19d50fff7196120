"""Training a Medusa-type drafter: its heads at random anchors of a text."""

import attrs
import torch
from attrs.validators import optional
from transformers import PreTrainedModel

from treegraft_plugins.hf.heads.model import ARCHITECTURE, HeadsDraftModel, heads_config
from treegraft_plugins.hf.training.course import Fit, Student, ties
from treegraft_plugins.hf.training.teacher import Lesson
from treegraft_plugins.options import whole


class HeadsStudent(Student):
    """Heads that read the hidden state before their anchor, and the anchor's embedding.

    Args:
        network: the drafter.
    """

    def __init__(self, network: HeadsDraftModel):
        self.network: HeadsDraftModel = network
        self.hidden_layers = [network.config.num_target_layers]
        self.num_places = network.config.num_heads

    def places(self, target: PreTrainedModel, taught: Lesson, anchors: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(anchors), device=anchors.device)[:, None] * len(taught.tokens) // len(anchors)
        with torch.no_grad():
            root = target.get_input_embeddings()(taught.tokens[rows, anchors]).float()
        places: torch.Tensor = self.network(taught.hidden[rows, anchors - 1, 0], root)
        return places


@attrs.frozen(kw_only=True)
class HeadsShape:
    """The drafter's size.

    Args:
        num_heads: L, places that are covered; None for as many as the start has, 4 of a drafter that begins anew.
    """

    num_heads: int | None = attrs.field(default=None, validator=optional(whole(1)))


def fit_heads(fit: Fit, shape: HeadsShape) -> None:
    """Train heads of this shape, or go on with some.

    Raises:
        ModelError: the target or the start cannot be loaded.
        RequestError: no text, a start of another shape, or a folder that holds something else than this training.
    """
    target, tokenizer = fit.load_target()
    asked = attrs.asdict(shape, filter=lambda _, value: value is not None)
    first = {"architectures": [ARCHITECTURE], "num_heads": 4, **ties(target), **asked}
    network = fit.network(
        HeadsDraftModel, heads_config, lambda: heads_config(first, "the heads to train"), {**ties(target), **asked}
    )
    fit.run(HeadsStudent(network.to(target.device)), target, tokenizer, attrs.asdict(shape))
