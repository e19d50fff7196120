"""What a training keeps in its folder, and whether that is what is asked for now."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from treegraft.errors import RequestError, TreeGraftError

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


@contextlib.contextmanager
def damaged(file: Path) -> Iterator[None]:
    """Whatever goes wrong while a kept file is read, as an error that says which one it is."""
    try:
        yield
    except TreeGraftError:
        raise
    except Exception as error:
        raise RequestError(
            str(file), f"damaged ({type(error).__name__})", "Allowed: what the same command wrote.",
            "Delete it: what it held is made anew.",
        ) from error  # fmt: skip
