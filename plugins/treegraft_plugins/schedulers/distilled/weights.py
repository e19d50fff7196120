"""Fitted weights on disk: safetensors with a JSON header that says what they were fitted for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from treegraft_plugins.schedulers.distilled.fit import Predictor, ValueSystem
from treegraft_plugins.schedulers.distilled.networks import Networks, Normaliser
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES

FORMAT = 1
SHIPPED = Path(__file__).parent / "weights"


@attrs.frozen
class Header:
    """What weights were fitted for.

    Attributes:
        signals: tree signals that they read.
        steps: D.
        pairs: (target, middle), by name, of the models whose rounds they were fitted to.
        vocab_sizes: V of those targets.
        ratios: smallest and largest t_target / t_middle.
        width, max_nodes: W of the middle and B.
        ablation: what was left out on purpose, None for weights that `auto` may take.
        versions: of treegraft and what it rests on, when they were made.
        format: of this file.
    """

    signals: tuple[str, ...]
    steps: int
    pairs: tuple[tuple[str, str], ...]
    vocab_sizes: tuple[int, ...]
    ratios: tuple[float, float]
    width: int
    max_nodes: int
    ablation: str | None
    versions: Mapping[str, str]
    format: int = FORMAT

    def as_json(self) -> str:
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Header":
        """Raises ValueError where the text is no such header."""
        try:
            said = json.loads(text)
            header = cls(
                signals=tuple(said["signals"]),
                steps=int(said["steps"]),
                pairs=tuple((str(target), str(middle)) for target, middle in said["pairs"]),
                vocab_sizes=tuple(map(int, said["vocab_sizes"])),
                ratios=(float(said["ratios"][0]), float(said["ratios"][1])),
                width=int(said["width"]),
                max_nodes=int(said["max_nodes"]),
                ablation=said["ablation"],
                versions=dict(said["versions"]),
                format=int(said["format"]),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"its header lacks {error}") from error
        if header.format != FORMAT:
            raise ValueError(f"format {header.format}; this version reads format {FORMAT}")
        unknown = set(header.signals) - set(CANDIDATES)
        if unknown:
            raise ValueError(f"signals {sorted(unknown)}, which this version does not know")
        return header


@attrs.frozen(eq=False)
class Weights:
    """A predictor, the value system behind it where it was kept, and what they were fitted for."""

    header: Header
    predictor: Predictor
    value: ValueSystem | None = None

    def save(self, path: Path) -> None:
        """Write to `path`, whole or not at all."""
        arrays = {f"predictor.{name}": array for name, array in self.predictor.weights.items()}
        arrays |= _normaliser("predictor", self.predictor.normaliser)
        if self.value is not None:
            arrays |= _normaliser("value", self.value.normaliser) | {"value.scale": self.value.scale}
            for action in ("skip", "call"):
                layers = getattr(self.value, action).layers
                arrays |= {f"value.{action}.{name}": layer.numpy() for name, layer in layers.items()}
        part = path.with_name(path.name + ".part")
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, part, {"treegraft": self.header.as_json()})
        part.replace(path)


def read_header(path: Path) -> Header:
    """The header alone.

    Raises:
        ValueError: no such file, or not one of ours.
    """
    try:
        with safe_open(path, "numpy") as file:
            return Header.from_json((file.metadata() or {})["treegraft"])
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no fitted weights ({type(error).__name__}: {error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_weights(path: Path) -> Weights:
    """Everything in a file of weights.

    Raises:
        ValueError: no such file, or not one of ours.
    """
    header = read_header(path)
    with safe_open(path, "numpy") as file:
        arrays: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    predictor = Predictor(
        header.signals,
        header.steps,
        Normaliser(arrays["predictor.mean"], arrays["predictor.std"]),
        {name: arrays[f"predictor.{name}"] for name in ("w1", "b1", "w2", "b2", "w3", "b3")},
    )
    if "value.scale" not in arrays:
        return Weights(header, predictor)
    heads = [
        Networks({name.rpartition(".")[2]: torch.from_numpy(array) for name, array in arrays.items() if action in name})
        for action in ("value.skip.", "value.call.")
    ]
    normaliser = Normaliser(arrays["value.mean"], arrays["value.std"])
    return Weights(
        header, predictor, ValueSystem(header.signals, header.steps, normaliser, arrays["value.scale"], *heads)
    )


def _normaliser(prefix: str, normaliser: Normaliser) -> dict[str, NDArray[Any]]:
    return {f"{prefix}.mean": normaliser.mean, f"{prefix}.std": normaliser.std}
