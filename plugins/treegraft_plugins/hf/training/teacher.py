"""What a target says about given text: the hidden states drafters read, and the distributions they learn from."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from transformers import PreTrainedModel

from treegraft.tree import Ints
from treegraft_plugins.hf.fingerprint import fingerprint
from treegraft_plugins.hf.training.corpus import Report


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


@torch.no_grad()
def lesson(model: PreTrainedModel, tokens: Ints, hidden_layers: Sequence[int], temperature: float) -> Lesson:
    """One forward over `tokens` [B, T]; `temperature` divides the logits."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.get_input_embeddings().weight.device)
    output = model(input_ids=ids, use_cache=False, output_hidden_states=list(hidden_layers))
    hidden = torch.stack([output.hidden_states[layer].float() for layer in hidden_layers], dim=2)
    return Lesson(ids, hidden, (output.logits.float() / temperature).softmax(-1))


@attrs.frozen(eq=False)
class Lessons:
    """Windows of text and what the target's layers say about them, computed once and kept in a file.

    Attributes:
        tokens: int64 [N, T].
        hidden: [N, T, layers + 1, h], in the model's own precision: the hidden states asked for, and the last ones.
        model: the target, whose head alone makes its logits.
        temperature: divides the logits.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    model: PreTrainedModel
    temperature: float

    @classmethod
    @torch.no_grad()
    def of(
        cls, model: PreTrainedModel, tokens: Ints, hidden_layers: Sequence[int], temperature: float, folder: Path,
        report: Report, batch_size: int = 16,
    ) -> "Lessons":  # fmt: skip
        """Read the states of `tokens` [N, T] from the file in `folder`, or compute and write them.

        The file's name says of what they are; one of anything else, or of another size, is removed.
        """
        layers = [*hidden_layers, model.config.get_text_config(decoder=True).num_hidden_layers]
        width = model.config.get_text_config(decoder=True).hidden_size
        shape = (*tokens.shape, len(layers), width)
        of = f"{fingerprint(model)} {model.dtype} {shape} {hidden_layers}".encode() + tokens.tobytes()
        file = folder / f"hidden-{hashlib.sha256(of).hexdigest()[:16]}.bin"
        for other in folder.glob("hidden-*"):
            if other != file or other.stat().st_size != math.prod(shape) * model.dtype.itemsize:
                other.unlink()
        partial = file.with_suffix(".part")
        place = str(file if file.exists() else partial)
        hidden = torch.from_file(place, shared=True, size=math.prod(shape), dtype=model.dtype).view(shape)
        lessons = cls(torch.from_numpy(tokens.astype(np.int64)), hidden, model, temperature)
        if file.exists():
            return lessons
        device = model.get_input_embeddings().weight.device
        for start in range(0, len(tokens), batch_size):
            rows = slice(start, start + batch_size)
            output = model(
                input_ids=lessons.tokens[rows].to(device), use_cache=False, output_hidden_states=sorted(set(layers)),
                logits_to_keep=1,
            )  # fmt: skip
            hidden[rows] = torch.stack([output.hidden_states[layer].cpu() for layer in layers], dim=2)
            if rows.stop % (16 * batch_size) == 0 or rows.stop >= len(tokens):
                report(f"{min(rows.stop, len(tokens))}/{len(tokens)} windows read by the target")
        partial.replace(file)
        return lessons

    def __len__(self) -> int:
        return len(self.tokens)

    @torch.no_grad()
    def __getitem__(self, rows: Ints) -> Lesson:
        head = self.model.get_output_embeddings()
        hidden = self.hidden[rows].to(head.weight.device)
        logits = head(hidden[:, :, -1]).float() / self.temperature
        return Lesson(self.tokens[rows].to(hidden.device), hidden[:, :, :-1].float(), logits.softmax(-1))


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
