"""Fitted weights on disk: arrays in safetensors, and a JSON header that says what they were fitted for."""

import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from treegraft.errors import ComposeError

AUTO = "auto"
Arrays = Mapping[str, NDArray[Any]]
Header = Mapping[str, Any]


def save(path: Path, arrays: Arrays, header: Header) -> None:
    """Write to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(whole, part, {"treegraft": json.dumps(header)})
    part.replace(path)


def read_header(path: Path) -> dict[str, Any]:
    """The header alone.

    Raises:
        ValueError: no such file, or not one of ours.
    """
    try:
        with safe_open(path, "numpy") as file:
            header = json.loads((file.metadata() or {})["treegraft"])
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no fitted weights ({type(error).__name__}: {error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: no fitted weights (a header that is no mapping)")
    return header


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file whose header was read.

    Raises:
        ValueError: a number in them is none.
    """
    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{path}: {name} holds what is no finite number")
    return arrays


def versions() -> dict[str, str]:
    """Of treegraft and what weights rest on, for their header."""
    return {name: metadata.version(name) for name in ("treegraft", "torch", "numpy")}


@attrs.frozen
class Shelf:
    """Where weights of one kind lie, and which of them suit a pipeline.

    Attributes:
        where: the key that names them, for errors.
        folder: of those that ship.
        command: what makes them.
    """

    where: str
    folder: Path
    command: str

    def choose(self, weights: str, unfit: Callable[[Header], str | None]) -> tuple[Path | None, str | None]:
        """The file of weights to use, or None and why not.

        Args:
            weights: "auto", a name of shipped weights or a file.
            unfit: of a header, why the weights do not suit the pipeline, or None.

        Raises:
            ComposeError: named weights that are not there or do not suit the pipeline.
        """
        shipped = {path.stem: path for path in sorted(self.folder.glob("*.safetensors"))}
        if weights == AUTO:
            unfitting: dict[str, list[str]] = {}
            for name, path in shipped.items():
                reason = unfit(read_header(path))
                if reason is None:
                    return path, None
                unfitting.setdefault(reason, []).append(name)
            said = "; ".join(f"{', '.join(names)} are {reason}" for reason, names in unfitting.items())
            return None, f"no weights that ship fit{f' ({said})' if said else ''}; {self.command} makes some"
        path = shipped.get(weights, Path(weights))
        try:
            reason = unfit(read_header(path))
        except ValueError as error:
            raise ComposeError(
                self.where, str(error),
                f"Allowed: auto, a file made by {self.command}, or shipped weights: {', '.join(shipped) or 'none'}.",
            ) from error  # fmt: skip
        if reason is not None:
            raise ComposeError(
                self.where, f"{weights!r}: {reason}", None, f"Fit some with {self.command}, or write weights: auto."
            )
        return path, None
