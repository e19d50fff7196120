"""A plain reference loop, and pipelines whose drafter follows a script."""

from typing import Any

import attrs
import numpy as np
import torch
from hf.reference import last_logits
from transformers import PreTrainedModel

import treegraft
from treegraft.interfaces import Drafter, DraftRequest
from treegraft.registry import packaged_registry
from treegraft.sampling import SeededDraws
from treegraft.tree import Expansion

DRAFT_ALWAYS = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}", "sources.middle.rescore=false")


@attrs.frozen
class Reference:
    """What one uncached forward a token gives."""

    tokens: list[int]
    scores: list[torch.Tensor]
    logits: list[torch.Tensor]


def reference(
    model: PreTrainedModel, prompt: list[int], num_tokens: int, *, processors: Any = (), criteria: Any = (),
    eos: Any = (), seed: Any = None,
) -> Reference:  # fmt: skip
    """Plain decoding: greedy, or with a seed sampled by the same draws."""
    ids, scores, logits = list(prompt), [], []
    while len(ids) < len(prompt) + num_tokens:
        raw = last_logits(model, ids).float()[None]
        row = raw.clone()
        for processor in processors:
            row = processor(torch.tensor([ids]), row)
        if seed is None:
            token = int(row.argmax())
        else:
            token = int(SeededDraws(seed).choose(row.double().softmax(-1), np.array([len(ids)]))[0])
        ids.append(token)
        scores.append(row)
        logits.append(raw)
        if token in eos or any(bool(criterion(torch.tensor([ids]), None)) for criterion in criteria):
            break
    return Reference(ids[len(prompt) :], scores, logits)


def built(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[Any]:
    """The processors that `generate` builds for these options, new ones."""
    found: dict[str, Any] = {}

    def capture(_model: Any, input_ids: torch.Tensor, logits_processor: Any, **_: Any) -> torch.Tensor:
        found["processors"] = list(logits_processor)
        return input_ids

    ids = torch.tensor([prompt])
    model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=capture, **options)
    return found["processors"]


def loaded(target: Any, drafter: Drafter, name: str = "all_middle") -> treegraft.Pipeline:
    models = {"target": target, "middle": drafter}
    return treegraft.load(name, *DRAFT_ALWAYS, models=models, registry=packaged_registry())


def accepted(generation: treegraft.Generation) -> int:
    return sum(kept * count for kept, count in generation.accepted_histogram.items())


@attrs.define(eq=False)
class RankedDrafter(Drafter):
    """Knows the next tokens, and hides the one at depth d + 1 behind `ranks[d]` wrong siblings, in turn."""

    reference: list[int]
    ranks: tuple[int, ...]

    def draft(self, request: DraftRequest) -> Expansion:
        rows = {}
        for row in request.positions.tolist():
            context, depth = request.context(row).tolist(), int(request.tree.depth[row])
            if depth < request.max_depth and context == self.reference[: len(context)] != self.reference:
                right = self.reference[len(context)]
                tokens = [token for token in range(4) if token != right][:3]
                tokens.insert(self.ranks[depth % len(self.ranks)], right)
                rows[row] = [(token, -0.1 * (place + 1)) for place, token in enumerate(tokens)]
        return Expansion.from_rows(rows)
