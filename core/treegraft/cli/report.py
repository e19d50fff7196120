"""A finished generation for a reader: the lines on stderr, and the object of `--json`."""

import json
from collections.abc import Mapping
from typing import Any

from treegraft.pipeline import Generation

JSON_KEYS = (
    "text", "token_ids", "num_new_tokens", "finish_reason", "num_rounds", "emitted_per_round", "accepted_per_round",
    "accepted_histogram", "target_calls", "source_calls", "latency_ms", "tokens_per_second", "lossless",
    "repeats_plain", "lossless_note", "seed", "sampling", "costs", "faults",
)  # fmt: skip
RECORDED = ("max_new_tokens", "temperature", "top_p", "top_k")
"""Options of a request that `sampling` of the object holds: what its text is audited under."""


def as_json(generation: Generation, sampling: Mapping[str, Any]) -> str:
    """One JSON object, keys as in `JSON_KEYS`; `sampling` are the request's options."""
    values = {key: getattr(generation, key) for key in JSON_KEYS if key not in ("num_new_tokens", "sampling")}
    values["num_new_tokens"] = len(generation.token_ids)
    values["sampling"] = {name: sampling[name] for name in RECORDED}
    return json.dumps({key: values[key] for key in JSON_KEYS}, allow_nan=False)


def summary(generation: Generation, sampled: bool) -> str:
    """A few lines: tokens and speed, rounds, calls, where the time went, and what is guaranteed."""
    latency_ms = generation.latency_ms
    calls = {"target": generation.target_calls, **generation.source_calls}
    lines = [
        f"{len(generation.token_ids)} tokens in {latency_ms['total'] / 1e3:.2f} s "
        f"({generation.tokens_per_second:.1f} tokens/s), ended by {generation.finish_reason}",
        f"{generation.num_rounds} rounds: {generation.emitted_per_round:.2f} emitted, "
        f"{generation.accepted_per_round:.2f} accepted a round",
        "calls: " + ", ".join(f"{name} {count}" for name, count in calls.items()),
        "time: " + ", ".join(f"{part} {share:.0%}" for part, share in time_shares(latency_ms).items()),
    ]
    if sampled:
        lines.append(f"seed: {generation.seed}")
    lines.append(f"lossless: {'yes' if generation.lossless else 'no'}")
    if generation.lossless_note:
        lines[-1] += f" ({generation.lossless_note})"
    return "\n".join(lines)


def time_shares(latency_ms: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the total time by part, the sources among them."""
    own = {name: ms for name, ms in latency_ms.items() if name not in ("sources", "total")}
    total = latency_ms["total"] or 1.0
    return {part: ms / total for part, ms in (own | latency_ms["sources"]).items()}
