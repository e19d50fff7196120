"""How a drafter's token ids relate to the target's."""

from typing import Any

import attrs
import numpy as np
import torch
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from treegraft.errors import ModelError
from treegraft.interfaces import TargetModel
from treegraft.tree import Ints

WHERE = "hf_causal_lm"


@attrs.frozen
class SameIds:
    """One tokenizer for both: an id stands for the same text to either.

    Attributes:
        vocab_size: ids that the drafter's model has embeddings for.
        num_shared: ids, counted from 0, that it may propose.
    """

    vocab_size: int
    num_shared: int

    @classmethod
    def between(cls, tokenizer: Any, vocab_size: int, target: TargetModel) -> "SameIds":
        """Compare the tokenizers: every id that both define must stand for the same text.

        Ids beyond the shorter of them, rows that only pad an embedding, are never proposed. Without two tokenizers
        nothing can be compared, and the sizes must agree.

        Raises:
            ModelError: the vocabularies differ.
        """
        if tokenizer is None or target.tokenizer is None:
            if vocab_size != target.vocab_size:
                raise ModelError(
                    WHERE, f"a drafter of {vocab_size} tokens for a target of {target.vocab_size}, not both "
                    "with a tokenizer", "Allowed: equal sizes, or two tokenizers that agree (padding may then differ).",
                    "Give both models as folders that hold their tokenizers, or as (model, tokenizer).",
                )  # fmt: skip
            return cls(vocab_size, vocab_size)
        own, other = ({id_: text for text, id_ in each.get_vocab().items()} for each in (tokenizer, target.tokenizer))
        differing = [id_ for id_, text in own.items() if other.get(id_, text) != text]
        if differing:
            first = min(differing)
            raise ModelError(
                WHERE, f"token {first} is {own[first]!r} to the drafter and {other[first]!r} to the target",
                "Allowed: a drafter that shares the target's tokenizer, or vocabulary: intersection.",
                "Choose a drafter of the target's family, or draft over the tokens that both know.",
            )  # fmt: skip
        return cls(vocab_size, min(vocab_size, target.vocab_size, max(own) + 1, max(other) + 1))

    def context(self, committed: Ints) -> Ints:
        """The committed tokens in the drafter's ids; those of `vocab_size` and above are unknown to it."""
        return committed

    def own(self, tokens: Ints) -> Ints:
        """int64 [N]: the drafter's ids of `tokens` [N], -1 for those it does not know."""
        return np.where(tokens < self.vocab_size, tokens, -1)

    def proposable(self, scores: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """The columns of `scores` [P, V] that may be proposed to a target of `vocab_size`."""
        return scores[:, : min(self.num_shared, vocab_size)]

    def proposed(self, columns: Ints) -> Ints:
        """The target's ids of columns of `proposable`."""
        return columns


@attrs.define(eq=False)
class SharedTexts:
    """Two tokenizers: the drafter reads the text in its own tokens and proposes those that both have.

    A token that only the target has is read as what the drafter's tokenizer makes of its text alone, which at worst
    makes for a poor guess.

    Attributes:
        own_ids: int64 [V of the target], the drafter's ids, -1 where it has no such token.
        pieces: int64, the drafter's ids for every id of the target, one after another, at least one each.
        starts: int64 [V of the target + 1], where each id's pieces begin.
        columns: int64 [S], the drafter's ids of the shared tokens, ascending.
        target_ids: int64 [S], the target's ids of the same.
    """

    own_ids: Ints
    pieces: Ints
    starts: Ints
    columns: torch.Tensor
    target_ids: Ints

    @classmethod
    def between(cls, tokenizer: Any, vocab_size: int, target: TargetModel) -> "SharedTexts":
        """Match the tokens of two tokenizers by their texts, as transformers' assisted generation does.

        Raises:
            ModelError: there are not two tokenizers, or they share nothing.
        """
        if tokenizer is None or target.tokenizer is None:
            raise ModelError(
                WHERE, "vocabulary: intersection without two tokenizers", None,
                "Give both models as folders that hold their tokenizers, or as (model, tokenizer).",
            )  # fmt: skip
        matched = AssistantToTargetTranslator(target.tokenizer, tokenizer, target.vocab_size)
        pairs = sorted(
            (own, other)
            for other, own in matched.target_to_assistant_input_ids.items()
            if own < vocab_size and other < target.vocab_size
        )
        if not pairs:
            raise ModelError(WHERE, "two tokenizers that share no token", None, "Choose another drafter.")
        columns, target_ids = np.array(pairs, dtype=np.int64).T
        own_ids = np.full(target.vocab_size, -1, dtype=np.int64)
        own_ids[target_ids] = columns
        pieces = own_ids[:, None].tolist()
        for other, ids in _own_pieces(np.flatnonzero(own_ids < 0), tokenizer, vocab_size, target.tokenizer).items():
            pieces[other] = ids
        starts = np.cumsum([0, *map(len, pieces)])
        return cls(own_ids, np.concatenate(pieces), starts, torch.from_numpy(columns), target_ids)

    def context(self, committed: Ints) -> Ints:
        """The committed tokens in the drafter's ids, at least one for each."""
        first, size = self.starts[committed], self.starts[committed + 1] - self.starts[committed]
        ends = np.cumsum(size)
        return self.pieces[np.arange(ends[-1]) + np.repeat(first - ends + size, size)]

    def own(self, tokens: Ints) -> Ints:
        """int64 [N]: the drafter's ids of `tokens` [N], -1 for those it does not know."""
        return self.own_ids[tokens]

    def proposable(self, scores: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """The columns of `scores` [P, V] that may be proposed."""
        self.columns = self.columns.to(scores.device)
        return scores.index_select(-1, self.columns)

    def proposed(self, columns: Ints) -> Ints:
        """The target's ids of columns of `proposable`."""
        return self.target_ids[columns]


def _own_pieces(target_ids: Ints, tokenizer: Any, vocab_size: int, target_tokenizer: Any) -> dict[int, list[int]]:
    """For ids that only the target has, the drafter's ids of their texts."""
    if not len(target_ids):
        return {}
    texts = target_tokenizer.batch_decode(target_ids[:, None].tolist())
    made = tokenizer(texts, add_special_tokens=False)["input_ids"]
    special = (tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    instead = next((id_ for id_ in special if id_ is not None and id_ < vocab_size), 0)  # rows without a text
    return {
        int(other): [id_ for id_ in ids if id_ < vocab_size] or [instead]
        for other, ids in zip(target_ids, made, strict=True)
    }


Vocabulary = SameIds | SharedTexts
VOCABULARIES: dict[str, type[Vocabulary]] = {"same": SameIds, "intersection": SharedTexts}
