"""A folder of arrays that take long to make: one file a part, each whole or not there, none made twice.

Whatever stops the making, at whatever moment, the same command goes on with it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.errors import RequestError
from treegraft.pipeline import Pipeline
from treegraft_plugins.costs import FixedCosts

Arrays = dict[str, NDArray[Any]]
Progress = Callable[[str, int, int], None]
MANIFEST, COSTS = "manifest.json", "costs.json"
VALIDATION = 8  # every so many prompts, one is kept from a fit


@attrs.frozen
class Text:
    """A prompt to continue.

    Attributes:
        id: of the prompt.
        category: the kind of text.
        token_ids: [P].
    """

    id: str
    category: str
    token_ids: tuple[int, ...]


def kept_apart(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to fit to, and every eighth, which is kept from the fit to choose by.

    Raises:
        RequestError: too few prompts.
    """
    fitting = [text for number, text in enumerate(texts) if number % VALIDATION]
    if not fitting:
        raise RequestError("--prompts", f"{len(texts)} prompts", "Allowed: at least two.")
    return fitting, list(texts[::VALIDATION])


def texts_hash(texts: Sequence[Text]) -> str:
    """A hash over ids, kinds and tokens of all texts, in order."""
    content = json.dumps([attrs.asdict(text) for text in texts])
    return hashlib.sha256(content.encode()).hexdigest()


def cell_name(text: Text, temperature: float) -> str:
    """A file name for (text, temperature): ids may hold anything."""
    return f"{hashlib.sha256(text.id.encode()).hexdigest()[:16]}-t{temperature:g}"


def kept_costs(pipeline: Pipeline, folder: Path) -> FixedCosts:
    """The pipeline's latencies when the folder was begun: what is modelled there is modelled by one table."""
    path = folder / COSTS
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(pipeline.costs.table()) + "\n")
    return FixedCosts(**json.loads(path.read_text()))


@attrs.frozen
class Collection:
    """Parts of arrays, by name.

    Attributes:
        folder: where they lie.
        settings: all that they depend on; a folder made with others is refused.
    """

    folder: Path
    settings: Mapping[str, Any]

    def parts(self, what: str, names: Sequence[str], make: Callable[[int], Arrays], progress: Progress) -> list[Arrays]:
        """All parts, in order; those that are missing are made.

        Args:
            what: is being done, for `progress`.
            names: file names without suffix.
            make: of a part's index.
            progress: called with (what is being done, how much is done, how much there is).

        Raises:
            RequestError: the folder was made with other settings.
        """
        self._check()
        found = []
        for number, name in enumerate(names):
            progress(what, number, len(names))
            path = self.folder / f"{name}.npz"
            if not path.exists():
                part = self.folder / f"{name}.part"
                with part.open("wb") as file:
                    np.savez_compressed(file, **make(number))
                part.replace(path)
            with np.load(path) as saved:
                found.append(dict(saved))
        progress(what, len(names), len(names))
        return found

    def _check(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path, here = self.folder / MANIFEST, json.loads(json.dumps(self.settings))
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_text(json.dumps(here, indent=1) + "\n")
            part.replace(path)
            return
        there = json.loads(path.read_text())
        differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        if differing:
            key = differing[0]
            raise RequestError(
                f"{path}: {key}", f"{there.get(key)!r:.99}; now {here.get(key)!r:.99}",
                "A folder holds what one command made.", "Take another --out, or the options it was begun with.",
            )  # fmt: skip
