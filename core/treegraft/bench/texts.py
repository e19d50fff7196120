"""Do the arms say the same? Where they do not, how close the target was between the two."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from treegraft.audit import audit
from treegraft.bench.records import Record
from treegraft.interfaces import TargetModel
from treegraft.sampling import SamplingOptions, SamplingRules

Key = tuple[str, str]
"""A prompt: its file and its id."""


def reference_arm(arms: Mapping[str, bool]) -> str:
    """The arm whose ids are expected of the others; `arms` says whose sampled text is plain decoding's."""
    own = [name for name, repeats_plain in arms.items() if repeats_plain]
    return "plain" if "plain" in own else next(iter(own or arms))


def compared(
    records: Sequence[Record], arms: Mapping[str, bool], target: TargetModel, prompts: Mapping[Key, Sequence[int]]
) -> tuple[list[Record], list[dict[str, Any]]]:
    """The records with `text_ok`, and a divergence for each that is not.

    Arms whose sampled text is plain decoding's must emit the reference's ids at any temperature, the others at
    temperature 0; there its first repeat is the reference for all.

    Args:
        records: of a run.
        arms: by name, whether their sampled text is plain decoding's with the same seed.
        target: what the texts are gone over with once more.
        prompts: token ids.
    """
    reference = reference_arm(arms)
    expected = {_place(record): record for record in records if record.arm == reference}
    judged, divergences = [], []
    for record in records:
        wanted = expected.get(_place(record))
        comparable = record.temperature == 0 or (arms[record.arm] and arms[reference])
        if wanted is None or not comparable:
            judged.append(record)
            continue
        same = record.token_ids == wanted.token_ids
        judged.append(attrs.evolve(record, text_ok=same))
        if not same:
            divergences.append(divergence(record, wanted, target, prompts[record.file, record.prompt_id]))
    return judged, divergences


def _place(record: Record) -> tuple[str, str, float, int, int]:
    """Where records are compared: among the arms of one request, at temperature 0 with its first repeat."""
    return (*record.cell[:-1], record.repeat if record.temperature else 0)


def divergence(found: Record, expected: Record, target: TargetModel, prompt: Sequence[int]) -> dict[str, Any]:
    """The first token in which a text differs from what was expected, and what the target itself says of the two.

    Gaps are in nats, None where they are infinite or one text ends: `logit_gap` between the two tokens after the
    processors, `expected_gap` and `found_gap` between each and the target's own choice there, as `treegraft audit` has
    them: 0 for the one that it chooses in plain forwards.
    """
    shortest = min(len(found.token_ids), len(expected.token_ids))
    pairs = zip(found.token_ids, expected.token_ids, strict=False)
    index = next((index for index, (one, other) in enumerate(pairs) if one != other), shortest)
    ids = np.array(prompt, dtype=np.int64)
    rules = target.sampling_rules(ids, SamplingOptions(found.temperature), found.max_new_tokens)
    tokens = [record.token_ids[index] if index < len(record.token_ids) else None for record in (found, expected)]

    def gap(record: Record) -> float | None:
        if index >= len(record.token_ids):
            return None
        differences = audit(target, ids, record.token_ids[: index + 1], rules, record.seed)
        return next((_finite(each.gap) for each in differences if each.index == index), 0.0)

    return {
        "arm": found.arm, "reference": expected.arm, "file": found.file, "prompt_id": found.prompt_id,
        "temperature": found.temperature, "max_new_tokens": found.max_new_tokens, "seed": found.seed,
        "repeat": found.repeat, "index": index, "position": len(prompt) + index,
        "expected_id": tokens[1], "found_id": tokens[0],
        "logit_gap": _logit_gap(target, rules, [*prompt, *expected.token_ids[:index]], tokens),
        "expected_gap": gap(expected), "found_gap": gap(found), "unit": "nats",
    }  # fmt: skip


def _logit_gap(
    target: TargetModel, rules: SamplingRules, prefix: Sequence[int], tokens: Sequence[int | None]
) -> float | None:
    """The expected token's processed logit less that of the token found."""
    found, expected = tokens
    if found is None or expected is None:
        return None
    text = np.array([*prefix, expected], dtype=np.int64)
    row = next(iter(target.teacher_force(text, len(prefix)))).batch()
    scores = rules.process(torch.from_numpy(text[:-1])[None].to(row.device), row)[0]
    return _finite(float(scores[expected] - scores[found]))


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None
