"""What a target says about given text: the hidden states drafters read, and the distributions they learn from."""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from transformers import PreTrainedModel

from treegraft.tree import Ints


@attrs.frozen(eq=False)
class Lesson:
    """A batch of text as the target sees it.

    Attributes:
        tokens: int64 [B, T].
        hidden: [B, T, layers, h], the hidden states asked for.
        probs: float32 [B, T, V], the target's distribution *after* each token.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    probs: torch.Tensor

    def repeated(self, times: int) -> "Lesson":
        """Each text several times in a row, with the distributions left as they are."""
        tokens, hidden = (part.repeat_interleave(times, dim=0) for part in (self.tokens, self.hidden))
        return Lesson(tokens, hidden, self.probs)


@torch.no_grad()
def lesson(model: PreTrainedModel, tokens: Ints, hidden_layers: Sequence[int], temperature: float) -> Lesson:
    """One forward over `tokens` [B, T]; `temperature` divides the logits."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.get_input_embeddings().weight.device)
    output = model(input_ids=ids, use_cache=False, output_hidden_states=list(hidden_layers))
    hidden = torch.stack([output.hidden_states[layer].float() for layer in hidden_layers], dim=2)
    return Lesson(ids, hidden, (output.logits.float() / temperature).softmax(-1))


def accepted_along(drafts: Ints, text: Ints, first: int) -> tuple[int, int]:
    """(accepted tokens, rounds) of decoding `text` [T] from token `first` on with chains drafted at every anchor.

    `drafts` [T, L]: row t holds the chain drafted with token t as anchor. Match verification emits the text itself,
    so a chain is accepted as far as it agrees with the text, and the token after it is the next anchor.
    """
    num_accepted, num_rounds, anchor = 0, 0, first
    num_ahead = drafts.shape[1]
    while anchor + num_ahead < len(text):
        agrees = drafts[anchor] == text[anchor + 1 : anchor + 1 + num_ahead]
        accepted = num_ahead if agrees.all() else int(agrees.argmin())
        num_accepted, num_rounds, anchor = num_accepted + accepted, num_rounds + 1, anchor + accepted + 1
    return num_accepted, num_rounds
