"""A text through a causal LM as plain forwards: nothing here knows trees, masks or slots."""

import inspect
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from treegraft.sampling import Scores
from treegraft.tree import Ints

_PROMPT_CHUNK = 256  # tokens a forward whose logits are not wanted
_CHUNK = 64  # tokens a forward whose logits are: bounds what they hold at once


@torch.inference_mode()
def teacher_force(model: PreTrainedModel, tokens: Ints, start: int) -> Iterator[Scores]:
    """Logits [n, V] after tokens[start - 1] up to tokens[-2], in order and in chunks, with the model's own cache.

    Args:
        model: any causal LM.
        tokens: int64 [T].
        start: first token to be predicted, at least 1.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor(tokens, device=device)[None]
    keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    cache = None
    for begin, end in _chunks(start - 1, len(tokens) - 1):
        wanted = begin >= start - 1
        output = model(
            input_ids=ids[:, begin:end],
            position_ids=torch.arange(begin, end, device=device)[None],
            cache=cache,
            use_cache=True,
            **({"logits_to_keep": 1} if keeps_logits and not wanted else {}),
        )
        cache = output.cache
        if wanted:
            yield Scores(output.logits[0])


def _chunks(num_prompt: int, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of forwards over `size` tokens; none crosses from the first `num_prompt` into the rest."""
    for begin in range(0, num_prompt, _PROMPT_CHUNK):
        yield begin, min(begin + _PROMPT_CHUNK, num_prompt)
    for begin in range(num_prompt, size, _CHUNK):
        yield begin, min(begin + _CHUNK, size)
