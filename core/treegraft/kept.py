"""Files that commands keep: written whole or not at all, and named when they cannot be read."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from treegraft.errors import RequestError, TreeGraftError


def write_whole(path: Path, content: str) -> None:
    """Write a text file in one go, so that an interruption leaves the old one or the new one."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(content, encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def damaged(file: Path, action: str = "Delete it: what it held is made anew.") -> Iterator[None]:
    """Whatever goes wrong while a kept file is read, as an error that says which one it is, and what to do."""
    try:
        yield
    except TreeGraftError:
        raise
    except Exception as error:  # each reader has errors of its own
        raise RequestError(
            str(file), f"damaged ({type(error).__name__})", "Allowed: what the same command wrote.", action
        ) from error
