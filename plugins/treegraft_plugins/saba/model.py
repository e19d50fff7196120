"""How many draft tokens a budget brings, by the state: a curve over what the tree expects, from a small network."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.tree import Floats

CLIP = 4.0  # standard deviations
LOG_LIMITS = ((-6.0, 4.0), (-3.0, 8.0), (-1.6, 0.7))
"""Of log g, log kappa and log alpha: beyond them no tree is worth anything, none expects enough, no curve is left."""


@attrs.frozen(eq=False)
class GainModel:
    """gain(B; x) = g(x) * (1 - exp(-(E / kappa(x)) ** alpha(x))), their logarithms the outputs of one network.

    E is what the tree's own scores expect of its best B nodes; the paper has B itself in its place. E says how much the
    next nodes of this tree are worth, which no state does, and where scores are right the curve comes to E.

    Attributes:
        names: signals it reads.
        arrays: `mean`, `std` [S]; `w1` [S, H], `b1` [H], `w2` [H, 3], `b2` [3].

    Source: GRAFT (SABA).
    """

    names: tuple[str, ...]
    arrays: Mapping[str, NDArray[Any]]

    def curve(self, x: Floats) -> tuple[Floats, Floats, Floats]:
        """g, kappa and alpha [...] of signals [..., S]."""
        arrays = self.arrays
        z = np.minimum(np.maximum((x - arrays["mean"]) / arrays["std"], -CLIP), CLIP)
        out = np.maximum(z @ arrays["w1"] + arrays["b1"], 0.0) @ arrays["w2"] + arrays["b2"]
        gain, kappa, alpha = (
            np.exp(np.minimum(np.maximum(out[..., place], low), high)) for place, (low, high) in enumerate(LOG_LIMITS)
        )
        return gain, kappa, alpha

    def __call__(self, x: Floats, expected: Floats) -> Floats:
        """float64 [..., G]: draft tokens that budgets bring, by signals [..., S] and what trees expect, E [..., G]."""
        gain, kappa, alpha = (part[..., None] for part in self.curve(x))
        gains: Floats = gain * -np.expm1(-((expected / kappa) ** alpha))
        return gains
