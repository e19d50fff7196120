"""Where latencies come from: a fixed table, a file, or this machine's own clock."""

import copy
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike

from treegraft.errors import ComposeError
from treegraft.interfaces import DraftRequest, Source, TargetModel, Wants
from treegraft.sampling import ProposalSampler, SamplingRules, SeededDraws, Stream
from treegraft.statistics import CostModel, LatencyCurve
from treegraft.tree import DraftTree, Expansion, Floats, Ints
from treegraft_plugins.options import number, switch

# The ends first, so that a measurement cut short spans the range, and then the second row, which on a CPU may cost as
# much as the first: matrices are multiplied by several rows in another way than by one.
MEASURED_ROWS = (1, 64, 2, 8, 4, 16, 32)
EXPECTED_TOKENS = 256  # the request whose time the measuring is held against
MAX_SHARE = 0.05  # of that request's plain decoding time


def _curve(value: Any) -> LatencyCurve:
    return value if isinstance(value, LatencyCurve) else LatencyCurve.of(value)


def _curves(value: Mapping[str, Any]) -> dict[str, LatencyCurve]:
    return {name: _curve(curve) for name, curve in value.items()}


@attrs.define(eq=False)
class FixedCosts(CostModel):
    """A table that never changes.

    Args:
        target: ms at any size, or a mapping rows -> ms (piecewise linear).
        sources: the same by source name; a source not named costs nothing.
        context_ms: what every 1,024 tokens of context add to a target forward (ms).
    """

    target: LatencyCurve = attrs.field(default=1.0, converter=_curve)
    sources: dict[str, LatencyCurve] = attrs.field(factory=dict, converter=_curves)
    context_ms: float = attrs.field(default=0.0, validator=number(0.0))

    def target_ms(self, rows: ArrayLike, context: int) -> Floats:
        return self.target(rows) + self.context_ms * context / 1024

    def source_ms(self, name: str, rows: ArrayLike) -> Floats:
        curve = self.sources.get(name)
        return curve(rows) if curve is not None else np.asarray(rows) * 0.0

    def bind(self, target: TargetModel, sources: Sequence[Source]) -> None:
        unknown = set(self.sources) - {source.name for source in sources}
        if unknown:
            names = ", ".join(source.name for source in sources) or "none"
            raise ComposeError("costs.sources", f"{sorted(unknown)}, no sources of this pipeline", f"Sources: {names}.")

    def table(self) -> dict[str, Any]:
        return {
            "target": self.target.table(),
            "sources": {name: curve.table() for name, curve in self.sources.items()},
            "context_ms": self.context_ms,
        }


@attrs.define(eq=False)
class FileCosts(CostModel):
    """A fixed table read from a file.

    Args:
        path: a JSON object with the arguments of `fixed` (target, sources, context_ms), such as the `costs` that a
            `Generation` reports.
    """

    path: str = attrs.field(validator=attrs.validators.instance_of(str))
    _table: FixedCosts = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._table = _read_table(Path(self.path))

    def target_ms(self, rows: ArrayLike, context: int) -> Floats:
        return self._table.target_ms(rows, context)

    def source_ms(self, name: str, rows: ArrayLike) -> Floats:
        return self._table.source_ms(name, rows)

    def bind(self, target: TargetModel, sources: Sequence[Source]) -> None:
        """Read the file's figures for these sources; one file may serve pipelines with different ones."""
        missing = [source.name for source in sources if source.name not in self._table.sources]
        if missing:
            raise ComposeError(
                "path", f"{self.path} says nothing of {', '.join(missing)}",
                f"It says what these cost: {', '.join(self._table.sources) or 'none'}.",
                "Measure the pipeline with treegraft bench costs, or add them; what is free costs 0.",
            )  # fmt: skip
        known = {source.name: self._table.sources[source.name] for source in sources}
        self._table = attrs.evolve(self._table, sources=known)

    def table(self) -> dict[str, Any]:
        return self._table.table()


def _read_table(path: Path) -> FixedCosts:
    try:
        table = json.loads(path.read_text())
        return FixedCosts(**table)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no cost table ({type(error).__name__}: {error})") from error


@attrs.define(eq=False)
class MeasuredCosts(CostModel):
    """This machine's own latencies: a few forwards a size at load, then a moving average of every round.

    Measuring takes at most 5 % of the time that a request of 256 tokens would take plainly; what that leaves out begins
    between its neighbours. Results are kept on disk, keyed by models, dtype, device and versions.

    Args:
        cache: keep measurements between processes, below `$TREEGRAFT_CACHE` (by default ~/.cache/treegraft).
    """

    cache: bool = attrs.field(default=True, validator=switch)
    _target: LatencyCurve = attrs.field(init=False, factory=lambda: LatencyCurve([1.0], [1.0]))
    _sources: dict[str, LatencyCurve] = attrs.field(init=False, factory=dict)
    _file: Path | None = attrs.field(init=False, default=None)
    _is_bound: bool = attrs.field(init=False, default=False)

    def target_ms(self, rows: ArrayLike, context: int) -> Floats:
        return self._target(rows)

    def source_ms(self, name: str, rows: ArrayLike) -> Floats:
        return self._sources[name](rows)

    def table(self) -> dict[str, Any]:
        return {
            "target": self._target.table(),
            "sources": {name: curve.table() for name, curve in self._sources.items()},
            "context_ms": 0.0,
        }

    def record_target(self, rows: int, context: int, latency_ms: float) -> None:
        self._target.learn(rows, latency_ms)

    def record_source(self, name: str, rows: int, latency_ms: float) -> None:
        self._sources[name].learn(rows, latency_ms)

    def clone(self) -> "MeasuredCosts":
        return copy.deepcopy(self)

    def bind(self, target: TargetModel, sources: Sequence[Source]) -> None:
        if self._is_bound:  # a clone: the same models on the same machine
            return
        self._is_bound = True
        identities = {"target": target.identity} | {source.name: source.drafter.identity for source in sources}
        if self.cache and all(identities.values()):
            key = hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:24]
            root = Path(os.environ.get("TREEGRAFT_CACHE", Path.home() / ".cache" / "treegraft"))
            self._file = root / "costs" / f"{key}.json"
            if self._load([source.name for source in sources]):
                return
        self._target = _measure_target(target)
        for source in sources:
            self._sources[source.name] = _measure_source(target, source, float(self._target(1)))
        target.reset()
        self.save()

    def save(self) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
            partial.write_text(json.dumps(self.table()))
            partial.replace(self._file)
        except OSError:
            self._file = None  # a read-only home costs a measurement at the next load, nothing else

    def _load(self, names: Sequence[str]) -> bool:
        assert self._file is not None
        try:
            kept = _read_table(self._file)
        except ValueError:
            return False  # none yet, or not readable: measure
        if not set(names) <= set(kept.sources):
            return False
        self._target, self._sources = kept.target, kept.sources
        return True


def _random_tree(num_rows: int, tokens: Ints, rng: np.random.Generator, root: int = 0) -> DraftTree:
    """A tree of `num_rows` nodes of these tokens, each below a random earlier one, as bushy as drafted trees are."""
    anchor = [0] + [~int(rng.integers(0, index)) for index in range(1, num_rows - 1)]
    token = rng.choice(tokens, num_rows - 1)
    tree = DraftTree.rooted(root)
    if num_rows == 1:
        return tree
    return tree.append(Expansion(anchor=anchor, token=token, log_prob=np.full(num_rows - 1, -1.0)), 0, [False])


def _prompt(target: TargetModel, rng: np.random.Generator) -> Ints:
    """Tokens that repeat themselves, so that looking things up costs what it does in real text."""
    length = 64 if target.max_length is None else max(1, min(64, target.max_length // 4))
    return np.resize(rng.integers(0, target.vocab_size, 16), length)


def _measure_target(target: TargetModel) -> LatencyCurve:
    rng = np.random.default_rng(0)
    prompt, vocabulary = _prompt(target, rng), np.arange(target.vocab_size)
    target.prefill([prompt], Wants())
    samples: dict[int, list[float]] = {}
    target.score([_random_tree(1, vocabulary, rng)])  # the first forward of a process is no measure
    start, limit_ms = time.perf_counter(), float("inf")
    room = float("inf") if target.max_length is None else target.max_length - len(prompt)
    for _ in range(3):
        for num_rows in MEASURED_ROWS:
            if num_rows >= room or (time.perf_counter() - start) * 1e3 > limit_ms:
                continue
            tree = _random_tree(num_rows, vocabulary, rng)
            begin = time.perf_counter()
            (scores,) = target.score([tree])
            scores.logits(0).cpu()  # waits for an accelerator
            samples.setdefault(len(tree), []).append((time.perf_counter() - begin) * 1e3)
            limit_ms = MAX_SHARE * EXPECTED_TOKENS * min(samples[1])
    curve = _curve_of({size: float(np.median(taken)) for size, taken in samples.items()})
    sizes = sorted({*samples, *(size for size in MEASURED_ROWS if size < max(samples))})
    return LatencyCurve(sizes, curve(sizes))  # where nothing was measured, rounds will be


def _measure_source(target: TargetModel, source: Source, target_ms: float) -> LatencyCurve:
    """Latency of a drafting step against the rows it forwards; drafters without a network are one point."""
    rng = np.random.default_rng(0)
    prompt = _prompt(target, rng)
    (observation,) = target.prefill([prompt], source.drafter.wants)
    samples: dict[int, list[float]] = {}
    is_drawn, sampling = source.drafter.proposals == "sampled", SamplingRules(greedy=False)
    start = time.perf_counter()
    source.drafter.start(observation)
    for index, size in enumerate((1, 1, 8, 32, 1, 8, 32)):
        tree = _random_tree(size, prompt, rng, root=int(prompt[index % len(prompt)]))  # seen before, it costs nothing
        positions = np.arange(max(0, size - source.width), size)
        request = DraftRequest(
            tree, positions, source.branching, len(positions) * source.branching, int(tree.depth.max()) + 2,
            target.vocab_size, np.append(prompt[:-1], tree.token[0]), source.edge_scorer,
            sampler=ProposalSampler(sampling, Stream(SeededDraws(0), index, 1)) if is_drawn else None,
        )  # fmt: skip
        begin = time.perf_counter()
        try:
            source.drafter.draft(request)
        except Exception:
            break  # a drafter that fails here is reported in the request, by name
        if index:  # the first call takes in the prompt
            samples.setdefault(max(source.drafter.num_rows, 1), []).append((time.perf_counter() - begin) * 1e3)
        if (time.perf_counter() - start) * 1e3 > MAX_SHARE * EXPECTED_TOKENS * target_ms:
            break
    source.drafter.stop()
    if not samples:
        return LatencyCurve([1], [target_ms])
    return _curve_of({size: min(taken) for size, taken in samples.items()})


def _curve_of(ms: Mapping[int, float]) -> LatencyCurve:
    """Through latencies (ms) by rows; a size that took longer than a larger one was interrupted by the machine."""
    rows = sorted(ms)
    return LatencyCurve(rows, np.minimum.accumulate([ms[size] for size in reversed(rows)])[::-1])
