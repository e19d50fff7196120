"""How many draft tokens a budget brings, by the state: a curve that rises and saturates, from a small network."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.tree import Floats, Ints

CLIP = 4.0  # standard deviations
LOG_LIMITS = ((-6.0, 4.0), (-3.0, 8.0))
"""Of log g and log kappa: beyond them no tree is worth anything, or none is large enough."""


@attrs.frozen(eq=False)
class GainModel:
    """gain(B; x) = g(x) * (1 - exp(-(B / kappa(x)) ** alpha)), with log g and log kappa two outputs of one network.

    Attributes:
        names: signals it reads.
        arrays: `mean`, `std` [S]; `w1` [S, H], `b1` [H], `w2` [H, 2], `b2` [2]; `alpha` [1].

    Source: GRAFT (SABA).
    """

    names: tuple[str, ...]
    arrays: Mapping[str, NDArray[Any]]

    def curve(self, x: Floats) -> tuple[Floats, Floats]:
        """g and kappa [...] of signals [..., S]."""
        arrays = self.arrays
        z = np.minimum(np.maximum((x - arrays["mean"]) / arrays["std"], -CLIP), CLIP)
        out = np.maximum(z @ arrays["w1"] + arrays["b1"], 0.0) @ arrays["w2"] + arrays["b2"]
        log_g, log_kappa = (
            np.minimum(np.maximum(out[..., place], low), high) for place, (low, high) in enumerate(LOG_LIMITS)
        )
        return np.exp(log_g), np.exp(log_kappa)

    def __call__(self, x: Floats, budgets: Ints) -> Floats:
        """float64 [..., G]: draft tokens expected to be accepted under each of `budgets` [G], of signals [..., S]."""
        gain, kappa = self.curve(x)
        gains: Floats = gain[..., None] * -np.expm1(-((budgets / kappa[..., None]) ** self.arrays["alpha"]))
        return gains
