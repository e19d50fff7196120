"""Training a Medusa-type drafter: its heads at random anchors of a text."""

import attrs
import torch
from transformers import PreTrainedModel

from treegraft_plugins.hf.heads.model import ARCHITECTURE, HeadsDraftModel, heads_config
from treegraft_plugins.hf.training.course import Fit, Student
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
        num_heads: L, places that are covered.
    """

    num_heads: int = attrs.field(default=4, validator=whole(1))


def fit_heads(fit: Fit, shape: HeadsShape) -> None:
    """Train heads of this shape, or go on with some.

    Raises:
        ModelError: the target cannot be loaded.
        RequestError: no text, a start of another shape, or a folder that holds a training with other settings.
    """
    target, tokenizer = fit.load_target()
    of_target = target.config.get_text_config(decoder=True)
    settings = {
        "architectures": [ARCHITECTURE],
        "num_heads": shape.num_heads,
        "hidden_size": of_target.hidden_size,
        "num_target_layers": of_target.num_hidden_layers,
        "vocab_size": of_target.vocab_size,
    }
    network = fit.network(HeadsDraftModel, heads_config(settings, "the heads to train"), heads_config)
    network = network.to(target.device)
    fit.run(HeadsStudent(network), target, tokenizer, attrs.asdict(shape))
