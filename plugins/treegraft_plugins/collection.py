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
from treegraft.kept import damaged, write_whole
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


def require_apart(texts: Sequence[Text], held_out: Sequence[Text]) -> None:
    """Refuse held-out texts that are fitted to.

    Raises:
        RequestError: naming the first.
    """
    fitted_to = {text.token_ids for text in texts}
    for text in held_out:
        if text.token_ids in fitted_to:
            raise RequestError(
                "--held-out", f"the prompt {text.id!r}, which is among --prompts too", "Allowed: prompts of its own."
            )


def texts_hash(texts: Sequence[Text]) -> str:
    """A hash over ids, kinds and tokens of all texts, in order."""
    content = json.dumps([attrs.asdict(text) for text in texts])
    return hashlib.sha256(content.encode()).hexdigest()


def cell_name(text: Any, temperature: float) -> str:
    """A file name for (text, temperature): ids may hold anything, and may be those of another file's texts too."""
    content = json.dumps(attrs.asdict(text))
    return f"{hashlib.sha256(content.encode()).hexdigest()[:16]}-t{temperature:g}"


def claim(folder: Path, command: str) -> None:
    """Make a folder the one of a command, whose files are written over by that command alone.

    Raises:
        RequestError: it holds something else.
    """
    path = folder / MANIFEST
    if not folder.is_dir() or not any(folder.iterdir()):
        agree(path, {"command": command})
        return
    with damaged(path, "Delete the whole folder."):
        owner = json.loads(path.read_text()).get("command") if path.exists() else None
    if owner != command:
        raise RequestError(
            str(folder), "a folder that holds something else", f"Allowed: a new or empty one, or one of {command}."
        )


def agree(path: Path, settings: Mapping[str, Any]) -> None:
    """Write a folder's settings to `path`, or see that those there are the same.

    Raises:
        RequestError: they differ, or cannot be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    here = json.loads(json.dumps(settings))
    if not path.exists():
        write_whole(path, json.dumps(here, indent=1) + "\n")
        return
    with damaged(path, "Delete the whole folder."):
        there = dict(json.loads(path.read_text()))
    differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if differing:
        key = differing[0]
        raise RequestError(
            f"{path}: {key}", f"{there.get(key)!r:.99}; now {here.get(key)!r:.99}",
            "A folder holds what one command made.", "Take another --out, or the options it was begun with.",
        )  # fmt: skip


def kept_costs(pipeline: Pipeline, folder: Path, given: Path | None) -> FixedCosts:
    """The pipeline's latencies when the folder was begun: what is modelled there is modelled by one table.

    Args:
        pipeline: loaded.
        folder: a command's own.
        given: the file that the pipeline's table is from, or None where it was measured.

    Raises:
        RequestError: a target costs nothing, the folder was begun with another table than the one given, or its own
            is damaged.
    """
    path, table = folder / COSTS, pipeline.costs.table()
    if not FixedCosts(**table).target_ms(1, 0) > 0:
        raise RequestError(str(given or "costs"), "a target that costs nothing", "Allowed: latencies > 0.")
    if not path.exists():
        write_whole(path, json.dumps(table) + "\n")
    with damaged(path):
        there = FixedCosts(**json.loads(path.read_text()))
    if given is not None and there.table() != FixedCosts(**table).table():
        raise RequestError(
            f"--costs {given}", f"another table than {path}, which the folder was begun with",
            "A folder holds what one command made.", "Take another --out.",
        )  # fmt: skip
    return there


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
        agree(self.folder / MANIFEST, self.settings)
        found = []
        for number, name in enumerate(names):
            progress(what, number, len(names))
            path = self.folder / f"{name}.npz"
            if not path.exists():
                part = self.folder / f"{name}.part"
                with part.open("wb") as file:
                    np.savez_compressed(file, **make(number))
                part.replace(path)
            with damaged(path), path.open("rb") as content, np.load(content) as saved:
                found.append(dict(saved))
        progress(what, len(names), len(names))
        return found
