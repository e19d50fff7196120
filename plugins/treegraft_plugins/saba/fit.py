"""Fitting the gain model to labels: the mean of accepted tokens by state and budget."""

from collections.abc import Sequence

import numpy as np
import torch

from treegraft.tree import Ints
from treegraft_plugins.saba.labels import Labels
from treegraft_plugins.saba.model import CLIP, LOG_LIMITS, GainModel
from treegraft_plugins.saba.signals import SIGNALS

MOST_MISSING = 0.1
"""Share of the rounds in which a signal may be missing; one that is missing more often is not read."""


def readable(labels: Labels) -> tuple[str, ...]:
    """The signals that a model of these rounds can read."""
    missing = np.isnan(labels.signals).mean(0)
    return tuple(name for name, share in zip(SIGNALS, missing, strict=True) if share <= MOST_MISSING)


def columns(labels: Labels, names: Sequence[str]) -> np.ndarray:
    """float64 [N, S]: the signals of `names`."""
    return labels.signals[:, [SIGNALS.index(name) for name in names]].astype(np.float64)


def fit_gain(
    labels: Labels,
    budgets: Ints,
    *,
    hidden: int = 32,
    num_steps: int = 1000,
    batch: int = 512,
    learning_rate: float = 5e-3,
    weight_decay: float = 1.0,
    seed: int = 0,
) -> GainModel:
    """Fit to rounds that have all signals which most rounds have.

    Accepted tokens are counts, so the loss is Poisson's deviance; as the squared error's, its minimum is the mean.

    Args:
        labels: N rounds.
        budgets: int [G], ascending; each round is fitted at all of them above 0.
        hidden: width of the network's layer.
        num_steps: of AdamW, on a cosine schedule.
        batch: rounds a step.
        learning_rate, weight_decay: of AdamW, the latter of the network's matrices.
        seed: of initial weights and batches.
    """
    names = readable(labels)
    labels = labels.take(~np.isnan(columns(labels, names)).any(-1))
    x = columns(labels, names)
    nodes = np.minimum(budgets[budgets > 0], labels.num_nodes[:, None])
    mean, std = x.mean(0), np.maximum(x.std(0), 0.05)
    inputs = torch.from_numpy(np.clip((x - mean) / std, -CLIP, CLIP)).float()
    expected, wanted = (
        torch.from_numpy(labels.expecting(nodes)).float(),
        torch.from_numpy(labels.accepted(nodes)).float(),
    )
    generator = torch.Generator().manual_seed(seed)
    layers = {
        "w1": torch.randn(len(names), hidden, generator=generator) * (2.0 / max(len(names), 1)) ** 0.5,
        "b1": torch.zeros(hidden),
        "w2": torch.randn(hidden, len(LOG_LIMITS), generator=generator) * 0.1 / hidden**0.5,
        "b2": torch.tensor([2.0, 2.0, 0.0]),  # for small E, E itself
    }
    decayed = [layer.requires_grad_() for name, layer in layers.items() if name in ("w1", "w2")]
    others = [layer.requires_grad_() for name, layer in layers.items() if name not in ("w1", "w2")]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, num_steps)
    for _ in range(num_steps):
        rows = torch.randint(len(inputs), (min(batch, len(inputs)),), generator=generator)
        predicted = _gains(layers, inputs[rows], expected[rows]).clamp(min=1e-4)
        loss = (predicted - wanted[rows] * predicted.log()).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
    arrays = {name: layer.detach().double().numpy() for name, layer in layers.items()}
    return GainModel(names, {"mean": mean, "std": std, **arrays})


def _gains(layers: dict[str, torch.Tensor], x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[B, G]: the curve of `GainModel` at `expected` [B, G], of normalised signals [B, S]."""
    out = torch.relu(x @ layers["w1"] + layers["b1"]) @ layers["w2"] + layers["b2"]
    gain, kappa, alpha = (out[:, place].clamp(low, high).exp()[:, None] for place, (low, high) in enumerate(LOG_LIMITS))
    return gain * -torch.expm1(-((expected / kappa) ** alpha))
