"""Collecting replayed rounds: plain continuations, each replayed under all schedules, one file each.

Along a continuation rounds follow schedules drawn at random. Where one begins, all schedules are replayed, with the
calibration and the caches that the rounds before have left: what a live run finds there.

A folder of them holds `manifest.json`, what everything in it was made with, and `parts/`, a Parquet file for each
(prompt, temperature). A part is written whole or not at all, and a part that is there is never made again: a collection
may be killed at any moment and goes on where it stood.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.errors import RequestError
from treegraft.interfaces import RoundState, Source
from treegraft.kept import damaged, write_whole
from treegraft.pipeline import Pipeline
from treegraft.replay.recording import Recording, record, reference_path, wants_of
from treegraft.replay.schedules import Follow, Label, Prefix, check_schedules, schedules
from treegraft.sampling import SamplingOptions
from treegraft_plugins.collection import cell_name
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.schedulers.distilled import trajectories
from treegraft_plugins.schedulers.distilled.fit import Setup
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES, tree_signals
from treegraft_plugins.schedulers.distilled.trajectories import BUDGETS, MAX_RANKS, Rounds

MANIFEST, PARTS = "manifest.json", "parts"
FORMAT = 2
FREE = FixedCosts()
"""What rounds are replayed under, for no label to depend on costs: all of B is verified."""
Progress = Callable[[str, int, int], None]


@attrs.frozen
class Text:
    """A prompt to continue.

    Attributes:
        id: of the prompt.
        dataset: what its rounds are grouped by, together with the pair.
        category: for results by kind of text.
        token_ids: the prompt's.
    """

    id: str
    dataset: str
    category: str
    token_ids: tuple[int, ...]


@attrs.frozen
class Manifest:
    """What a collection was made with; two that differ cannot share a folder.

    Attributes:
        target, middle, small: names of the models; a lookup's is "".
        vocab_size: V.
        setup: names and sizes that decisions and costs depend on.
        pipeline: whatever else labels depend on: `sources`, `pruner` and `calibration`, as the registry has them.
        steps: D.
        max_new_tokens, every, temperatures, seed: of the continuations, and how many rounds apart prefixes lie.
        signals: the candidates, in order.
        prompts: a hash over all prompts.
        costs: the latencies measured on the machine (arguments of the cost model `fixed`).
        models: what was loaded, by name, and a digest of what was in it.
        num_parts: continuations of a whole collection.
        versions: of treegraft and what it rests on.
        format: of the parts.
    """

    target: str
    middle: str
    small: str
    vocab_size: int
    setup: Setup
    pipeline: dict[str, Any]
    steps: int
    max_new_tokens: int
    every: int
    temperatures: tuple[float, ...]
    seed: int
    signals: tuple[str, ...]
    prompts: str
    costs: dict[str, Any]
    versions: dict[str, str]
    models: dict[str, Any] = attrs.field(factory=dict)
    num_parts: int = 0
    format: int = FORMAT

    @property
    def pair(self) -> str:
        """Target and middle."""
        return f"{self.target} + {self.middle}"

    @property
    def cost_model(self) -> FixedCosts:
        """The measured table."""
        return FixedCosts(**self.costs)

    def save(self, folder: Path) -> None:
        """Write it, or see that the folder's own says the same.

        Raises:
            RequestError: the folder holds another collection.
        """
        path = folder / MANIFEST
        if not path.exists():
            write_whole(path, json.dumps(attrs.asdict(self), indent=1) + "\n")
            return
        there = read_manifest(folder)
        # Costs are measured anew and versions may move.
        found = self.difference(there, [name for name in attrs.asdict(self) if name not in ("costs", "versions")])
        if found is not None:
            name, now, then = found
            raise RequestError(
                f"{path}: {name}", f"{then!r:.99}; now {now!r:.99}", "A folder holds one collection.",
                "Take another --out, or the options it was begun with.",
            )  # fmt: skip

    def difference(self, other: "Manifest", names: Collection[str]) -> tuple[str, Any, Any] | None:
        """The first difference to another manifest in the fields of `names`: its path, and what each says."""
        mine, its = (dict(_flat(attrs.asdict(each))) for each in (self, other))
        for path in mine | its:
            if path.partition(".")[0] in names and mine.get(path) != its.get(path):
                return path, mine.get(path), its.get(path)
        return None


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings by their paths, joined by dots."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{path}.{key}" if path else key)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a collection.

    Raises:
        RequestError: there is none, or none that this version reads.
    """
    path = folder / MANIFEST
    try:
        said = json.loads(path.read_text())
        lists = {name: tuple(said[name]) for name in ("temperatures", "signals")}
        manifest = Manifest(**(said | lists | {"setup": Setup(**said["setup"])}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RequestError(
            str(path),
            f"no collection ({type(error).__name__}: {error})",
            "Allowed: a folder made by treegraft fit collect.",
        ) from error
    if manifest.format != FORMAT or manifest.signals != tuple(CANDIDATES):
        raise RequestError(
            str(path), f"format {manifest.format}", f"This version reads format {FORMAT}.", "Collect anew."
        )
    return manifest


def prompts_hash(texts: Sequence[Text]) -> str:
    """A hash over ids and tokens of all prompts, in order."""
    content = json.dumps([[text.id, text.dataset, text.category, text.token_ids] for text in texts])
    return hashlib.sha256(content.encode()).hexdigest()


def collect(
    live: Pipeline, replayed: Pipeline, texts: Sequence[Text], manifest: Manifest, folder: Path, progress: Progress
) -> None:
    """Make every part that is not there yet.

    Args:
        live: the pipeline with its real target.
        replayed: the same one with a ReplayTarget and fixed costs.
        texts: the prompts.
        manifest: what the collection is made with.
        folder: where it goes.
        progress: called with (what is being done, how much is done, how much there is).

    Raises:
        RequestError: the folder holds another collection, or there are too many schedules.
    """
    names = (manifest.setup.small, manifest.setup.middle)
    check_schedules(replayed, sources=names, follow=lambda number: names[:1] * manifest.steps)
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    manifest.save(folder)
    every = [(text, temperature) for text in texts for temperature in manifest.temperatures]
    todo = [each for each in every if not _part(folder, *each).exists()]
    for number, (text, temperature) in enumerate(todo, len(every) - len(todo)):
        progress("replaying", number, len(every))
        recording = record(
            live.target, text.token_ids, manifest.max_new_tokens, SamplingOptions(temperature), manifest.seed,
            wants_of([replayed]),
        )  # fmt: skip
        write_rounds(
            _part(folder, text, temperature), replayed_rounds(replayed, recording, text, temperature, manifest)
        )
    progress("replaying", len(every), len(every))


def _part(folder: Path, text: Text, temperature: float) -> Path:
    return folder / PARTS / f"{cell_name(text, temperature)}.parquet"


def replayed_rounds(
    replayed: Pipeline, recording: Recording, text: Text, temperature: float, manifest: Manifest
) -> Rounds:
    """All schedules at the beginning of every `every`-th round of one continuation."""
    setup, names = manifest.setup, (manifest.setup.small, manifest.setup.middle)
    middle = next(source for source in replayed.sources if source.name == setup.middle)
    follow = behaviour(text, temperature, manifest)
    rows = [
        _round(prefix, recording, setup, manifest.steps, middle)
        for prefix in schedules(replayed, recording, sources=names, every=manifest.every, follow=follow)
    ]
    size = len(rows)
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else {}
    return Rounds(
        steps=manifest.steps,
        report=np.array([f"{manifest.pair} x {text.dataset}"] * size),
        category=np.array([text.category] * size),
        temperature=np.full(size, temperature, np.float32),
        num_prompt_tokens=np.full(size, len(recording.prompt), np.int32),
        **columns,
    )


def behaviour(text: Text, temperature: float, manifest: Manifest) -> Follow:
    """The schedules that the rounds of one continuation follow: each of the 2^D is as likely as the others.

    So the prefixes, and what was learnt on the way to them, are those of no schedule in particular.
    """
    key = hashlib.sha256(f"{cell_name(text, temperature)} {manifest.seed}".encode()).digest()
    names = (manifest.setup.small, manifest.setup.middle)
    everything = trajectories.schedules(manifest.steps).astype(int)
    drawn = np.random.default_rng(list(key)).integers(len(everything), size=manifest.max_new_tokens)
    return lambda number: tuple(names[called] for called in everything[drawn[number]])


def _round(prefix: Prefix, recording: Recording, setup: Setup, steps: int, middle: Source) -> dict[str, Any]:
    """The columns of one round that depend on its trees."""
    names = (setup.small, setup.middle)
    flags = [
        tuple(names[called] for called in schedule) for schedule in trajectories.schedules(steps).astype(int).tolist()
    ]
    reference = recording.tokens[prefix.num_emitted :]
    found = [_labels(prefix.labels[schedule], reference, steps, setup.middle) for schedule in flags]
    return {
        "context": np.int32(len(recording.prompt) + prefix.num_emitted),
        "signals": np.array(list(_signals(prefix, setup, steps, middle)), np.float32),
        **{name: np.array([label[name] for label in found]) for name in found[0]},
    }


def _signals(prefix: Prefix, setup: Setup, steps: int, middle: Source) -> Iterator[list[float]]:
    """The candidates before every decision; where growth has ended, those of the last state before."""
    names = (setup.small, setup.middle)
    for history in trajectories.histories(steps):
        taken = tuple(names[called] for called in history)
        state: RoundState | None = None
        while state is None:
            state = prefix.states.get(taken)
            if state is None and not taken:
                yield [0.0] * len(CANDIDATES)  # nobody can draft at all: no decision matters
                break
            taken = taken[:-1]
        else:
            yield tree_signals(state, middle, list(CANDIDATES))


def _labels(label: Label, reference: NDArray[np.int64], steps: int, middle: str) -> dict[str, Any]:
    tree, taken = label.state.tree, label.state.steps
    drafted = np.zeros(steps, np.bool_)
    drafted[: len(taken)] = [len(step.positions) > 0 for step in taken]
    ranked = tree.ranked()
    rank_of = np.empty(len(tree), np.int32)
    rank_of[ranked] = np.arange(len(tree))
    ranks = np.zeros(MAX_RANKS, np.int32)
    path = reference_path(tree, reference)[:MAX_RANKS]
    ranks[: len(path)] = rank_of[path]
    mass = np.cumsum(np.exp(tree.path_score[ranked])) - 1.0
    return {
        "rows": label.num_rows.astype(np.int32),
        "missed": np.int32(label.num_missed[middle][0]),
        "drafted": drafted,
        "num_nodes": np.int32(len(tree) - 1),
        "ranks": ranks,
        "expected": mass[np.minimum(BUDGETS, len(tree) - 1)].astype(np.float32),
    }


# -- on disk ----------------------------------------------------------------------------------------------------------


def write_rounds(path: Path, rounds: Rounds) -> None:
    """Write rounds as one Parquet file, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name in trajectories.COLUMNS:
        array = np.ascontiguousarray(getattr(rounds, name))
        shape = array.shape[1:]
        if not shape:
            columns[name] = pa.array(array)
            continue
        flat = pa.array(array.reshape(-1))
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)))
    metadata = {"steps": str(rounds.steps), "format": str(FORMAT)}
    part = path.with_suffix(".part")
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), part, compression="zstd", compression_level=9)
    part.replace(path)


def read_rounds(path: Path) -> Rounds:
    """Rounds of one Parquet file."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    steps = int((table.schema.metadata or {})[b"steps"])
    shapes = {
        "signals": (trajectories.num_states(steps), len(CANDIDATES)),
        "rows": (2**steps, steps),
        "missed": (2**steps,),
        "drafted": (2**steps, steps),
        "num_nodes": (2**steps,),
        "ranks": (2**steps, MAX_RANKS),
        "expected": (2**steps, len(BUDGETS)),
    }
    columns = {}
    for name in trajectories.COLUMNS:
        column = table[name].combine_chunks()
        if name in shapes:
            columns[name] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, *shapes[name])
        else:
            columns[name] = np.array(column.to_pylist() if name in ("report", "category") else column.to_numpy())
    return Rounds(steps, **columns)


def read_collection(folder: Path) -> tuple[Manifest, Rounds]:
    """Everything that a folder holds.

    Raises:
        RequestError: it holds no collection, or not all of one.
    """
    manifest = read_manifest(folder)
    files = sorted((folder / PARTS).glob("*.parquet"))
    if len(files) < manifest.num_parts:
        raise RequestError(
            str(folder), f"{len(files)} of {manifest.num_parts} continuations", "Allowed: a whole collection.",
            "Run treegraft fit collect to its end.",
        )  # fmt: skip
    parts = []
    for file in files:
        with damaged(file, "Delete it, and run treegraft fit collect again."):
            parts.append(read_rounds(file))
    parts = [rounds for rounds in parts if len(rounds)]
    if not parts:
        raise RequestError(str(folder), "a collection without rounds", None, "Run treegraft fit collect to its end.")
    return manifest, Rounds.joined(parts)
