"""Processors and criteria that `generate` built for all rows of a batch, made over for one row without its padding."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from treegraft.errors import RequestError

T = TypeVar("T")

_LENGTH_READERS = {
    MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, ForcedEOSTokenLogitsProcessor,
    ExponentialDecayLengthPenalty, SuppressTokensAtBeginLogitsProcessor,
}  # fmt: skip


@attrs.frozen(eq=False)
class Row:
    """One row of `generate`'s inputs.

    Attributes:
        index: which one, repeats for num_return_sequences counted.
        num_rows: of all.
        tokens: int64 [T], without padding.
        num_padding: columns of `input_ids` in front of them.
        num_masked: columns of the attention mask that are padding; more where a cache holds some.
    """

    index: int
    num_rows: int
    tokens: torch.Tensor
    num_padding: int
    num_masked: int


@attrs.frozen
class _Padded:
    """A processor that reads nothing of the prefix but its length, which `generate` counts with padding."""

    processor: LogitsProcessor
    num_padding: int

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(torch.nn.functional.pad(ids, (self.num_padding, 0)), scores)


def row_processors(processors: Sequence[Any], row: Row) -> tuple[Any, ...]:
    """The processors of one row; a single row without padding gets them as they are.

    Raises:
        RequestError: a processor of the caller's that cannot be copied for each row.
    """
    if row.num_rows == 1 and not row.num_masked:
        return tuple(processors)
    return tuple(_row_processor(processor, row) for processor in processors)


def row_criteria(criteria: Sequence[Any], row: Row) -> tuple[Any, ...]:
    """The same for stopping criteria."""
    return tuple(criterion if _is_theirs(criterion) else _own_copy(criterion, row) for criterion in criteria)


def _row_processor(processor: Any, row: Row) -> Any:
    kind = type(processor)
    if kind in _LENGTH_READERS:
        return _Padded(processor, row.num_padding) if row.num_padding else processor
    if kind is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, torch.Tensor):
        ignored = int(processor.prompt_ignore_length[row.index]) - row.num_masked
        return kind(processor.penalty, prompt_ignore_length=max(ignored, 0))
    if kind is EncoderRepetitionPenaltyLogitsProcessor:
        return kind(1 / processor.penalty, row.tokens[None])
    if kind is EncoderNoRepeatNGramLogitsProcessor:
        return kind(processor.ngram_size, row.tokens[None])
    if kind is PrefixConstrainedLogitsProcessor:
        allowed, batch_id = processor._prefix_allowed_tokens_fn, row.index // processor._num_beams
        return kind(lambda _, ids: allowed(batch_id, ids), 1)
    if kind is UnbatchedClassifierFreeGuidanceLogitsProcessor:
        return _guidance(processor, row)
    if kind is SynthIDTextWatermarkLogitsProcessor:
        own = copy.copy(processor)
        own.state = None
        return own
    return processor if _is_theirs(processor) else _own_copy(processor, row)


def _guidance(processor: UnbatchedClassifierFreeGuidanceLogitsProcessor, row: Row) -> Any:
    """With the row's own unconditional context and cache."""
    context = dict(processor.unconditional_context)
    for name in ("input_ids", "attention_mask"):
        if context[name] is not None:
            repeats = max(1, row.num_rows // len(context[name]))
            context[name] = context[name][row.index // repeats][None]
    own = copy.copy(processor)
    own.unconditional_context = context
    return own


def _is_theirs(part: Any) -> bool:
    """Whether it is transformers' own, and then without a state that rows could mix up."""
    return type(part).__module__.startswith("transformers.")


def _own_copy(part: T, row: Row) -> T:
    """A caller's part for one row alone: it may keep a state."""
    if row.num_rows == 1:
        return part
    try:
        return copy.deepcopy(part)
    except Exception as error:
        raise RequestError(
            type(part).__name__,
            f"it cannot be copied for each of {row.num_rows} rows ({type(error).__name__}: {error})",
            "Allowed: one row, or a class with __deepcopy__ (return self to share it).",
        ) from error  # fmt: skip
