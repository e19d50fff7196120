"""The measurement itself: every prompt through every arm, in turns, by one clock and one counter.

A run has a folder. It begins with a manifest, adds a record for every finished request, and ends with the comparison of
texts; a folder that was left in between is gone on with.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from treegraft.bench.arms import Answer, Arm, Request, Told
from treegraft.bench.checks import counted, ignored_options, kept_state, request_problems
from treegraft.bench.prompts import Prompt
from treegraft.bench.records import (
    DIVERGENCES,
    LINES,
    MANIFEST,
    SUMMARY,
    Record,
    append_record,
    read_manifest,
    read_records,
    write_manifest,
    write_records,
)
from treegraft.bench.texts import compared
from treegraft.errors import RequestError
from treegraft.interfaces import TargetModel
from treegraft.sampling import SamplingOptions

PROBE_TOKENS = 32
"""Length of the requests that look for state kept between prompts."""
TUNE_PROMPTS = 3
TUNE_TOKENS = 64
"""Most tokens of a request by which an arm searches its settings."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@attrs.frozen
class Task:
    """A prompt and its token ids."""

    prompt: Prompt
    ids: tuple[int, ...]


@attrs.frozen
class Plan:
    """How much is run: lengths and temperatures are crossed; repeat r has the seed `seed + r`."""

    max_new_tokens: tuple[int, ...] = (128,)
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    repeats: int = 1


@attrs.frozen
class Cell:
    """What every arm is asked once."""

    task: Task
    temperature: float
    max_new_tokens: int
    repeat: int

    @property
    def key(self) -> tuple[str, str, float, int, int]:
        """As `Record.cell`."""
        return self.task.prompt.file, self.task.prompt.id, self.temperature, self.max_new_tokens, self.repeat


@attrs.frozen
class Bench:
    """What is measured, on what.

    Attributes:
        arms: in the order in which they are reported.
        target: the target that all of them decode with.
        tasks: at least one.
        plan: how much.
        clock: seconds.
        progress: is told how far things are.
    """

    arms: Sequence[Arm]
    target: TargetModel
    tasks: Sequence[Task]
    plan: Plan
    clock: Callable[[], float] = time.perf_counter
    progress: Progress = lambda what, done, total: None

    def request(self, task: Task, temperature: float, max_new_tokens: int, repeat: int = 0) -> Request:
        """What the arms are asked."""
        return Request(max_new_tokens, temperature, self.plan.seed + repeat, task.prompt.id)

    def cells(self) -> Iterator[Cell]:
        """Prompts within repeats, so that a run cut short has all prompts, and a slow hour hits all arms alike."""
        for repeat in range(self.plan.repeats):
            for task in self.tasks:
                for max_new_tokens in self.plan.max_new_tokens:
                    for temperature in self.plan.temperatures:
                        yield Cell(task, temperature, max_new_tokens, repeat)

    def order(self, cell: Cell) -> list[Arm]:
        """The arms in this cell's own shuffled order, the same whenever it is asked for."""
        arms = list(self.arms)
        random.Random(json.dumps([self.plan.seed, *cell.key])).shuffle(arms)
        return arms

    def eos_ids(self, temperature: float) -> frozenset[int]:
        """The tokens that end a text, as the target has them."""
        ids = np.array(self.tasks[0].ids, dtype=np.int64)
        return self.target.sampling_rules(ids, SamplingOptions(temperature), 1).eos_ids

    def check_lengths(self) -> None:
        """Refuse prompts that leave the longest output no room.

        Raises:
            RequestError: naming the first.
        """
        room, longest = self.target.max_length, max(self.plan.max_new_tokens)
        for task in self.tasks:
            if room is not None and len(task.ids) + longest > room:
                raise RequestError(
                    f"{task.prompt.file}: prompt {task.prompt.id!r}",
                    f"{len(task.ids)} tokens, and {longest} to come", f"The target's context holds {room}.",
                    "Leave the prompt out, or lower --max-new-tokens.",
                )  # fmt: skip

    # -- a request ----------------------------------------------------------------------------------------------------

    def timed(self, arm: Arm, ids: Sequence[int], request: Request) -> tuple[Answer, float]:
        """Prompt ids in, new ids out, and the time between (ms): for every arm alike."""
        arm.reset()
        self._synchronise()
        begin = self.clock()
        answer = arm.run(ids, request)
        self._synchronise()
        return answer, (self.clock() - begin) * 1e3

    def _synchronise(self) -> None:
        if self.target.device.type != "cpu":
            torch.accelerator.synchronize(self.target.device)

    def measured(self, arm: Arm, cell: Cell, order: int, eos_ids: frozenset[int]) -> Record:
        """One request, from the arm's reset to its Record."""
        request = self.request(cell.task, cell.temperature, cell.max_new_tokens, cell.repeat)
        load = cpu_load()
        answer, total_ms = self.timed(arm, cell.task.ids, request)
        told = answer.tell()
        new = counted(answer.token_ids, eos_ids)
        prompt = cell.task.prompt
        return Record(
            arm=arm.name, prompt_id=prompt.id, category=prompt.category, file=prompt.file,
            temperature=cell.temperature, max_new_tokens=cell.max_new_tokens, seed=request.seed, repeat=cell.repeat,
            order=order, num_prompt_tokens=len(cell.task.ids), token_ids=new, num_new_tokens=len(new),
            finish_reason="eos" if new and new[-1] in eos_ids else "length",
            prefill_ms=told.prefill_ms, num_prefill_tokens=told.num_prefill_tokens, total_ms=round(total_ms, 4),
            rounds=told.rounds, num_copied=told.num_copied,
            by_depth=told.by_depth, calibration=told.calibration, settings_read_back=told.settings,
            drafted_nothing=told.rounds is not None and not any(each.drafted for each in told.rounds),
            faults=told.faults, costs=told.costs, cpu_load=load,
            problems=request_problems(arm, answer.token_ids, eos_ids, request, told),
        )  # fmt: skip

    # -- before measuring ---------------------------------------------------------------------------------------------

    def tune(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Let arms that have settings of their own to find look for them; by arm, what they found.

        Args:
            kept: what was found before the run was interrupted; it is taken as it is.
        """
        size = min(max(self.plan.max_new_tokens), TUNE_TOKENS)
        tasks = self.tasks[:TUNE_PROMPTS]
        found: dict[str, Any] = {}
        for number, arm in enumerate(self.arms):
            self.progress("searching settings", number, len(self.arms))
            if arm.name in kept:
                arm.choose(kept[arm.name])
                found[arm.name] = kept[arm.name]
                continue
            requests = [self.request(tasks[0], temperature, size) for temperature in self.plan.temperatures]

            def rate(ids: Sequence[int], request: Request, arm: Arm = arm) -> float:
                answer, ms = self.timed(arm, ids, request)
                return len(counted(answer.token_ids, self.eos_ids(request.temperature))) / ms * 1e3

            result = arm.tune([task.ids for task in tasks], requests, rate)
            if result:
                arm.choose(result)
                found[arm.name] = result
        return found

    def probe(self) -> list[str]:
        """Look for state that an arm keeps between prompts: a request, another, and the first again."""
        found: list[str] = []
        first = self.tasks[0]
        other = self.tasks[1].ids if len(self.tasks) > 1 else first.ids[: (len(first.ids) + 1) // 2]
        size = min(max(self.plan.max_new_tokens), PROBE_TOKENS)
        request = self.request(first, self.plan.temperatures[0], size)
        for number, arm in enumerate(self.arms):
            self.progress("looking for kept state", number, len(self.arms))
            answers: list[tuple[list[int], Told]] = []
            with arm.frozen():
                for ids in (first.ids, other, first.ids):
                    answer, _ = self.timed(arm, ids, request)
                    answers.append((answer.token_ids, answer.tell()))
            found += kept_state(arm, answers[0], answers[2])
        return found

    def warm_up(self) -> tuple[dict[str, int], list[str]]:
        """A request of full length at each temperature, discarded; how many each arm answered, and what was wrong."""
        counts = dict.fromkeys((arm.name for arm in self.arms), 0)
        found: list[str] = []
        for temperature in self.plan.temperatures:
            cell = Cell(self.tasks[0], temperature, max(self.plan.max_new_tokens), 0)
            eos_ids = self.eos_ids(temperature)
            for number, arm in enumerate(self.arms):
                self.progress(f"warming up at temperature {temperature:g}", number, len(self.arms))
                record = self.measured(arm, cell, 0, eos_ids)
                counts[arm.name] += not record.problems
                found += [f"{arm.name}: in the warm-up, {text}" for text in record.problems]
        return counts, found

    # -- measuring ----------------------------------------------------------------------------------------------------

    def measure(self, folder: Path, done: Sequence[Record]) -> None:
        """Run what is not among the records that are `done`, and add a record for each."""
        finished = {(record.arm, record.cell) for record in done}
        eos_ids = {temperature: self.eos_ids(temperature) for temperature in self.plan.temperatures}
        cells = list(self.cells())
        total, number = len(cells) * len(self.arms), len(finished)
        with (folder / LINES).open("a", encoding="utf-8") as file:
            for cell in cells:
                for order, arm in enumerate(self.order(cell)):
                    if (arm.name, cell.key) not in finished:
                        self.progress("measuring", number, total)
                        append_record(file, self.measured(arm, cell, order, eos_ids[cell.temperature]))
                        number += 1
        self.progress("measuring", number, total)


def cpu_load() -> float | None:
    """The load over the last minute divided by the cores, where the system says."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 3)
    except (AttributeError, OSError):
        return None


# -- a folder ---------------------------------------------------------------------------------------------------------

SAME = (
    "arms", "pipelines", "overrides", "prompts", "prompt_hashes", "settings", "model_specs", "model_digests", "files",
    "versions", "num_threads", "device", "dtype", "arm_settings",
)  # fmt: skip
"""Keys of a manifest in which a run that is gone on with must agree with what was begun."""


def earlier_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of the run that was begun in a folder; None for a folder that is new or empty.

    A run whose records are whole, and which was interrupted while it was summed up, is gone on with too.

    Raises:
        RequestError: the run there has finished, or the folder holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / MANIFEST).exists():
        raise RequestError(
            f"--out {folder}", "neither new nor a run's folder", "Allowed: a folder that is not there yet."
        )
    manifest = read_manifest(folder)
    if manifest.get("complete") and (folder / SUMMARY).exists():
        raise RequestError(
            f"--out {folder}", f"a run that finished ({manifest.get('finished')})",
            "Allowed: a new folder, or one whose run was interrupted.", "Finished runs are never changed.",
        )  # fmt: skip
    return manifest


def check_same(folder: Path, earlier: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that was begun otherwise.

    Raises:
        RequestError: naming what differs.
    """
    unlike = [
        difference
        for key in SAME
        if key in manifest
        for difference in _differences(key, earlier.get(key), json.loads(json.dumps(manifest[key])))
    ]
    if unlike:
        more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
        raise RequestError(
            f"--out {folder}", f"an interrupted run that was begun otherwise: {unlike[0]}{more}",
            "Allowed: the same command on the same machine, to go on with it.", "Or name a new folder.",
        )  # fmt: skip


def _differences(where: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            yield from _differences(f"{where}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{where} was {before!r:.80}, is {now!r:.80}"


def run(bench: Bench, folder: Path, manifest: dict[str, Any], earlier: Mapping[str, Any] | None) -> None:
    """Measure everything that a folder lacks, and leave it with the texts compared; `manifest` is what is asked now.

    Raises:
        RequestError: the folder's run was begun otherwise.
    """
    before = earlier or {}
    if before:
        check_same(folder, before, manifest)
    if before.get("complete"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    manifest |= {key: before[key] for key in ("began", "searched", "problems", "warm_ups") if key in before}
    manifest.setdefault("began", _now())
    manifest["sessions"] = [*before.get("sessions", ()), {"began": _now(), "cpu_load": cpu_load()}]
    manifest["complete"] = False
    write_manifest(folder, manifest)
    done = _whole_lines(folder)
    if len(done) < len(list(bench.cells())) * len(bench.arms):
        found = [*manifest.get("problems", ()), *ignored_options(bench.arms), *bench.probe()]
        manifest["searched"] = bench.tune(manifest.get("searched", {}))
        manifest["warm_ups"], in_warm_up = bench.warm_up()
        manifest["problems"] = list(dict.fromkeys([*found, *in_warm_up]))
        write_manifest(folder, manifest)
        bench.measure(folder, done)
    finish(bench, folder, manifest)


def _whole_lines(folder: Path) -> list[Record]:
    """The records so far; a line that an interruption cut short is taken off the file."""
    records = read_records(folder)
    path = folder / LINES
    if path.exists():
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])
    return records


def finish(bench: Bench, folder: Path, manifest: dict[str, Any]) -> None:
    """Compare the texts, and turn the lines into the table."""
    prompts = {(task.prompt.file, task.prompt.id): task.ids for task in bench.tasks}
    arms = {arm.name: arm.repeats_plain for arm in bench.arms}
    records, divergences = compared(read_records(folder), arms, bench.target, prompts)
    lines = "".join(json.dumps(each) + "\n" for each in divergences)
    (folder / DIVERGENCES).write_text(lines, encoding="utf-8")
    write_records(folder, records)
    (folder / LINES).unlink(missing_ok=True)
    write_manifest(folder, manifest | {"complete": True, "finished": _now()})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
