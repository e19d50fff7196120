"""Plots of a run, as PNG: an arm has one colour and one marker in all of them, and they stand in one order."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from treegraft.bench.costs import TARGET, Point
from treegraft.bench.lineup import AGAIN, PLAIN
from treegraft.bench.summary import HF_PLAIN, PARTS

# Okabe and Ito's colours, which differ for colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BASES = {PLAIN: ("#000000", "."), AGAIN: ("#999999", "."), HF_PLAIN: ("#555555", "x")}
"""Arms that look the same in every run."""
RATIOS = "ratio_by_category"
MIN_ROUNDS = 10  # a share of fewer is not drawn
MAX_WIDTH = 13.5  # inches, of panels side by side

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
}

Rows = Sequence[Mapping[str, Any]]


@attrs.frozen
class Look:
    """How an arm is drawn."""

    color: str
    marker: str


def write_plots(folder: Path, manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Path]:
    """Draw a run's plots into `folder`; returns the files, in order."""
    if not summary["rows"]:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    caption = _caption(manifest, [row for row in summary["rows"] if row["category"] is None])
    captions = {RATIOS: f"bars: 95 % bootstrap intervals over prompts; {caption}"}
    return [
        _save(figure, folder / f"{name}.png", captions.get(name, caption))
        for name, figure in draw_plots(summary).items()
    ]


def draw_plots(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """The plots of a summary by name; what no arm can tell is not drawn."""
    rows, tables = summary["rows"], summary["calibration"]
    looks = arm_looks(dict.fromkeys(row["arm"] for row in rows))
    overall = [row for row in rows if row["category"] is None]
    drawn = {
        RATIOS: _grid(rows, "Throughput against plain decoding", _draw_ratios, looks),
        "accepted_histogram": _grid(
            [row for row in overall if row["accepted_per_round"]],
            "Accepted draft tokens a round",
            _draw_histogram,
            looks,
        ),
        "time_split": _grid(
            [row for row in overall if row["time_split"]], "Where the time goes", _draw_time, looks, from_zero=False
        ),
        "acceptance_by_depth": _grid(
            [row for row in overall if row["by_depth"]], "Acceptance by depth", _draw_depths, looks
        ),
    }
    for source in dict.fromkeys(table["source"] for table in tables):
        own = [table for table in tables if table["source"] == source]
        drawn[f"reliability_{source}"] = _grid(own, f"Reliability of scores: {source}", _draw_reliability, looks)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def arm_looks(arms: Sequence[str] | Mapping[str, Any]) -> dict[str, Look]:
    """Colours and markers of arms, by the order in which they were asked for."""
    looks = {arm: Look(*BASES[arm]) for arm in arms if arm in BASES}
    for index, arm in enumerate(arm for arm in arms if arm not in BASES):
        # Markers move on by one each time the colours begin anew, so that the first 49 arms differ.
        looks[arm] = Look(COLOURS[index % len(COLOURS)], MARKERS[(index + index // len(COLOURS)) % len(MARKERS)])
    return {arm: looks[arm] for arm in arms}


def _caption(manifest: Mapping[str, Any], rows: Rows) -> str:
    num_prompts, num_repeats = max(row["num_prompts"] for row in rows), max(row["num_repeats"] for row in rows)
    told = [str(manifest[name]) for name in ("dtype", "device") if name in manifest]
    version = f"treegraft {manifest.get('versions', {}).get('treegraft', '')}".strip()
    return "; ".join([f"n = {num_prompts} prompts", f"{num_repeats} repeats", *told, version])


def _save(figure: Figure, path: Path, caption: str) -> Path:
    with matplotlib.rc_context(_STYLE):
        figure.supxlabel(caption, fontsize=7, color="#444444")
        figure.savefig(path, dpi=200)
    return path


def _grid(
    rows: Rows,
    title: str,
    draw: Callable[[Axes, Rows, dict[str, Look]], None],
    looks: dict[str, Look],
    from_zero: bool = True,
) -> Figure | None:
    """A panel for each temperature and length, on one scale, and one legend for all; None without rows."""
    if not rows:
        return None
    cells: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["temperature"], row["max_new_tokens"]), []).append(row)
    with matplotlib.rc_context(_STYLE):
        num_arms, num_groups = (len({row.get(name) for row in rows}) for name in ("arm", "category"))
        width, height = max(4.5, min(0.12 * num_arms * num_groups, 12.0)), max(3.6, 0.2 * num_arms)
        across = min(len(cells), int(MAX_WIDTH // width))
        down = -(-len(cells) // across)
        figure = Figure(figsize=(1.5 + width * across, 0.6 + height * down), layout="constrained")
        figure.suptitle(title)
        grid = figure.subplots(down, across, sharey=True, squeeze=False)
        panels = grid.flatten().tolist()
        for panel, ((temperature, length), own) in zip(panels, cells.items(), strict=False):
            draw(panel, own, looks)
            panel.set_title(f"temperature {temperature:g}, {length} tokens", fontsize=9)
        if from_zero:  # once all is drawn: a limit set before would not grow with the panels that follow
            panels[0].set_ylim(bottom=0)
        for panel in grid[:, 1:].flatten():
            panel.set_ylabel("")
        for panel in panels[len(cells) :]:
            panel.set_axis_off()
        handles = {
            label: handle
            for panel in panels
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }  # fmt: skip
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    return figure


# -- panels -----------------------------------------------------------------------------------------------------------


def _draw_ratios(axes: Axes, rows: Rows, looks: dict[str, Look]) -> None:
    """Ratio to plain by category, an interval for each arm, plain's own spread behind them."""
    rows = [row for row in rows if row["ratio_to_plain"] is not None and row["arm"] != PLAIN]
    places = {category: place for place, category in enumerate(dict.fromkeys(row["category"] for row in rows))}
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    counts = {row["category"]: row["num_prompts"] for row in rows}
    axes.axhline(1.0, color="black", linewidth=0.8)
    for category, place in places.items():
        spread = next(row["plain_spread"] for row in rows if row["category"] == category)
        if spread:
            axes.fill_between([place - 0.45, place + 0.45], *spread, color="#999999", alpha=0.3, linewidth=0,
                              label="plain's spread")  # fmt: skip
    for number, arm in enumerate(arms):
        own = [row for row in rows if row["arm"] == arm]
        bounds = [row["ratio_interval"] or (row["ratio_to_plain"],) * 2 for row in own]
        values = [row["ratio_to_plain"] for row in own]
        errors = [
            [max(0.0, value - low) for value, (low, _) in zip(values, bounds, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(values, bounds, strict=True)],
        ]
        shift = 0.8 * ((number + 0.5) / len(arms) - 0.5)
        axes.errorbar(
            [places[row["category"]] + shift for row in own], values, yerr=errors, label=arm, linestyle="none",
            markersize=5, elinewidth=1.2, capsize=2, color=looks[arm].color, marker=looks[arm].marker,
        )  # fmt: skip
    labels = [f"{category or 'all'}\nn = {counts[category]}" for category in places]
    axes.set_xticks(list(places.values()), labels, rotation=30 if len(places) > 4 else 0, fontsize=8)
    axes.set_xlabel("category of prompts")
    axes.set_ylabel("tokens/s, ratio to plain")


def _draw_histogram(axes: Axes, rows: Rows, looks: dict[str, Look]) -> None:
    for row in rows:
        histogram = {int(accepted): count for accepted, count in row["accepted_histogram"].items()}
        xs = range(max(histogram) + 1)
        shares = [histogram.get(accepted, 0) / row["num_rounds"] for accepted in xs]
        _line(axes, xs, shares, looks[row["arm"]], row["arm"])
    axes.set_xlabel("accepted draft tokens in a round")
    axes.set_ylabel("share of rounds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_time(axes: Axes, rows: Rows, looks: dict[str, Look]) -> None:
    """Latency of a token by part, one bar an arm; arms from top to bottom."""
    colours = dict(zip(PARTS, ("#BBBBBB", *COLOURS, "#333333"), strict=True))
    lefts = [0.0] * len(rows)
    names = [row["arm"] for row in rows]
    for part in PARTS:
        widths = [max(0.0, row["time_split"][part]) * row["ms_per_token"] for row in rows]
        axes.barh(names, widths, left=lefts, label=part, color=colours[part], height=0.7)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_xlabel("latency a new token (ms)")
    axes.set_ylabel("arm")


def _draw_depths(axes: Axes, rows: Rows, looks: dict[str, Look]) -> None:
    for row in rows:
        shares = {
            depth: accepted / proposed
            for depth, (proposed, accepted) in enumerate(row["by_depth"], 1)
            if proposed >= MIN_ROUNDS
        }
        _line(axes, list(shares), list(shares.values()), looks[row["arm"]], row["arm"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("depth below the root (tokens)")
    axes.set_ylabel("accepted, share of rounds with a node there\nbelow the emitted path")
    axes.set_ylim(0, 1.02)


def _draw_reliability(axes: Axes, tables: Rows, looks: dict[str, Look]) -> None:
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--", label="calibrated")
    for table in tables:
        bins = [each for each in table["bins"] if each["count"] >= MIN_ROUNDS]
        xs, ys = ([each[key] for each in bins] for key in ("mean_probability", "accepted_share"))
        _line(axes, xs, ys, looks[table["arm"]], table["arm"])
    errors = [f"{table['arm']}: ECE {table['expected_calibration_error']:.3f}" for table in tables]
    axes.text(0.03, 0.97, "\n".join(errors), transform=axes.transAxes, va="top", fontsize=7)
    axes.set_xlabel("predicted probability, mean of a bin")
    axes.set_ylabel("accepted, share of nodes")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def _line(axes: Axes, xs: Any, ys: Any, look: Look, label: str) -> None:
    axes.plot(xs, ys, label=label, color=look.color, marker=look.marker, markersize=4, linewidth=1.2)


# -- cost curves ------------------------------------------------------------------------------------------------------


def write_costs_plot(path: Path, points: Sequence[Point], caption: str) -> None:
    """Draw latency against rows: the target's rounds on the left, a step of each source on the right."""
    names = list(dict.fromkeys(point.name for point in points))
    contexts = sorted({point.context for point in points})
    sides = [[TARGET], [name for name in names if name != TARGET]]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        figure.suptitle("What a round's verification and a drafting step take")
        panels = figure.subplots(1, 2)
        for panel, own, title in zip(panels, sides, ("verification (target)", "a step of a source"), strict=True):
            for number, name in enumerate(own):
                for shade, context in enumerate(contexts):
                    _draw_curve(
                        panel, [point for point in points if (point.name, point.context) == (name, context)],
                        f"{name}, context {context}", COLOURS[(number if name != TARGET else shade) % len(COLOURS)],
                        MARKERS[shade % len(MARKERS)],
                    )  # fmt: skip
            panel.set_title(title, fontsize=9)
            panel.set_xlabel("rows forwarded")
            panel.set_ylabel("latency (ms), median and quartiles")
            panel.set_ylim(bottom=0)
            if panel.get_legend_handles_labels()[0]:
                panel.legend(fontsize=8)
    _save(figure, path, caption)


def _draw_curve(axes: Axes, points: Sequence[Point], label: str, color: str, marker: str) -> None:
    if not points:
        return
    errors = [
        [point.median_ms - point.low_ms for point in points],
        [point.high_ms - point.median_ms for point in points],
    ]
    axes.errorbar(
        [point.rows for point in points], [point.median_ms for point in points], yerr=errors, label=label, color=color,
        marker=marker, markersize=4, linewidth=1.2, elinewidth=1.0, capsize=2,
    )  # fmt: skip
