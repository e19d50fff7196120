"""What tells models, texts and settings apart, for folders that keep what was made of them."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

_NUM_ENTRIES = 256  # of each weight: training moves every one of them


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Tells models apart by what is in them, wherever they lie: the first entries of each weight."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(name.encode() + weight.flatten()[:_NUM_ENTRIES].float().cpu().numpy().tobytes())
    return _shown(digest)


def text_fingerprint(texts: Iterable[str]) -> str:
    """Tells texts apart by what stands in them."""
    return _shown(hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")))


def _shown(digest: "hashlib._Hash") -> str:
    return f"sha256:{digest.hexdigest()[:16]}"


def asked_otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """What is now asked for and was something else before, in words by name: `gamma 2.0, asked for 4.0`.

    Args:
        before: read from JSON.
        now: what JSON can hold.
    """
    told = json.loads(json.dumps(now))
    return {
        name: f"{name} {before.get(name)}, asked for {value}"
        for name, value in told.items()
        if before.get(name) != value
    }
