"""transformers' own caches as a caller passes them: what they hold of a row, and how they are left."""

from collections.abc import Sequence

import attrs
import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from treegraft.errors import RequestError
from treegraft_plugins.hf.cache import KeysValues, Past

_SERVED = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
_ALLOWED = "Allowed: DynamicCache and StaticCache, with full or sliding-window layers."


@attrs.frozen(eq=False)
class Row:
    """A finished row's keys and values.

    Attributes:
        layers: of every layer, for the tokens committed.
        num_padding: columns of padding in front of them.
    """

    layers: list[KeysValues]
    num_padding: int


def check_cache(cache: Cache, num_rows: int) -> None:
    """Refuse, by name, a cache that cannot be continued for `num_rows` sequences.

    Raises:
        RequestError: it cannot.
    """
    if isinstance(cache, EncoderDecoderCache):
        raise RequestError("cache", "an EncoderDecoderCache", _ALLOWED)
    if cache.offloading:
        raise RequestError("cache", "an offloaded cache", _ALLOWED, "Pass offloading=False.")
    kinds = {type(layer) for layer in cache.layers} or {cache.layer_class_to_replicate}
    unserved = sorted(kind.__name__ for kind in kinds if kind not in _SERVED)
    if unserved:
        raise RequestError("cache", f"a {type(cache).__name__} of {', '.join(unserved)}", _ALLOWED)
    for layer in cache.layers:
        if layer.is_initialized and layer.keys.numel() and len(layer.keys) != num_rows:
            raise RequestError("cache", f"it holds {len(layer.keys)} rows", f"Allowed for these inputs: {num_rows}.")


def check_room(cache: Cache, length: int) -> None:
    """Refuse a static cache that may have to hold more than it can: `length` slots, padding included.

    Raises:
        RequestError: it is too small.
    """
    for layer in cache.layers:
        if type(layer) is StaticLayer and layer.max_cache_len < length:
            raise RequestError(
                "cache", f"a static cache of {layer.max_cache_len} slots for up to {length} tokens",
                f"Allowed: max_cache_len >= {length}, or a smaller max_new_tokens.",
            )  # fmt: skip


def num_slots(cache: Cache | None) -> int:
    """Slots in use, padding included."""
    return 0 if cache is None or not cache.layers else int(cache.get_seq_length())


def read_row(cache: Cache, row: int, num_padding: int, num_unseen: int) -> Past:
    """What the cache holds of one row, its padding left out.

    A sliding layer has dropped what no later token can see; those slots come back as zeros.
    """
    length = num_slots(cache)
    layers = []
    for layer in cache.layers:
        held = [states[row : row + 1] for states in (layer.keys, layer.values)]
        if isinstance(layer, StaticLayer):
            held = [states[..., :length, :] for states in held]
        full = []
        for states in held:
            whole = states.new_zeros((*states.shape[:-2], length, states.shape[-1]))
            whole[..., length - states.shape[-2] :, :] = states
            full.append(whole[..., num_padding:, :])
        layers.append((full[0], full[1]))
    return Past(layers, length - num_padding, num_unseen)


def write_rows(cache: Cache, rows: Sequence[Row], length: int) -> None:
    """Leave in `cache` what `generate` leaves there: `length` slots a row, all tokens but the last.

    Columns of padding, in front of a row or behind one that ended early, are zeros.
    """
    while len(cache.layers) < len(rows[0].layers):
        cache.layers.append(cache.layer_class_to_replicate())
    for index, layer in enumerate(cache.layers):
        keys, values = (_stacked(rows, index, part, length) for part in (0, 1))
        _fill(layer, keys, values, length)


def _stacked(rows: Sequence[Row], index: int, part: int, length: int) -> torch.Tensor:
    first = rows[0].layers[index][part]
    # A plain tensor, not one of inference mode: the caller may go on with it.
    stacked = torch.zeros((len(rows), first.shape[1], length, first.shape[3]), dtype=first.dtype, device=first.device)
    for number, row in enumerate(rows):
        states = row.layers[index][part][0]
        end = min(length, row.num_padding + states.shape[-2])
        stacked[number, :, row.num_padding : end] = states[:, : end - row.num_padding]
    return stacked


def _fill(layer: DynamicLayer | StaticLayer, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    """Set one layer to these states [rows, heads, length, dim], as its own updates would have left it."""
    held = layer.keys.shape[-2] if layer.is_initialized else 0
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    if isinstance(layer, StaticLayer):
        size = layer.max_cache_len
        kept = min(length, size)
        layer.keys[..., :kept, :] = keys[..., length - kept :, :]
        layer.values[..., :kept, :] = values[..., length - kept :, :]
        layer.cumulative_length.fill_(kept)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length
        return
    start = 0
    if isinstance(layer, DynamicSlidingWindowLayer):
        # One that records its past drops nothing before it is cropped.
        start = layer.cumulative_length - held if layer.record_past else max(0, length - layer.sliding_window + 1)
        layer.cumulative_length = length
    layer.keys, layer.values = keys[..., start:, :].contiguous(), values[..., start:, :].contiguous()
