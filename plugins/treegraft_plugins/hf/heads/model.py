"""One small head for each of the next places, on the target's last hidden state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig, PreTrainedModel

from treegraft.errors import ModelError

ARCHITECTURE = "HeadsDraftModel"


class HeadsConfig(PreTrainedConfig):
    """The configuration of `HeadsDraftModel`.

    Args:
        num_heads: L, places that are covered.
        hidden_size, num_target_layers, vocab_size: of the target.
    """

    model_type = "treegraft_heads"

    num_heads: int = 4
    hidden_size: int = 0
    num_target_layers: int = 0
    vocab_size: int = 0


def heads_config(settings: Mapping[str, Any], where: str) -> HeadsConfig:
    """The configuration that a checkpoint's config.json holds.

    Raises:
        ModelError: it is none of such a drafter, or lacks something.
    """
    needed = ("num_heads", "hidden_size", "num_target_layers", "vocab_size")
    missing = [key for key in needed if not settings.get(key)]
    if ARCHITECTURE not in (settings.get("architectures") or ()) or missing:
        found = f"architectures: {settings.get('architectures')}, and without {', '.join(missing) or 'nothing'}"
        raise ModelError(
            where, found, f"Allowed: a checkpoint with architectures: [{ARCHITECTURE}].",
            "A causal LM drafts with {use: hf_causal_lm}.",
        )  # fmt: skip
    return HeadsConfig.from_dict(dict(settings))


class HeadsDraftModel(PreTrainedModel):
    """Head k turns the last hidden state and the root's embedding into the hidden state of place k after the root.

    Each is a residual block; the target's own head reads what it says. At first all say what the target itself does.

    Source: Medusa (Cai et al. 2024), section 2.1.1; that a head reads the root's embedding too is Hydra's.
    """

    config_class = HeadsConfig
    base_model_prefix = ""

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        width = config.hidden_size
        self.heads = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(config.num_heads))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)

    def forward(self, hidden: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., L, h] of the places after the root.

        Args:
            hidden: [..., h], the target's last hidden state of the token before the root.
            root: [..., h], the root's embedding.
        """
        joined = torch.cat([hidden, root], dim=-1)
        return torch.stack([hidden + silu(head(joined)) for head in self.heads], dim=-2)
