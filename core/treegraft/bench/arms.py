"""What is measured: an Arm decodes a prompt, and afterwards tells what it can about how.

Pipelines of a registry are arms; so is whatever else decodes with the same target, through the same interface.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike

from treegraft.bench.records import NUM_BINS, Round
from treegraft.compose import ResolvedPipeline, build
from treegraft.interfaces import RoundRecord, TargetModel
from treegraft.learn import labels
from treegraft.pipeline import Generation
from treegraft.sampling import SamplingOptions, SamplingRules, SeededDraws
from treegraft.statistics import CostModel
from treegraft.tree import DraftTree, Floats


@attrs.frozen
class Request:
    """What every arm is asked in the same way.

    Attributes:
        max_new_tokens: most tokens to emit.
        temperature: 0.0 takes the arg-max.
        seed: of sampling.
        prompt_id: for arms that cannot draw with our seed and make one of both.
    """

    max_new_tokens: int
    temperature: float
    seed: int
    prompt_id: str = ""


@attrs.frozen
class Told:
    """What an arm can tell of a request; the fields are those of a `Record`.

    Attributes:
        settings: what the request ran with, read from the live objects: max_new_tokens, temperature, ...
    """

    settings: dict[str, Any] = attrs.field(factory=dict)
    prefill_ms: float | None = None
    num_prefill_tokens: int = 0
    rounds: list[Round] | None = None
    num_copied: int | None = None
    by_depth: list[list[int]] | None = None
    calibration: dict[str, list[list[float]]] | None = None
    faults: list[dict[str, str]] = attrs.field(factory=list)
    costs: dict[str, Any] | None = None


@attrs.frozen
class Answer:
    """What came of a request.

    Attributes:
        token_ids: the new tokens.
        tell: called once the clock has stopped.
    """

    token_ids: list[int]
    tell: Callable[[], Told]


class Arm(ABC):
    """One way to decode.

    Attributes:
        name: of the arm.
        is_ours: whether it is a pipeline: D, B, W, m and a seed of its own are read back from it.
        repeats_plain: whether its sampled text is plain decoding's with the same seed: then all such arms must emit the
            same ids at any temperature, and the others only at temperature 0.
        drafts: whether it means to draft; plain decoding does not.
    """

    name: str
    is_ours: bool = False
    repeats_plain: bool = False
    drafts: bool = True

    @abstractmethod
    def run(self, prompt: Sequence[int], request: Request) -> Answer:
        """Decode; the caller's clock is running."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What it is composed of, read from the live objects: dotted names, JSON values."""

    def asked(self) -> dict[str, Any]:
        """What it was to be composed of, under the same names; what cannot be read back is not compared."""
        return {}

    def reset(self) -> None:
        """Forget the last prompt; called before each request, while the clock stands still."""

    def frozen(self) -> AbstractContextManager[None]:
        """While entered, nothing measured changes what it decides: the same request takes the same rounds."""
        return nullcontext()

    def tune(self, prompts: Sequence[Sequence[int]], requests: Sequence[Request], timed: "Timed") -> dict[str, Any]:
        """Search settings of its own on a few prompts; returns what was found, for `choose` and for the reader.

        Args:
            prompts: token ids.
            requests: one a temperature.
            timed: runs a request and measures it: (prompt, request) -> tokens per second.
        """
        return {}

    def choose(self, found: Mapping[str, Any]) -> None:
        """Take the settings that an earlier `tune` found."""


Timed = Callable[[Sequence[int], Request], float]


# -- pipelines --------------------------------------------------------------------------------------------------------


class PipelineArm(Arm):
    """A pipeline of the registry.

    Args:
        resolved: what it is.
        target: the target that all arms share; None makes the pipeline's own.
        name: by default the pipeline's.
    """

    is_ours = True

    def __init__(self, resolved: ResolvedPipeline, target: TargetModel | None = None, name: str | None = None):
        self.name = resolved.name if name is None else name
        self.drafts = bool(resolved.sources)
        if target is not None:
            shared = attrs.evolve(resolved.parts["target"], given=target)
            resolved = attrs.evolve(resolved, parts=resolved.parts | {"target": shared})
        self._resolved = resolved
        self.pipeline = build(resolved)
        self.repeats_plain = self.pipeline.repeats_plain

    def run(self, prompt: Sequence[int], request: Request) -> Answer:
        pipeline = self.pipeline
        ids = np.array(prompt, dtype=np.int64)
        options = SamplingOptions(request.temperature)  # all this as `generate` does: it is the request's time
        rules = pipeline.target.sampling_rules(ids, options, request.max_new_tokens)
        sampler = pipeline.sampler(prompt, rules, SeededDraws(request.seed), request.max_new_tokens)
        rounds = pipeline.run(sampler, request.seed)
        records: list[RoundRecord] = []
        while True:
            try:
                records.append(next(rounds))
            except StopIteration as end:
                generation: Generation = end.value
                break

        def tell() -> Told:
            settings = request_settings(rules) | {
                "max_new_tokens": sampler.max_tokens, "seed": generation.seed, "steps": pipeline.parts.steps,
                "verify_nodes": pipeline.parts.budget.max_verify_nodes,
            }  # fmt: skip
            if records:
                limits = records[0].state.limits
                settings |= {"steps": limits.steps, "verify_nodes": limits.verify_nodes}
            names = [source.name for source in pipeline.sources]
            return Told(
                settings=settings,
                prefill_ms=round(generation.latency_ms["prefill"], 4),
                rounds=[told_round(record, names) for record in records],
                num_copied=num_copied(records, names),
                by_depth=by_depth(records),
                calibration=calibration(records, names),
                faults=generation.faults,
                costs=generation.costs,
            )

        return Answer(generation.token_ids, tell)

    def settings(self) -> dict[str, Any]:
        pipeline, parts = self.pipeline, self.pipeline.parts
        live: dict[str, Any] = {
            "target": pipeline.target, "scheduler": parts.scheduler, "budget": parts.budget, "pruner": parts.pruner,
            "verifier": parts.verifier, "costs": pipeline.costs,
        }  # fmt: skip
        found: dict[str, Any] = {
            "steps": parts.steps, "calibration": "on" if pipeline.calibration else "off",
            "verify_nodes": parts.budget.max_verify_nodes,
        }  # fmt: skip
        for source in pipeline.sources:
            where = f"sources.{source.name}"
            for name in ("width", "branching", "rank", "rescore"):
                found[f"{where}.{name}"] = getattr(source, name)
            live |= {
                f"{where}.draft": source.drafter, f"{where}.select": source.selector,
                f"{where}.graft": source.graft_policy, f"{where}.edges": source.edge_scorer,
            }  # fmt: skip
        for path, part in self._resolved.parts.items():
            found[f"{path}.use"] = part.use
            for name in part.arguments:
                value = _read_back(live[path], name)
                if value is not _UNREADABLE:
                    found[f"{path}.{name}"] = value
        return found | {"lossless": pipeline.lossless, "device": str(pipeline.target.device)}

    def asked(self) -> dict[str, Any]:
        resolved = self._resolved
        wanted: dict[str, Any] = {"steps": resolved.config["steps"], "calibration": resolved.config["calibration"]}
        for name, schema in resolved.sources.items():
            wanted |= {
                f"sources.{name}.{key}": getattr(schema, key) for key in ("width", "branching", "rank", "rescore")
            }
        for path, part in resolved.parts.items():
            wanted |= {f"{path}.{name}": value for name, value in part.arguments.items()}
        if "budget.verify_nodes" in wanted:
            wanted["verify_nodes"] = wanted["budget.verify_nodes"]
        return wanted

    def reset(self) -> None:
        self.pipeline.target.reset()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        costs = self.pipeline.costs
        self.pipeline.costs = FrozenCosts(costs)
        try:
            yield
        finally:
            self.pipeline.costs = costs


class FrozenCosts(CostModel):
    """What a cost model says now, whatever is measured later."""

    def __init__(self, costs: CostModel):
        self._costs = costs.clone() or copy.deepcopy(costs)

    def target_ms(self, rows: ArrayLike, context: int) -> Floats:
        return self._costs.target_ms(rows, context)

    def source_ms(self, name: str, rows: ArrayLike) -> Floats:
        return self._costs.source_ms(name, rows)

    def table(self) -> dict[str, Any]:
        return self._costs.table()


_UNREADABLE = object()


def _read_back(component: Any, name: str) -> Any:
    """A constructor argument as the component holds it now, if it does and if it is a JSON value."""
    fields = attrs.fields(type(component)) if attrs.has(type(component)) else ()
    value = getattr(component, next((field.name for field in fields if field.alias == name), name), _UNREADABLE)
    if isinstance(value, tuple | list):
        return list(value) if all(_is_plain(each) for each in value) else _UNREADABLE
    return value if _is_plain(value) else _UNREADABLE


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def request_settings(rules: SamplingRules) -> dict[str, Any]:
    """Temperature, as the request's processors have it."""
    if rules.greedy:
        return {"temperature": 0.0}
    temperature = 1.0
    for processor in rules.processors:
        temperature *= getattr(processor, "temperature", 1.0)
    return {"temperature": temperature}


# -- what rounds tell -------------------------------------------------------------------------------------------------


def told_round(record: RoundRecord, names: Sequence[str]) -> Round:
    """A round as it is written down; `names` are the sources' by index."""
    calls: dict[str, int] = {}
    for step in record.state.steps:
        if len(step.positions):
            calls[step.source] = calls.get(step.source, 0) + 1
    accepted: dict[str, int] = {}
    for index in record.pruned.source[record.verdict.path].tolist():
        accepted[names[index]] = accepted.get(names[index], 0) + 1
    source_ms = {name: round(ms, 4) for name, ms in record.source_ms.items()}
    ms = {name: round(ms, 4) for name, ms in record.latency_ms.items()}
    return Round(
        emitted=len(record.tokens),
        accepted=len(record.verdict.path),
        verified=len(record.pruned) - 1,
        drafted=len(record.state.tree) - 1,
        followed=followed(record.state.tree, record.tokens),
        accepted_by_source=accepted,
        source_calls=calls,
        ms={**ms, "draft": round(sum(record.source_ms.values()), 4)},
        source_ms=source_ms,
    )


def followed(tree: DraftTree, tokens: Sequence[int]) -> int:
    """How many of `tokens` the tree holds as a path from its root."""
    row = depth = 0
    for token in tokens:
        child = tree.child(row, token)
        if child is None:
            break
        row, depth = child, depth + 1
    return depth


def num_copied(records: Sequence[RoundRecord], names: Sequence[str]) -> int:
    """Accepted tokens that a source proposed first which never forwarded a row: copied or remembered, not computed."""
    neural = {step.source for record in records for step in record.state.steps if step.num_rows}
    return sum(
        names[index] not in neural
        for record in records
        for index in record.pruned.source[record.verdict.path].tolist()
    )  # fmt: skip


def by_depth(records: Sequence[RoundRecord]) -> list[list[int]]:
    """For depth 1, 2, ...: [rounds with a node there below the emitted path, rounds in which one was accepted]."""
    counts: list[list[int]] = []
    for record in records:
        tree, path = record.pruned, record.verdict.path
        for depth, row in enumerate([0, *path.tolist()]):
            if not (tree.parent == row).any():
                break
            if depth == len(counts):
                counts.append([0, 0])
            counts[depth][0] += 1
            counts[depth][1] += depth < len(path)
    return counts


def calibration(records: Sequence[RoundRecord], names: Sequence[str]) -> dict[str, list[list[float]]]:
    """By scorer, ten bins of the probability it gave: [count, sum of probabilities, accepted]."""
    bins = {name: np.zeros((NUM_BINS, 3)) for name in names}
    for record in records:
        rows, accepted = labels(record.state.tree, record.tokens)
        nodes = record.state.tree.nodes[rows]
        probability = np.exp(nodes["edge_score"])
        place = np.minimum((probability * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for index, name in enumerate(names):
            own = nodes["scorer"] == index
            np.add.at(bins[name], place[own], np.stack([np.ones(own.sum()), probability[own], accepted[own]], axis=1))
    return {name: [[int(n), round(p, 6), int(k)] for n, p, k in table.tolist()] for name, table in bins.items()}
