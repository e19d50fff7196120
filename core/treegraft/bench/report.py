"""Reports in Markdown: of one run (what is wrong first, the main table last), and of several side by side."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from treegraft.bench.pairs import PairRow
from treegraft.bench.records import SUMMARY, read_manifest
from treegraft.bench.summary import PARTS
from treegraft.errors import RequestError

Object = dict[str, Any]

MAX_LISTED = 20  # divergences; all of them are in divergences.jsonl
FACTS = (
    "versions", "machine", "device", "device_name", "dtype", "num_threads", "batch_size", "models", "prompts",
    "settings", "overrides",
)  # fmt: skip
"""Keys of a manifest in which runs that are compared should agree."""


# -- one run ----------------------------------------------------------------------------------------------------------


def markdown(
    manifest: Mapping[str, Any],
    summary: Mapping[str, Any],
    divergences: Sequence[Object],
    plots: Sequence[str],
) -> str:
    """The text of `summary.md`.

    Args:
        manifest, summary, divergences: of the run.
        plots: files to show, by paths from where the text will stand.
    """
    parts = [
        "# Benchmark",
        *_verdict(summary, divergences),
        *_what_ran(manifest, summary),
        *_by_cell(summary),
        *_by_category(summary),
        *_details(summary),
        *(["## Plots", "\n".join(f"![{Path(plot).stem}]({plot})" for plot in plots)] if plots else []),
        *_main_tables(summary["rows"]),
    ]
    return "\n\n".join(parts) + "\n"


def _verdict(summary: Mapping[str, Any], divergences: Sequence[Object]) -> list[str]:
    parts = []
    if not summary["valid"]:
        parts += ["**THIS RUN IS NOT VALID. Its figures must not be quoted.**", _bullets(summary["problems"])]
    if divergences:
        columns = list(dict.fromkeys(name for each in divergences for name in each))
        shown = [[_plainly(each.get(name)) for name in columns] for each in divergences[:MAX_LISTED]]
        more = len(divergences) - len(shown)
        parts += ["## Divergences", markdown_table(columns, shown)]
        parts += [f"... and {more} more in `divergences.jsonl`."] if more > 0 else []
    if summary["notes"]:
        parts += ["## To know before reading on", _bullets(summary["notes"])]
    return parts


def _what_ran(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    lines = [f"{name}: {_plainly(manifest[name])}" for name in ("command", *FACTS) if manifest.get(name)]
    if summary["cpu_load"] is not None:
        lines.append("cpu load a core: median {median:.2f}, most {max:.2f}".format(**summary["cpu_load"]))
    parts = ["## What ran", _bullets(lines)]
    settings: Mapping[str, Object] = manifest.get("arm_settings", {})
    shared = _shared([own for own in settings.values() if own.get("drafts") and own.get("is_ours")])
    if settings:
        parts += [
            f"Settings, read back from the arms; what all of ours that draft have in common: {_plainly(shared)}.",
            markdown_table(
                ["arm", "further settings"], [[arm, _plainly(_beyond(own, shared))] for arm, own in settings.items()]
            ),
        ]
    searched = [
        [arm, temperature, str(found["chosen"]), _named(found["tokens_per_second"], "{:.1f}")]
        for arm, by_temperature in manifest.get("searched", {}).items()
        for temperature, found in by_temperature.items()
    ]
    if searched:
        columns = ["arm", "temperature", "draft length chosen", "tokens/s by draft length"]
        parts += ["Draft lengths of transformers' arms, searched before the run:", markdown_table(columns, searched)]
    return parts


def _shared(settings: Sequence[Object]) -> Object:
    """What several arms' settings agree in."""
    first = settings[0] if settings else {}
    return _beyond(
        {name: value for name, value in first.items() if all(own.get(name) == value for own in settings)}, {}
    )


def _beyond(own: Object, shared: Object) -> Object:
    """An arm's settings without those that are said already, or are None."""
    return {
        name: value
        for name, value in own.items()
        if value is not None and name not in ("drafts", "is_ours") and (name not in shared or shared[name] != value)
    }


def _by_cell(summary: Mapping[str, Any]) -> list[str]:
    """Ratios side by side where there are several temperatures or lengths."""
    cells = _cells([row for row in summary["rows"] if row["category"] is None])
    if len(cells) < 2:
        return []
    lines = [
        [arm, *(_ratio(next((row for row in rows if row["arm"] == arm), None)) for _, rows in cells)]
        for arm in _arms(summary["rows"])
    ]
    title = "## Ratio to plain by temperature and length"
    return [title, markdown_table(["arm", *(title for title, _ in cells)], lines)]


def _by_category(summary: Mapping[str, Any]) -> list[str]:
    parts = []
    for title, rows in _cells(summary["rows"]):
        names = list(dict.fromkeys(row["category"] for row in rows if row["category"] is not None))
        if len(names) < 2:
            continue
        lines = []
        for arm in _arms(rows):
            own = {row["category"]: row for row in rows if row["arm"] == arm}
            lines.append([arm, *(_ratio(own.get(name)) for name in names)])
        counts = {row["category"]: row["num_prompts"] for row in rows}
        parts += [f"### {title}", markdown_table(["arm", *(f"{name} (n = {counts[name]})" for name in names)], lines)]
    return ["## Ratio to plain by category", *parts] if parts else []


def _details(summary: Mapping[str, Any]) -> list[str]:
    parts = []
    for title, rows in _cells(summary["rows"]):
        rows = [row for row in rows if row["category"] is None]
        told = [row for row in rows if row["num_rounds"] is not None]
        parts += [f"## Rounds and time, {title}"]
        if told:
            columns = ["arm", "rounds", "drafted", "verified", "accepted", "emitted", "accepted by source",
                       "source calls a round"]  # fmt: skip
            parts.append(markdown_table(columns, [_rounds_line(row) for row in told]))
        timed = [row for row in rows if row["time_split"] is not None]
        if timed:
            lines = [
                [row["arm"], f"{row['ms_per_token']:.2f}", *(f"{row['time_split'][part]:.0%}" for part in PARTS),
                 _named(row["draft_split"], "{:.0%}")]
                for row in timed
            ]  # fmt: skip
            parts.append(markdown_table(["arm", "ms a token", *PARTS, "draft by source"], lines))
        deep = [row for row in rows if row["by_depth"]]
        if deep:
            most = max(len(row["by_depth"]) for row in deep)
            lines = [[row["arm"], *(_share(*level) for level in row["by_depth"])] for row in deep]
            parts += [
                "Accepted at each depth, of the rounds in which a node stood there below the emitted path:",
                markdown_table(
                    ["arm", *map(str, range(1, most + 1))], [line + [""] * (most + 1 - len(line)) for line in lines]
                ),
            ]
    if summary["calibration"]:
        columns = ["arm", "temperature", "tokens", "source", "labels", "expected calibration error"]
        lines = [
            [each["arm"], f"{each['temperature']:g}", str(each["max_new_tokens"]), each["source"],
             str(each["num_labels"]), f"{each['expected_calibration_error']:.3f}"]
            for each in summary["calibration"]
        ]  # fmt: skip
        parts += ["## Calibration of scores", markdown_table(columns, lines)]
    return parts


def _rounds_line(row: Mapping[str, Any]) -> list[str]:
    figures = [f"{row[f'{name}_per_round']:.2f}" for name in ("drafted", "verified", "accepted", "emitted")]
    return [
        row["arm"], str(row["num_rounds"]), *figures,
        _named(row["accepted_by_source"], "{:.2f}"), _named(row["source_calls"], "{:.2f}"),
    ]  # fmt: skip


def _main_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ["arm", "tokens/s (range)", "without prefill", "ratio to plain [95 %]", "range", "plain's spread",
               "to the faster plain", "emitted", "accepted", "verified", "copied"]  # fmt: skip
    parts = [
        "## Results",
        "Ratios of total throughput, medians over repeats; in square brackets 95 % intervals over prompts, in round "
        "ones the range over repeats. *Plain's spread* is how far a second plain arm is from the first: a ratio inside "
        "it is marked ~. *Emitted* counts the target's own token, *accepted* does not.",
    ]
    for title, of_cell in _cells(rows):
        lines = [_main_line(row) for row in of_cell if row["category"] is None]
        parts += [f"### {title}", markdown_table(columns, lines)]
    return parts


def _main_line(row: Mapping[str, Any]) -> list[str]:
    return [
        row["arm"],
        f"{row['tokens_per_second']:.1f} {_span(row['tokens_per_second_range'], '.1f', '()')}",
        _figure(row["tokens_per_second_decode"], ".1f"),
        _ratio(row),
        _span(row["ratio_range"], ".2f", "()"),
        _span(row["plain_spread"], ".2f", ""),
        _faster(row),
        _figure(row["emitted_per_round"], ".2f"),
        _figure(row["accepted_per_round"], ".2f"),
        _figure(row["verified_per_round"], ".1f"),
        _figure(row["copied_share"], ".0%"),
    ]


def _ratio(row: Mapping[str, Any] | None) -> str:
    if row is None or row["ratio_to_plain"] is None:
        return "-"
    low, high = row["plain_spread"] or (1.0, 1.0)
    mark = "~" if row["arm"] != "plain" and low <= row["ratio_to_plain"] <= high else ""
    return f"{mark}{row['ratio_to_plain']:.2f} {_span(row['ratio_interval'], '.2f', '[]')}".rstrip(" -")


def _faster(row: Mapping[str, Any]) -> str:
    if row["ratio_to_faster_plain"] is None:
        return "-"
    interval = _span(row["ratio_to_faster_plain_interval"], ".2f", "[]")
    return f"{row['ratio_to_faster_plain']:.2f} {interval} ({row['faster_plain']})"


# -- several runs -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Comparison:
    """Finished runs side by side.

    Attributes:
        warnings: what makes them hard to compare, one sentence each.
        rows: the rows of their summaries over all categories, with `run`, the folder; sorted by what they measured.
    """

    warnings: list[str]
    rows: list[Object]


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Put runs side by side, and say in what they differ.

    Raises:
        RequestError: a folder holds no finished run.
    """
    names = _short_names(folders)
    summaries, manifests = {}, {}
    for name, folder in zip(names, folders, strict=True):
        manifests[name], summaries[name] = read_manifest(folder), _read_summary(folder)
    warnings = [f"{name} is not valid: {' '.join(each['problems'])}" for name, each in summaries.items()
                if not each["valid"]]  # fmt: skip
    first, *others = names
    for name in others:
        warnings += [
            f"{name} differs from {first} in {text}" for text in _differences(manifests[first], manifests[name])
        ]
    rows = [{"run": name, **row} for name in names for row in summaries[name]["rows"] if row["category"] is None]
    arms = _arms(rows)
    rows.sort(
        key=lambda row: (row["temperature"], row["max_new_tokens"], arms.index(row["arm"]), names.index(row["run"]))
    )
    return Comparison(warnings, rows)


def comparison_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Columns and lines of a table over runs."""
    columns = ["temperature", "tokens", "arm", "run", "n", "tokens/s", "ratio to plain [95 %]", "plain's spread",
               "to the faster plain", "emitted", "accepted"]  # fmt: skip
    lines = [
        [
            f"{row['temperature']:g}", str(row["max_new_tokens"]), row["arm"], row["run"], str(row["num_prompts"]),
            f"{row['tokens_per_second']:.1f}", _ratio(row), _span(row["plain_spread"], ".2f", ""), _faster(row),
            _figure(row["emitted_per_round"], ".2f"), _figure(row["accepted_per_round"], ".2f"),
        ]
        for row in comparison.rows
    ]  # fmt: skip
    return columns, lines


def pairs_table(rows: Sequence[PairRow]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines of a table: a line for each pair, temperature and length, a column for each category."""
    categories = list(dict.fromkeys(row.category for row in rows))
    lines: dict[tuple[str, ...], dict[str | None, str]] = {}
    for row in rows:
        line = f"{row.temperature:g}", str(row.max_new_tokens), f"{row.arm} / {row.base}"
        figure = f"{_figure(row.ratio, '.2f')} {_span(row.interval, '.2f', '[]')}".rstrip(" -") or "-"
        lines.setdefault(line, {})[row.category] = figure
    columns = ["temperature", "tokens", "arms", *(category or "all prompts" for category in categories)]
    return columns, [[*line, *(of.get(category, "-") for category in categories)] for line, of in lines.items()]


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise RequestError("bench report", "the same folder twice", "Allowed: folders of different runs.")


def _read_summary(folder: Path) -> Object:
    try:
        summary: Object = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        if not {"valid", "problems", "rows"} <= set(summary):
            raise ValueError
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(
            str(folder), f"no readable {SUMMARY} ({type(error).__name__})", "Allowed: folders of finished runs.",
            "An interrupted run is resumed by its own command.",
        ) from error  # fmt: skip
    return summary


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What of two manifests' facts differs, down to single values."""
    shared = set(ours.get("arm_settings", ())) & set(theirs.get("arm_settings", ()))
    pairs = [(name, ours.get(name), theirs.get(name)) for name in (*FACTS, "model_specs", "model_digests")]
    pairs += [(f"settings of {arm}", ours["arm_settings"][arm], theirs["arm_settings"][arm]) for arm in sorted(shared)]
    found = []
    for name, left, right in pairs:
        if name == "prompts" and _contents(left) == _contents(right):
            continue  # wherever the files lie
        mine, other = _flat(name, left), _flat(name, right)
        for key in dict.fromkeys([*mine, *other]):
            if mine.get(key) != other.get(key):
                found.append(f"{key}: {_plainly(other.get(key))}, not {_plainly(mine.get(key))}.")
    return found


def _contents(prompts: Any) -> Any:
    """What there is to tell prompt files apart but their paths."""
    return prompts and [{name: value for name, value in each.items() if name != "file"} for each in prompts]


def _flat(path: str, value: Any) -> dict[str, Any]:
    """Nested objects as one: key paths and what stands there."""
    if not isinstance(value, Mapping):
        return {path: value}
    return {key: inner for name, each in value.items() for key, inner in _flat(f"{path}.{name}", each).items()}


# -- writing ----------------------------------------------------------------------------------------------------------


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows by temperature and length, with a title for each."""
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault(f"temperature {row['temperature']:g}, {row['max_new_tokens']} tokens", []).append(row)
    return list(cells.items())


def _arms(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows))


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _span(bounds: Sequence[float] | None, form: str, brackets: str) -> str:
    if bounds is None:
        return "-"
    text = f"{bounds[0]:{form}}-{bounds[1]:{form}}"
    return brackets[0] + text + brackets[1] if brackets else text


def _share(proposed: int, accepted: int) -> str:
    return f"{accepted / proposed:.0%} of {proposed}" if proposed else "-"


def _named(values: Mapping[str, float] | None, form: str) -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in (values or {}).items()) or "-"


def _plainly(value: Any) -> str:
    """A value of a manifest, for a reader."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plainly(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(map(_plainly, value)) or "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """A `Ratio` as an object, with its interval, for a reader."""
    if ratio["value"] is None:
        return "-"
    interval = ratio["interval"]
    return f"{ratio['value']:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
