"""Toy targets: small enough that every output they can produce is enumerated."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from treegraft.errors import ModelError
from treegraft.interfaces import Observation, TargetModel, Wants
from treegraft.sampling import SamplingOptions, SamplingRules, Scores, top_tokens
from treegraft.tree import DraftTree, Floats, Ints


def markov_table(vocab_size: int, order: int = 2, seed: int = 0, spread: float = 1.5) -> Floats:
    """Random logits [V] * order + [V]: the next token after each context of `order` tokens."""
    return np.random.default_rng(seed).normal(scale=spread, size=(vocab_size,) * (order + 1))


def table_row(table: Floats, context: Sequence[int] | Ints) -> Floats:
    """float64 [V]: the table's logits after `context` [T]; where it is too short, token 0 stands in front."""
    order = table.ndim - 1
    padded = (0,) * order + tuple(int(token) for token in context[-order:])
    row: Floats = table[padded[-order:]]
    return row


def _table(value: Any) -> Floats:
    table = np.array(value, dtype=np.float64)
    if table.ndim < 2 or len(set(table.shape)) != 1:
        raise ModelError(
            "table", f"shape {table.shape}", "Allowed: [V, V], or one more V for each more token of order."
        )
    table.flags.writeable = False
    return table


@attrs.define(eq=False)
class MarkovTarget(TargetModel):
    """A target whose next token depends on the last `order` tokens, read off a table of logits.

    It is stateful the way a transformer is: it remembers committed tokens through the rows it is told to commit, and
    scores every node on top of that memory. With order 2 or more, a wrong commit therefore changes what follows.

    Args:
        table: logits [V] * order + [V]; -inf rules a token out.
        eos_ids: tokens that end a request.
        max_length: most tokens of prompt and output together, or None.
    """

    table: Floats = attrs.field(converter=_table)
    eos_ids: frozenset[int] = attrs.field(default=frozenset(), converter=frozenset)
    max_length: int | None = None
    vocab_size: int = attrs.field(init=False)
    _caches: list[list[int]] = attrs.field(init=False, factory=list)
    _scored: list[DraftTree] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.vocab_size = len(self.table)

    def prefill(self, prompts: Sequence[Ints], wants: Wants) -> list[Observation]:
        if wants.hidden_layers:
            raise ModelError("MarkovTarget", "a drafter asks for hidden states", "A table of logits has none.")
        self._caches = [[int(token) for token in prompt[:-1]] for prompt in prompts]
        self._scored = []
        return [self._observe(cache, wants.num_top) for cache in self._caches]

    def score(self, trees: Sequence[DraftTree]) -> list[Scores]:
        self._scored = list(trees)
        return [
            Scores(self._logits([cache + tree.token[tree.path(row)].tolist() for row in range(len(tree))]))
            for cache, tree in zip(self._caches, trees, strict=True)
        ]

    def commit(self, paths: Sequence[Ints]) -> None:
        for cache, tree, path in zip(self._caches, self._scored, paths, strict=True):
            cache += [int(tree.token[0]), *tree.token[path].tolist()]
        self._scored = []

    def reset(self) -> None:
        self._caches, self._scored = [], []

    def sampling_rules(self, prompt: Ints, options: SamplingOptions, max_new_tokens: int) -> SamplingRules:
        return attrs.evolve(super().sampling_rules(prompt, options, max_new_tokens), eos_ids=self.eos_ids)

    def _logits(self, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
        rows = [table_row(self.table, context) for context in contexts]
        return torch.from_numpy(np.array(rows).reshape(len(rows), self.vocab_size))

    def _observe(self, tokens: list[int], num_top: int) -> Observation:
        if not num_top:
            return Observation(np.array(tokens, np.int64))
        contexts = [tokens[: end + 1] for end in range(len(tokens))]
        return Observation(np.array(tokens, np.int64), *top_tokens(self._logits(contexts), num_top))
