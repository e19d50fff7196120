"""Fitted weights on disk: safetensors with a JSON header that says what they were fitted for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from numpy.typing import NDArray

from treegraft_plugins import fitted
from treegraft_plugins.fitted import read_arrays
from treegraft_plugins.schedulers.distilled.fit import Predictor, ValueSystem
from treegraft_plugins.schedulers.distilled.networks import Networks, Normaliser
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES

FORMAT = 3
VALUE_ONLINE, ONE_SIGNAL, ALL_SIGNALS = ABLATIONS = ("value_online", "one_signal", "all_signals")
"""What is fitted beside the whole system, to see what each of its parts is worth."""


@attrs.frozen
class Header:
    """What weights were fitted for.

    Attributes:
        signals: tree signals that they read.
        steps: D.
        pairs: (target, middle), by name, of the models whose rounds they were fitted to.
        small: the name of the small source's model, "" of a lookup.
        vocab_sizes: V of those targets.
        ratios: smallest and largest t_target / t_middle.
        width, max_nodes: W of the middle and B.
        ablation: one of `ABLATIONS`, None for the whole system.
        versions: of treegraft and what it rests on, when they were made.
        format: of this file.
    """

    signals: tuple[str, ...]
    steps: int
    pairs: tuple[tuple[str, str], ...]
    small: str
    vocab_sizes: tuple[int, ...]
    ratios: tuple[float, float]
    width: int
    max_nodes: int
    ablation: str | None
    versions: Mapping[str, str]
    format: int = FORMAT

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Header":
        """Raises ValueError where an object is no such header."""
        try:
            header = cls(
                signals=tuple(said["signals"]),
                steps=int(said["steps"]),
                pairs=tuple((str(target), str(middle)) for target, middle in said["pairs"]),
                small=str(said["small"]),
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
        arrays = predictor_arrays(self.predictor)
        if self.value is not None:
            arrays |= value_arrays(self.value)
        fitted.save(path, arrays, attrs.asdict(self.header))


def predictor_arrays(predictor: Predictor, prefix: str = "predictor") -> dict[str, NDArray[Any]]:
    """What a predictor holds, by name."""
    arrays = {f"{prefix}.{name}": array for name, array in predictor.weights.items()}
    return arrays | _normaliser(prefix, predictor.normaliser)


def predictor_of(
    arrays: Mapping[str, NDArray[Any]], signals: tuple[str, ...], steps: int, prefix: str = "predictor"
) -> Predictor:
    """The predictor that these arrays were held by."""
    normaliser = Normaliser(arrays[f"{prefix}.mean"], arrays[f"{prefix}.std"])
    layers = {name: arrays[f"{prefix}.{name}"] for name in ("w1", "b1", "w2", "b2", "w3", "b3")}
    return Predictor(signals, steps, normaliser, layers)


def value_arrays(value: ValueSystem) -> dict[str, NDArray[Any]]:
    """What a value system holds, by name."""
    arrays = _normaliser("value", value.normaliser) | {"value.scale": value.scale}
    for action in ("skip", "call"):
        layers = getattr(value, action).layers
        arrays |= {f"value.{action}.{name}": layer.numpy() for name, layer in layers.items()}
    return arrays


def value_of(arrays: Mapping[str, NDArray[Any]], signals: tuple[str, ...], steps: int) -> ValueSystem:
    """The value system that these arrays were held by."""
    heads = [
        Networks({name.rpartition(".")[2]: torch.from_numpy(array) for name, array in arrays.items() if action in name})
        for action in ("value.skip.", "value.call.")
    ]
    normaliser = Normaliser(arrays["value.mean"], arrays["value.std"])
    return ValueSystem(signals, steps, normaliser, arrays["value.scale"], *heads)


def read_header(path: Path) -> Header:
    """The header alone.

    Raises:
        ValueError: no such file, or not one of ours.
    """
    said = fitted.read_header(path)
    try:
        return Header.of(said)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_weights(path: Path) -> Weights:
    """Everything in a file of weights.

    Raises:
        ValueError: no such file, or not one of ours.
    """
    header = read_header(path)
    arrays = read_arrays(path)
    predictor = predictor_of(arrays, header.signals, header.steps)
    value = value_of(arrays, header.signals, header.steps) if "value.scale" in arrays else None
    return Weights(header, predictor, value)


def _normaliser(prefix: str, normaliser: Normaliser) -> dict[str, NDArray[Any]]:
    return {f"{prefix}.mean": normaliser.mean, f"{prefix}.std": normaliser.std}
