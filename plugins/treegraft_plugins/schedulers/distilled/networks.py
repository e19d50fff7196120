"""Small networks of one shape, trained side by side: folds, heads and candidate sets of signals in one batch."""

from collections.abc import Callable, Mapping

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from treegraft.tree import Floats

HIDDEN = 64
CLIP = 4.0  # standard deviations
# As arrays, since converting a number takes longer than using it; without a dimension, since broadcasting one does too.
_LOWEST, _HIGHEST = np.array(-CLIP, np.float32), np.array(CLIP, np.float32)


@attrs.frozen(eq=False)
class Normaliser:
    """Standardises inputs; a floor under the deviations and a clip keep a constant column, or a strange machine, sane.

    Attributes:
        mean, std: float32 [I].
    """

    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    @classmethod
    def of(cls, x: Floats, floor: float = 0.05) -> "Normaliser":
        """From rows [N, I]."""
        return cls(x.mean(0).astype(np.float32), np.maximum(x.std(0), floor).astype(np.float32))

    def __call__(self, x: Floats) -> NDArray[np.float32]:
        """Rows [..., I], standardised and clipped."""
        standard = (x - self.mean) / self.std
        return np.minimum(np.maximum(standard, _LOWEST), _HIGHEST).astype(np.float32, copy=False)  # np.clip is slower


@attrs.frozen(eq=False)
class Networks:
    """M multilayer perceptrons I -> hidden -> hidden -> 1 with ReLU.

    Attributes:
        layers: by name `w1` [M, I, H], `b1` [M, 1, H], `w2` [M, H, H], `b2` [M, 1, H], `w3` [M, H, 1], `b3` [M, 1, 1].
    """

    layers: Mapping[str, torch.Tensor]

    @classmethod
    def fresh(cls, num_networks: int, num_inputs: int, hidden: int, generator: torch.Generator) -> "Networks":
        """He-initialised."""
        sizes = ((num_inputs, hidden), (hidden, hidden), (hidden, 1))
        layers = {}
        for number, (fan_in, fan_out) in enumerate(sizes, start=1):
            weight = torch.randn(num_networks, fan_in, fan_out, generator=generator) * (2.0 / fan_in) ** 0.5
            layers[f"w{number}"] = weight if number < 3 else weight * 0.1
            layers[f"b{number}"] = torch.zeros(num_networks, 1, fan_out)
        return cls(layers)

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """[M, N] from rows [N, I]; with `mask` [M, I] each network sees some of the inputs."""
        layers = self.layers
        first = layers["w1"] if mask is None else layers["w1"] * mask[:, :, None]
        hidden = torch.relu(torch.matmul(x, first) + layers["b1"])
        hidden = torch.relu(torch.matmul(hidden, layers["w2"]) + layers["b2"])
        return (torch.matmul(hidden, layers["w3"]) + layers["b3"])[..., 0]

    @torch.no_grad()
    def predict(self, x: NDArray[np.float32], mask: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """float32 [M, N], in chunks of rows so small that their hidden layers need no fresh memory each time."""
        num_networks, _, hidden = self.layers["w1"].shape
        chunk = max(64, 2**20 // (num_networks * hidden))
        seen = None if mask is None else torch.from_numpy(mask)
        parts = [self(torch.from_numpy(x[begin : begin + chunk]), seen) for begin in range(0, len(x), chunk)]
        return torch.cat(parts, 1).numpy()


def train(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    weight: NDArray[np.float32],
    *,
    mask: NDArray[np.float32] | None = None,
    hidden: int = HIDDEN,
    num_steps: int = 1500,
    batch: int = 1024,
    learning_rate: float = 3e-3,
    weight_decay: float = 1e-2,
    seed: int = 0,
    on_step: Callable[[int], None] = lambda done: None,
) -> Networks:
    """Fit M networks to M targets of the same rows by weighted least squares.

    Args:
        x: [N, I].
        y: [M, N].
        weight: [M, N]; zero keeps a row out of a network's fit (a fold that it is judged on).
        mask: [M, I], the inputs that each network sees; None for all.
        hidden: width of both hidden layers.
        num_steps: of AdamW, on a cosine schedule.
        batch: rows a step.
        learning_rate, weight_decay: of AdamW.
        seed: of initial weights and batches.
        on_step: called after every step with the number of those done.
    """
    generator = torch.Generator().manual_seed(seed)
    networks = Networks.fresh(len(y), x.shape[1], hidden, generator)
    parameters = [layer.requires_grad_() for layer in networks.layers.values()]
    optimiser = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, num_steps)
    inputs, targets, weights = torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(weight)
    seen = None if mask is None else torch.from_numpy(mask)
    for done in range(1, num_steps + 1):
        rows = torch.randint(len(inputs), (min(batch, len(inputs)),), generator=generator)
        error = networks(inputs[rows], seen) - targets[:, rows]
        loss = (weights[:, rows] * error.square()).mean(1).sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        on_step(done)
    return Networks({name: layer.detach() for name, layer in networks.layers.items()})
