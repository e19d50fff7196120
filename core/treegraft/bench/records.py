"""What a benchmark writes down: a Record for every finished request, and the files of a run folder.

While a run is under way a Record is a line of `records.jsonl`, written as soon as its request is over; a run that has
finished keeps all of them in `records.parquet` instead.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import attrs

from treegraft.errors import RequestError
from treegraft.kept import damaged, write_whole

MANIFEST = "manifest.json"
SUMMARY = "summary.json"
LINES = "records.jsonl"
TABLE = "records.parquet"
DIVERGENCES = "divergences.jsonl"
PACKAGES = ("pyarrow", "matplotlib")
NUM_BINS = 10
"""Bins of a calibration: equal parts of [0, 1]."""


@attrs.frozen
class Round:
    """One decode round: a forward of the target and what came of it.

    Attributes:
        emitted: tokens emitted.
        accepted: draft tokens among them.
        verified: nodes of the verified tree below its root; for transformers, candidates in the forward.
        drafted: nodes of the tree before pruning, below its root; for transformers, candidates drafted.
        followed: how deep the tree before pruning followed the emitted tokens, or None.
        accepted_by_source: accepted tokens by the source that proposed them first; empty where an arm cannot tell.
        source_calls: drafting steps by source.
        ms: where the time went (ms): schedule, draft, build, target, verify, commit, learn; empty likewise.
        source_ms: `draft` by source (ms).
    """

    emitted: int
    accepted: int
    verified: int
    drafted: int
    followed: int | None = None
    accepted_by_source: dict[str, int] = attrs.field(factory=dict)
    source_calls: dict[str, int] = attrs.field(factory=dict)
    ms: dict[str, float] = attrs.field(factory=dict)
    source_ms: dict[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Record:
    """One request of one arm.

    Attributes:
        arm: its name; `plain (again)` is the second plain arm.
        prompt_id, category, file: of the prompt.
        temperature, max_new_tokens, seed: of the request; repeat r of a run with seed s has seed s + r.
        repeat: from 0.
        order: place among the arms of this prompt, temperature, length and repeat, from 0.
        num_prompt_tokens: tokens of the prompt.
        token_ids: the new tokens, up to and including EOS, by the counter that all arms share.
        num_new_tokens: their number.
        finish_reason: "eos" or "length".
        prefill_ms: the arm's own prefill (ms), or None where it cannot tell.
        total_ms: prompt ids in, new ids out, by the clock that all arms share (ms).
        num_prefill_tokens: new tokens that the prefill brought: a transformers arm's ends with its first forward, and
            that brings the first token.
        rounds: in order, or None where the arm cannot tell.
        num_copied: accepted tokens that a drafter without a network proposed first, or None.
        by_depth: for depth 1, 2, ...: [rounds in which the verified tree had a child at that depth below the emitted
            path, rounds in which one was accepted]; None where the arm cannot tell.
        calibration: by the source that scored last, for ten equal bins of exp(edge_score): [count, sum of
            exp(edge_score), accepted] over the children of nodes on the emitted path, before pruning; None likewise.
        settings_read_back: what the request ran with, read from the live objects.
        drafted_nothing: no draft token was verified in the whole request.
        faults: {"source", "error"} of each drafter that failed and was left out.
        costs: the cost table in use at the end, of our arms.
        cpu_load: the machine's load over the last minute, divided by its cores, before the request; None where the
            system does not say.
        text_ok: the same ids as the arm that all must equal; None where nothing is to be compared. Known at the end.
        problems: what the harness found wrong with this request; any makes the run invalid.
    """

    arm: str
    prompt_id: str
    category: str
    file: str
    temperature: float
    max_new_tokens: int
    seed: int
    repeat: int
    order: int
    num_prompt_tokens: int
    token_ids: list[int]
    num_new_tokens: int
    finish_reason: str
    prefill_ms: float | None
    total_ms: float
    num_prefill_tokens: int = 0
    rounds: list[Round] | None = None
    num_copied: int | None = None
    by_depth: list[list[int]] | None = None
    calibration: dict[str, list[list[float]]] | None = None
    settings_read_back: dict[str, Any] = attrs.field(factory=dict)
    drafted_nothing: bool = False
    faults: list[dict[str, str]] = attrs.field(factory=list)
    costs: dict[str, Any] | None = None
    cpu_load: float | None = None
    text_ok: bool | None = None
    problems: list[str] = attrs.field(factory=list)

    @property
    def cell(self) -> tuple[str, str, float, int, int]:
        """What the arms that are compared have in common: file, prompt, temperature, length, repeat."""
        return self.file, self.prompt_id, self.temperature, self.max_new_tokens, self.repeat


_JSON_COLUMNS = ("calibration", "settings_read_back", "faults", "costs")  # their keys differ from record to record


def record_from(values: Mapping[str, Any]) -> Record:
    """A Record from what `attrs.asdict` makes of it."""
    rounds = values["rounds"]
    return Record(**{**values, "rounds": None if rounds is None else [Round(**each) for each in rounds]})


def append_record(file: TextIO, record: Record) -> None:
    """Add a line to an open `records.jsonl`; it is on its way to the disk when this returns."""
    file.write(json.dumps(attrs.asdict(record), allow_nan=False) + "\n")
    file.flush()


def read_records(folder: Path) -> list[Record]:
    """The Records of a run, finished or under way, in the order in which they were made.

    A last line that an interruption cut short is left out.

    Raises:
        RequestError: they cannot be read.
    """
    path = folder / (TABLE if (folder / TABLE).exists() else LINES)
    with damaged(path, "Run it again, into a new folder."):
        if path.name == TABLE:
            return _read_table(path)
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [record_from(json.loads(line)) for line in lines]


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """Put all Records into `records.parquet`; nested columns keep their form, save those whose keys vary, as JSON."""
    require_packages()
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [attrs.asdict(record) for record in records]
    for row in rows:
        row.update({name: json.dumps(row[name]) for name in _JSON_COLUMNS})
        for each in row["rounds"] or ():
            each.update({name: list(each[name].items()) for name in _MAPS})
    partial = folder / f"{TABLE}.part"
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), partial, compression="zstd")
    partial.replace(folder / TABLE)


def _read_table(path: Path) -> list[Record]:
    require_packages()
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row.update({name: json.loads(row[name]) for name in _JSON_COLUMNS})
        for each in row["rounds"] or ():
            each.update({name: dict(each[name]) for name in _MAPS})
    return [record_from(row) for row in rows]


_MAPS = ("accepted_by_source", "source_calls", "ms", "source_ms")  # of a Round


def _schema() -> Any:
    """The columns of `records.parquet`: the fields of Record, in order."""
    import pyarrow as pa

    counts, latencies = pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.float64())
    types: dict[Any, Any] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    a_round = pa.struct(
        [
            *((name, pa.int64()) for name in ("emitted", "accepted", "verified", "drafted", "followed")),
            ("accepted_by_source", counts), ("source_calls", counts), ("ms", latencies), ("source_ms", latencies),
        ]
    )  # fmt: skip
    nested = {
        "token_ids": pa.list_(pa.int64()),
        "prefill_ms": pa.float64(),
        "rounds": pa.list_(a_round),
        "num_copied": pa.int64(),
        "by_depth": pa.list_(pa.list_(pa.int64())),
        "cpu_load": pa.float64(),
        "text_ok": pa.bool_(),
        "problems": pa.list_(pa.string()),
        **dict.fromkeys(_JSON_COLUMNS, pa.string()),
    }
    return pa.schema([(field.name, nested.get(field.name) or types[field.type]) for field in attrs.fields(Record)])


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a run was asked for, and what it ran on.

    Raises:
        RequestError: the folder holds no run.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"arms", "settings", "complete"} <= set(manifest):
            raise ValueError
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(
            str(folder),
            f"no readable {MANIFEST} ({type(error).__name__})",
            "Allowed: a folder that treegraft bench wrote.",
        ) from error
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest in one go, so that an interruption leaves the old one or the new one."""
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def read_divergences(folder: Path) -> list[dict[str, Any]]:
    """Where texts differ that should not: one object a divergence, none for a run without any."""
    path = folder / DIVERGENCES
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def require_packages(packages: Sequence[str] = PACKAGES) -> None:
    """Refuse to begin what would fail at the end.

    Raises:
        RequestError: a package of the extra `bench` is missing.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise RequestError(
            "treegraft bench", f"it needs the package {missing[0]}", None,
            'Install the extra: pip install "treegraft[bench]".',
        )  # fmt: skip
