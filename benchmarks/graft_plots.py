"""The plots of docs/results/graft.md, from what `fit edges` and `fit budget` reported.

    python benchmarks/graft_plots.py EDGES/report.json BUDGET/report.json OUT

Writes edges.png (accepted length and mismatched edges against beta) and budgets.png (policies beside the best fixed
budget, under each cost table) to the folder OUT.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

COLOURS = {"tdes": "C0", "bigram": "C1"}
LINES = {"tests": "--", "library": "-"}
POLICIES = ("saba", "expected_gain", "oracle")


def main(edges: str, budgets: str, out: str) -> None:
    plot_edges(json.loads(Path(edges).read_text()), Path(out) / "edges.png")
    plot_budgets(json.loads(Path(budgets).read_text()), Path(out) / "budgets.png")


def plot_edges(rows: list[dict[str, Any]], path: Path) -> None:
    figure, (accepted, mismatched) = plt.subplots(1, 2, figsize=(10.8, 4.4), layout="constrained")
    for scorer, colour in COLOURS.items():
        for category, line in LINES.items():
            own = [row for row in rows if row["scorer"] in (scorer, "identity") and row["category"] == category]
            own.sort(key=lambda row: row["beta"])
            betas, ratios = [row["beta"] for row in own], [row["accepted_ratio"] for row in own]
            style = {"color": colour, "linestyle": line, "marker": ".", "label": f"{scorer}, {category}"}
            accepted.plot(betas, [ratio["value"] for ratio in ratios], **style)
            low, high = zip(*(ratio["interval"] for ratio in ratios), strict=True)
            accepted.fill_between(betas, low, high, color=colour, alpha=0.12)
            mismatched.plot(betas, [100 * row["mismatch_rate"] for row in own], **style)
    accepted.axhline(1.0, color="grey", linewidth=0.8)
    accepted.set(xlabel="beta", ylabel="accepted length, ratio to the drafter alone")
    mismatched.set(xlabel="beta", ylabel="mismatched edges (%)")
    accepted.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def plot_budgets(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    tables = list(dict.fromkeys(row["costs"] for row in rows))
    for place, policy in enumerate(POLICIES):
        own = {row["costs"]: row["to_fixed"] for row in rows if row["policy"] == policy and row["category"] == "all"}
        found = [own[costs] for costs in tables]
        values = [ratio["value"] for ratio in found]
        errors = [[value - ratio["interval"][0] for value, ratio in zip(values, found, strict=True)],
                  [ratio["interval"][1] - value for value, ratio in zip(values, found, strict=True)]]  # fmt: skip
        left = [number + 0.25 * (place - 1) for number in range(len(tables))]
        axes.bar(left, values, 0.24, yerr=errors, capsize=2, label=policy)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(tables)), tables)
    axes.set(ylabel="tokens/s, ratio to the best fixed budget", ylim=(0.9, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
