"""From Records to figures: rates, ratios with intervals, what rounds brought, where the time went."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import numpy as np

from treegraft.bench.checks import EXACT_DTYPES
from treegraft.bench.checks import problems as unfairness
from treegraft.bench.intervals import Ratio, Work, ratio
from treegraft.bench.lineup import AGAIN, PLAIN
from treegraft.bench.records import SUMMARY, Record, Round, read_divergences, read_manifest, read_records
from treegraft.kept import write_whole

HF_PLAIN = "hf_plain"
UNDRAFTED = (PLAIN, AGAIN, HF_PLAIN)
"""Arms that draft nothing by their nature."""
PARTS = ("prefill", "schedule", "draft", "build", "target", "verify", "commit", "learn", "other")
"""Where a request's time goes; `other` is what the harness's clock saw besides."""
BUSY = 1.0  # a load per core above which the machine had other work
SPREAD = 0.05  # by which plain may differ from itself without a note
FEW_PROMPTS = 10

Object = dict[str, Any]


@attrs.frozen
class Row:
    """A line of `summary.json`: one arm at one temperature and length, on all prompts or on those of one category.

    Shares and means are over all requests and rounds; None where the arm cannot tell.

    Attributes:
        arm, temperature, max_new_tokens: which.
        category: of the prompts; None for all.
        num_prompts, num_repeats, num_new_tokens, num_rounds: what the figures are made of.
        tokens_per_second: all tokens over all time, prefill included; median over repeats.
        tokens_per_second_range: least and largest over repeats.
        tokens_per_second_decode, tokens_per_second_decode_range: the same without prefill and the tokens it brought.
        ratio_to_plain: throughput over that of `plain` on the same requests; median over repeats.
        ratio_interval: 95 %, bootstrap over prompts.
        ratio_range: least and largest over repeats.
        plain_spread: by how much two arms that are one and the same may differ: the furthest that interval or range of
            `plain (again)` to `plain` are from 1, in either direction.
        ratio_to_plain_decode, ratio_interval_decode: the same ratio without prefill.
        faster_plain: the faster of `plain` and `hf_plain`.
        ratio_to_faster_plain, ratio_to_faster_plain_interval: the ratio to that.
        emitted_per_round, accepted_per_round, verified_per_round, drafted_per_round: means; nodes below the root.
        emitted_histogram, accepted_histogram: rounds by number of tokens.
        accepted_by_source: accepted tokens a round, by the source that proposed them first.
        source_calls: drafting steps a round, by source.
        by_depth: for depth 1, 2, ...: rounds in which the verified tree had a child below the emitted path at that
            depth, and rounds in which one was accepted.
        copied_share: of the new tokens, those that a drafter without a network proposed first.
        ms_per_token: latency over new tokens (ms).
        time_split: shares of the latency by part (`PARTS`).
        draft_split: the share of `draft` by source.
    """

    arm: str
    temperature: float
    max_new_tokens: int
    category: str | None
    num_prompts: int
    num_repeats: int
    num_new_tokens: int
    num_rounds: int | None
    tokens_per_second: float
    tokens_per_second_range: tuple[float, float]
    tokens_per_second_decode: float | None
    tokens_per_second_decode_range: tuple[float, float] | None
    ratio_to_plain: float | None
    ratio_interval: tuple[float, float] | None
    ratio_range: tuple[float, float] | None
    plain_spread: tuple[float, float] | None
    ratio_to_plain_decode: float | None
    ratio_interval_decode: tuple[float, float] | None
    faster_plain: str | None
    ratio_to_faster_plain: float | None
    ratio_to_faster_plain_interval: tuple[float, float] | None
    emitted_per_round: float | None
    accepted_per_round: float | None
    verified_per_round: float | None
    drafted_per_round: float | None
    emitted_histogram: dict[int, int] | None
    accepted_histogram: dict[int, int] | None
    accepted_by_source: dict[str, float] | None
    source_calls: dict[str, float] | None
    by_depth: list[tuple[int, int]] | None
    copied_share: float | None
    ms_per_token: float
    time_split: dict[str, float] | None
    draft_split: dict[str, float] | None


def summarize(manifest: Mapping[str, Any], records: Sequence[Record], divergences: Sequence[Object]) -> Object:
    """The content of `summary.json`.

    Args:
        manifest: what the run was asked for.
        records: of its requests, those of an interrupted run too.
        divergences: texts that differ though they should not.
    """
    arms = list(dict.fromkeys([*manifest.get("arms", ()), *(record.arm for record in records)]))
    cells = sorted({(record.temperature, record.max_new_tokens) for record in records})
    rows, spreads, reliability = [], [], []
    for temperature, length in cells:
        of_cell = [record for record in records if (record.temperature, record.max_new_tokens) == (temperature, length)]
        for category in [None, *dict.fromkeys(record.category for record in of_cell)]:
            chosen = [record for record in of_cell if category in (None, record.category)]
            rows += _rows(arms, chosen, category)
        spread = _spread(works_of(of_cell))
        if spread.value is not None:
            spreads.append({"temperature": temperature, "max_new_tokens": length, **attrs.asdict(spread)})
        for arm in arms:
            where = {"arm": arm, "temperature": temperature, "max_new_tokens": length}
            reliability += [where | each for each in _calibration(r for r in of_cell if r.arm == arm)]
    problems = find_problems(manifest, records, divergences)
    return {
        "valid": not problems,
        "problems": problems,
        "notes": find_notes(manifest, records, divergences, spreads),
        "num_divergences": len(divergences),
        "rows": [attrs.asdict(row) for row in rows],
        "plain_spread": spreads,
        "calibration": reliability,
        "cpu_load": _cpu_load(records),
    }


# -- one row ----------------------------------------------------------------------------------------------------------


def _rows(arms: Iterable[str], records: Sequence[Record], category: str | None) -> list[Row]:
    works = works_of(records)
    decode_works = works_of(records, decode=True)
    spread = _spread(works)
    plains = [arm for arm in (PLAIN, HF_PLAIN) if arm in works]
    faster = max(plains, key=lambda arm: float(np.median(works[arm].tokens_per_second())), default=None)
    rows = []
    for arm in arms:
        own = [record for record in records if record.arm == arm]
        if not own:
            continue
        to_plain, to_faster = ratio(works[arm], works.get(PLAIN)), ratio(works[arm], works.get(faster or ""))
        without_prefill = ratio(decode_works.get(arm), decode_works.get(PLAIN))
        rates = works[arm].tokens_per_second()
        decode = decode_works[arm].tokens_per_second() if arm in decode_works else ()
        rows.append(
            Row(
                arm=arm,
                temperature=own[0].temperature,
                max_new_tokens=own[0].max_new_tokens,
                category=category,
                num_prompts=len({_prompt(record) for record in own}),
                num_repeats=len({record.repeat for record in own}),
                num_new_tokens=sum(record.num_new_tokens for record in own),
                tokens_per_second=float(np.median(rates)),
                tokens_per_second_range=_range(rates),
                tokens_per_second_decode=float(np.median(decode)) if len(decode) else None,
                tokens_per_second_decode_range=_range(decode) if len(decode) else None,
                ratio_to_plain=to_plain.value,
                ratio_interval=to_plain.interval,
                ratio_range=to_plain.range,
                plain_spread=_noise(spread),
                ratio_to_plain_decode=without_prefill.value,
                ratio_interval_decode=without_prefill.interval,
                faster_plain=faster,
                ratio_to_faster_plain=to_faster.value,
                ratio_to_faster_plain_interval=to_faster.interval,
                **_of_rounds(own),
                **_of_time(own),
            )
        )
    return rows


def _prompt(record: Record) -> tuple[str, str]:
    return record.file, record.prompt_id


def works_of(records: Sequence[Record], decode: bool = False) -> dict[str, Work]:
    """Tokens and time by arm, over the same prompts and repeats.

    With `decode`, without prefill and what it brought; an arm that cannot tell is left out.
    """
    prompts = {prompt: column for column, prompt in enumerate(dict.fromkeys(map(_prompt, records)))}
    repeats = {repeat: row for row, repeat in enumerate(sorted({record.repeat for record in records}))}
    silent = {record.arm for record in records if decode and record.prefill_ms is None}
    works: dict[str, Work] = {}
    for record in records:
        if record.arm in silent:
            continue
        if record.arm not in works:
            works[record.arm] = Work(*np.zeros((2, len(repeats), len(prompts))))
        place = repeats[record.repeat], prompts[_prompt(record)]
        tokens, ms = record.num_new_tokens, record.total_ms
        if decode and record.prefill_ms is not None:
            tokens, ms = max(0, tokens - record.num_prefill_tokens), max(0.0, ms - record.prefill_ms)
        works[record.arm].tokens[place], works[record.arm].ms[place] = tokens, ms
    return works


def _spread(works: Mapping[str, Work]) -> Ratio:
    """How a second plain arm compares with the first."""
    return ratio(works.get(AGAIN), works.get(PLAIN))


def _noise(found: Ratio) -> tuple[float, float] | None:
    furthest = max((abs(math.log(bound)) for bound in (*(found.range or ()), *(found.interval or ()))), default=None)
    return None if furthest is None else (math.exp(-furthest), math.exp(furthest))


def _range(values: Any) -> tuple[float, float]:
    return float(min(values)), float(max(values))


def _of_rounds(records: Sequence[Record]) -> Object:
    """What the rounds of an arm brought."""
    rounds = [each for record in records for each in record.rounds or ()]
    num_tokens = sum(record.num_new_tokens for record in records)
    copied = [record.num_copied for record in records if record.num_copied is not None]
    told = bool(rounds)

    def mean(values: Iterable[int]) -> float | None:
        return sum(values) / len(rounds) if told else None

    def means(name: str) -> dict[str, float] | None:
        totals = _sums(getattr(each, name) for each in rounds)
        return {source: total / len(rounds) for source, total in totals.items()} if told else None

    return {
        "num_rounds": len(rounds) if told else None,
        "emitted_per_round": mean(each.emitted for each in rounds),
        "accepted_per_round": mean(each.accepted for each in rounds),
        "verified_per_round": mean(each.verified for each in rounds),
        "drafted_per_round": mean(each.drafted for each in rounds),
        "emitted_histogram": _histogram(each.emitted for each in rounds) if told else None,
        "accepted_histogram": _histogram(each.accepted for each in rounds) if told else None,
        "accepted_by_source": means("accepted_by_source"),
        "source_calls": means("source_calls"),
        "by_depth": _by_depth(records),
        "copied_share": sum(copied) / num_tokens if len(copied) == len(records) and num_tokens else None,
    }


def _sums(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Key by key, in alphabetical order."""
    totals: dict[str, float] = {}
    for each in mappings:
        for name, value in each.items():
            totals[name] = totals.get(name, 0.0) + value
    return dict(sorted(totals.items()))


def _histogram(values: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))


def _by_depth(records: Iterable[Record]) -> list[tuple[int, int]] | None:
    told = [record.by_depth for record in records if record.by_depth is not None]
    if not told:
        return None
    return [
        (sum(proposed for proposed, _ in level), sum(accepted for _, accepted in level))
        for level in zip_longest(*told, fillvalue=(0, 0))
    ]


def _of_time(records: Sequence[Record]) -> Object:
    """Where the time of an arm went."""
    total_ms = sum(record.total_ms for record in records)
    num_tokens = sum(record.num_new_tokens for record in records)
    split = draft_split = None
    if all(record.prefill_ms is not None and record.rounds and record.rounds[0].ms for record in records):
        rounds: list[Round] = [each for record in records for each in record.rounds or ()]
        ms = {"prefill": sum(record.prefill_ms or 0.0 for record in records), **_sums(each.ms for each in rounds)}
        ms["other"] = total_ms - sum(ms.values())
        split = {part: ms.get(part, 0.0) / total_ms for part in PARTS}
        draft_split = {source: own / total_ms for source, own in _sums(each.source_ms for each in rounds).items()}
    return {
        "ms_per_token": total_ms / max(num_tokens, 1),
        "time_split": split,
        "draft_split": draft_split,
    }


# -- calibration ------------------------------------------------------------------------------------------------------


def _calibration(records: Iterable[Record]) -> list[Object]:
    """A reliability table for each source that scored anything."""
    totals: dict[str, Any] = {}
    for record in records:
        for source, bins in (record.calibration or {}).items():
            totals[source] = totals.get(source, 0.0) + np.array(bins, dtype=np.float64)
    found = []
    for source, bins in sorted(totals.items()):
        count, probability, accepted = bins.T
        if not count.sum():
            continue
        lines = [
            {
                "low": index / len(bins),
                "high": (index + 1) / len(bins),
                "count": int(count[index]),
                "mean_probability": probability[index] / count[index] if count[index] else None,
                "accepted_share": accepted[index] / count[index] if count[index] else None,
            }
            for index in range(len(bins))
        ]
        # |mean probability - accepted share|, weighted by the labels of each bin
        error = float(np.abs(probability - accepted).sum() / count.sum())
        found.append(
            {"source": source, "num_labels": int(count.sum()), "expected_calibration_error": error, "bins": lines}
        )
    return found


# -- what is wrong, and what to know ----------------------------------------------------------------------------------


def find_problems(manifest: Mapping[str, Any], records: Sequence[Record], divergences: Sequence[Object]) -> list[str]:
    """Why a run is not valid, one sentence each; empty if it is."""
    found = []
    if not manifest.get("complete", False):
        found.append(f"The run has not finished: {_requests(len(records))} so far. The same command goes on with it.")
    if not records:
        found.append("There are no records.")
    eos_ids = set(manifest.get("eos_ids", ()))
    late = Counter(record.arm for record in records if not eos_ids.isdisjoint(record.token_ids[:-1]))
    found += [f"{arm}: tokens after EOS are counted ({_requests(count)})" for arm, count in late.items()]
    return found + unfairness(manifest, records, divergences)


def find_notes(
    manifest: Mapping[str, Any], records: Sequence[Record], divergences: Sequence[Object], spreads: Sequence[Object]
) -> list[str]:
    """What a reader should know before trusting the figures, one sentence each."""
    notes = list(manifest.get("notes", ()))
    if manifest.get("dtype") not in EXACT_DTYPES:
        notes += [
            f"{arm}: other tokens than the arm that it would equal in float32 ({_requests(count)}); rounding in "
            f"{manifest.get('dtype')} explains that where the two choices are close."
            for arm, count in Counter(each["arm"] for each in divergences).items()
        ]
    for arm in dict.fromkeys(record.arm for record in records):
        own = [record for record in records if record.arm == arm]
        idle = sum(record.drafted_nothing for record in own)
        if idle and arm not in UNDRAFTED:
            notes.append(f"{arm} drafted nothing in {idle} of {_requests(len(own))}.")
    for text, count in Counter(
        f"{record.arm}: the drafter of {fault['source']} failed and was left out ({fault['error']})"
        for record in records
        for fault in record.faults
    ).items():
        notes.append(f"{text}, in {_requests(count)}.")
    for spread in spreads:
        low, high = spread["range"]
        if max(1 - low, high - 1) > SPREAD:
            notes.append(
                f"At temperature {spread['temperature']:g} and {spread['max_new_tokens']} tokens, plain decoding is "
                f"{low:.2f} to {high:.2f} times as fast as itself: the machine's speed varied, and differences of that "
                "size mean nothing."
            )
    load = _cpu_load(records)
    if load is not None and load["max"] > BUSY:
        notes.append(
            f"The machine was busy: its load was up to {load['max']:.1f} a core (median {load['median']:.1f})."
        )
    num_prompts = len({_prompt(record) for record in records})
    if records and num_prompts < FEW_PROMPTS:
        notes.append(f"Intervals over {num_prompts} prompts are rough.")
    if records and len({record.repeat for record in records}) < 3:
        notes.append("Fewer than three repeats: the ranges say little about how the machine's speed varies.")
    return notes


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def _cpu_load(records: Iterable[Record]) -> dict[str, float] | None:
    """Median and maximum of the load per core before each request."""
    loads = [record.cpu_load for record in records if record.cpu_load is not None]
    return {"median": median(loads), "max": max(loads)} if loads else None


# -- files ------------------------------------------------------------------------------------------------------------


def write_summary(folder: Path) -> Object:
    """Read a run's records, and write `summary.json`, `summary.md` and the plots beside them.

    Raises:
        RequestError: the folder holds no run, or a package of the extra `bench` is missing.
    """
    from treegraft.bench.plots import write_plots  # matplotlib, where it is needed
    from treegraft.bench.report import markdown

    manifest, records, divergences = read_manifest(folder), read_records(folder), read_divergences(folder)
    summary = summarize(manifest, records, divergences)
    plots = write_plots(folder / "plots", manifest, summary)
    text = markdown(manifest, summary, divergences, [path.relative_to(folder).as_posix() for path in plots])
    (folder / "summary.md").write_text(text, encoding="utf-8")
    # Last of all: where it is there, so is the rest.
    write_whole(folder / SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    return summary
