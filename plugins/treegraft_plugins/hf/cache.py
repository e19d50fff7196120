"""A slot-addressed cache: preallocated keys and values that tree nodes are written to once and picked from in place."""

from collections.abc import Sequence

import attrs
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from treegraft.tree import Ints

_FIRST_CAPACITY = 256

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values, [1, heads, T, dim] each."""


@attrs.frozen(eq=False)
class Past:
    """What a passed cache holds of one sequence.

    Attributes:
        layers: keys and values of every layer.
        length: T, tokens held.
        num_unseen: how many of them, counted from the first, are not among the request's tokens.
    """

    layers: list[KeysValues]
    length: int
    num_unseen: int = 0


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values in slots, in the order they were forwarded; capacity doubles when it runs out.

    transformers' own growing layer concatenates the whole context once a forward and has no gather along the
    sequence; here `update` writes the new slots and returns a view, and `pick` moves accepted slots only.

    Attributes:
        keys, values: [1, heads, capacity, dim], of which the first `length` slots are in use.
        length: slots in use.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        capacity = max(_FIRST_CAPACITY, key_states.shape[-2])
        self.keys, self.values = _slots_like(key_states, capacity), _slots_like(value_states, capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new slots and return views [1, heads, length, dim] of all that are in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, num_new = self.length, key_states.shape[-2]
        if start + num_new > self.keys.shape[-2]:
            self._grow(max(2 * self.keys.shape[-2], start + num_new))
        self.keys.narrow(-2, start, num_new).copy_(key_states)
        self.values.narrow(-2, start, num_new).copy_(value_states)
        self.length = start + num_new
        return self.keys.narrow(-2, 0, self.length), self.values.narrow(-2, 0, self.length)

    def pick(self, slots: torch.Tensor, start: int) -> None:
        """Make `slots` [k] the slots from `start` on, in this order, and drop all after them."""
        slots = slots.to(self.keys.device)
        for states in (self.keys, self.values):
            states.narrow(-2, start, len(slots)).copy_(states.index_select(-2, slots))
        self.length = start + len(slots)

    def truncate(self, length: int) -> None:
        """Drop all slots from `length` on."""
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized, self.length = False, 0

    def _grow(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = _slots_like(old, capacity)
            new.narrow(-2, 0, self.length).copy_(old.narrow(-2, 0, self.length))
            setattr(self, name, new)


def _slots_like(states: torch.Tensor, capacity: int) -> torch.Tensor:
    return states.new_empty((*states.shape[:-2], capacity, states.shape[-1]))


class SlotCache(Cache):
    """transformers' cache container over `SlotLayer`s, which it makes as the model's layers first write to it."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=SlotLayer)

    def adopt(self, past: Past) -> None:
        """Begin with a copy of what another cache holds."""
        for index, (keys, values) in enumerate(past.layers):
            self.update(keys, values, index)

    def states(self, length: int) -> list[KeysValues]:
        """The first `length` slots of every layer, as views."""
        return [(layer.keys.narrow(-2, 0, length), layer.values.narrow(-2, 0, length)) for layer in self.layers]

    def keep(self, start: int, slots: Ints | Sequence[int]) -> None:
        """Keep the first `start` slots and, behind them and in this order, slots `start + slots` [k]; drop the rest.

        A leading run that is in place already is left alone: an accepted path often is all of that.
        """
        num_in_place = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
        if num_in_place == len(slots):
            for layer in self.layers:
                layer.truncate(start + len(slots))
            return
        moved = torch.tensor([start + int(slot) for slot in slots[num_in_place:]])
        for layer in self.layers:
            layer.pick(moved, start + num_in_place)
