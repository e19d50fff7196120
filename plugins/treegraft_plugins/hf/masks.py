"""Attention masks for tree nodes: one additive tensor a layer type and forward, windows counted in positions."""

from typing import Any

import attrs
import numpy as np
import torch

from treegraft.tree import Bools, Ints


@attrs.frozen
class MaskLayout:
    """Which masks a model's forward takes.

    Attributes:
        windows: for each layer type the sliding window (in positions), or None where a layer sees everything.
        keyed: whether the forward takes a dict by layer type; otherwise one tensor, of the only entry.
    """

    windows: dict[str, int | None]
    keyed: bool

    @classmethod
    def of(cls, config: Any) -> "MaskLayout":
        """The layout of a model with this (text) configuration."""
        window = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None)
        if layer_types is None:
            return cls({"all": window}, keyed=False)
        return cls({kind: window if kind == "sliding_attention" else None for kind in set(layer_types)}, keyed=True)

    def masks(self, visible: Bools, positions: Ints, key_positions: Ints, dtype: torch.dtype, device: Any) -> Any:
        """What to pass as `attention_mask`.

        Additive masks serve sdpa and eager alike, and spare sdpa a conversion from bool in every layer.

        Args:
            visible: bool [n, m], which of the last m keys each of the n rows sees; it sees all keys before those.
            positions: int64 [n] of the rows.
            key_positions: int64 [keys], of all keys.
            dtype, device: of the mask.
        """
        built: dict[int | None, torch.Tensor | None] = {}
        for window in self.windows.values():
            if window not in built:
                built[window] = _mask(visible, positions, key_positions, window, dtype, device)
        if not self.keyed:
            return built[self.windows["all"]]
        return {kind: built[window] for kind, window in self.windows.items()}


def _mask(
    visible: Bools, positions: Ints, key_positions: Ints, window: int | None, dtype: torch.dtype, device: Any
) -> torch.Tensor | None:
    """Additive mask [1, 1, n, keys] of one layer type, or None where a lone row sees every key."""
    num_rows, num_keys = len(positions), len(key_positions)
    # Siblings share a position, so a window is a bound on positions: slots would count siblings as distance.
    windowed = window is not None and int(positions.max()) - int(key_positions.min()) >= window
    if num_rows == 1 and not windowed and (visible.size == 1 or visible.all()):  # each row sees itself
        return None
    mask = torch.zeros((1, 1, num_rows, num_keys), dtype=dtype, device=device)
    hidden = ~visible
    if windowed:
        hidden = np.concatenate([np.zeros((num_rows, num_keys - visible.shape[1]), np.bool_), hidden], axis=1)
        hidden |= positions[:, None] - key_positions[None, :] >= window
    mask[0, 0, :, num_keys - hidden.shape[1] :].masked_fill_(torch.from_numpy(hidden).to(device), -torch.inf)
    return mask
