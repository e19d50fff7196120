"""What edge scorers are worth against beta: mismatched edges, accepted length, modelled throughput, by kind of text.

Every figure is of live rounds with the target's own verification, on the same prompts. Under match verification the
text does not depend on the tree, so that scorers are compared on the same text, prompt by prompt.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from treegraft.bench.intervals import Ratio, Work, ratio
from treegraft.bench.report import markdown_table, ratio_text
from treegraft.interfaces import EdgeScorer
from treegraft.pipeline import Pipeline
from treegraft.replay import Outcome, outcome_of
from treegraft.statistics import CostModel
from treegraft_plugins.blocktree.distil.traces import mismatches, watched_rounds
from treegraft_plugins.collection import Arrays, Text

ALL = "all"
TIED = 0.01
"""Share of the accepted length by which a few prompts cannot tell one beta from another."""
COLUMNS = ("mismatched", "edges", "emitted", "rounds", "ms")


def judged(
    pipeline: Pipeline,
    scorer: EdgeScorer,
    text: Text,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    costs: CostModel,
) -> Arrays:
    """What a scorer comes to on one text, as the columns of `COLUMNS`: mismatched edges, edges, tokens, rounds, ms."""
    wrong = edges = 0
    total = Outcome()
    for record, scores in watched_rounds(pipeline, scorer, text, max_new_tokens, temperature, seed):
        found = mismatches(record.pruned, scores)
        wrong, edges = wrong + found[0], edges + found[1]
        total += outcome_of([record], costs)
    return {"figures": np.array([wrong, edges, total.num_emitted, total.num_rounds, total.modelled_ms], np.float64)}


@attrs.frozen(eq=False)
class Judgement:
    """A scorer at one beta, over the texts that all of them are judged on.

    Attributes:
        scorer: "identity", "bigram" or "tdes".
        beta: 0 for the identity.
        figures: float64 [N, 5], a row a text, columns as in `COLUMNS`.
    """

    scorer: str
    beta: float
    figures: Any

    def sums(self, rows: Any) -> Mapping[str, float]:
        """Totals over the texts `rows`."""
        return dict(zip(COLUMNS, self.figures[rows].sum(0).tolist(), strict=True))

    def mismatched(self, rows: Any) -> float:
        """Share of the edges that are mismatched."""
        sums = self.sums(rows)
        return sums["mismatched"] / max(sums["edges"], 1.0)

    def accepted(self, rows: Any) -> float:
        """Mean tokens emitted a round, the target's own included."""
        sums = self.sums(rows)
        return sums["emitted"] / sums["rounds"] if sums["rounds"] else 0.0


def best(judgements: Sequence[Judgement], scorer: str) -> Judgement:
    """The judgement of a scorer, the identity being every scorer's at beta = 0, to take.

    Of those whose accepted length is the greatest or within `TIED` of it, the one with the fewest mismatched edges.
    """
    everything = slice(None)
    own = [each for each in judgements if each.scorer in (scorer, "identity")]
    least = (1.0 - TIED) * max(each.accepted(everything) for each in own)
    tied = [each for each in own if each.accepted(everything) >= least]
    return min(tied, key=lambda each: (each.mismatched(everything), each.beta))


def rows(judgements: Sequence[Judgement], categories: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each judgement and kind of text, `all` of them first, each beside the identity on the same texts."""
    of = np.array(categories)
    (identity,) = (each for each in judgements if each.scorer == "identity")
    found = []
    for category in (ALL, *dict.fromkeys(categories)):
        own = np.ones(len(of), bool) if category == ALL else of == category
        base_rate = identity.mismatched(own)
        for each in judgements:
            sums, rate = each.sums(own), each.mismatched(own)
            length, speed = _ratio(each, identity, own, "rounds"), _ratio(each, identity, own, "ms")
            found.append(
                {
                    "category": category,
                    "scorer": each.scorer,
                    "beta": each.beta,
                    "mismatch_rate": rate,
                    "mismatch_change": rate / base_rate - 1.0 if base_rate else 0.0,
                    "accepted": each.accepted(own),
                    "accepted_ratio": attrs.asdict(length),
                    "tokens_per_second": sums["emitted"] / sums["ms"] * 1e3 if sums["ms"] else None,
                    "speed_ratio": attrs.asdict(speed),
                    "num_texts": int(own.sum()),
                }
            )
    return found


def _ratio(each: Judgement, identity: Judgement, own: Any, per: str) -> Ratio:
    """Tokens for each round or ms, over the identity's, with an interval over the texts."""

    def work(judgement: Judgement) -> Work:
        emitted, taken = (judgement.figures[own, COLUMNS.index(name)] for name in ("emitted", per))
        return Work(emitted[None], taken[None])

    return ratio(work(each), work(identity))


def write_report(folder: Path, found: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> Path:
    """report.json with all `rows` and report.md for a reader, `lines` at its head; returns the latter."""
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    columns = ("scorer", "beta", "mismatched edges", "change", "accepted", "to identity", "tokens/s", "to identity")
    text = ["# Edge scorers", "", *lines]
    for category in dict.fromkeys(row["category"] for row in found):
        own = [row for row in found if row["category"] == category]
        text += ["", f"## {category} ({own[0]['num_texts']} texts)", ""]
        text.append(markdown_table(columns, [_cells(row) for row in own]))
    text += [
        "",
        "*Mismatched* are edges, below the first depth, to a token that the target says next under another node of the",
        "parent's depth, but not under this parent. *Accepted* is the mean of tokens emitted a round, the target's own",
        "included; *to identity* are ratios to the drafter's own probabilities on the same texts, with 95 % intervals",
        "over texts. Tokens a second are modelled by the run's cost table, which knows of no time that scorers take.",
    ]
    path = folder / "report.md"
    path.write_text("\n".join(text) + "\n")
    return path


def _cells(row: Mapping[str, Any]) -> list[str]:
    speed = row["tokens_per_second"]
    return [
        row["scorer"], f"{row['beta']:g}", f"{row['mismatch_rate']:.2%}", f"{row['mismatch_change']:+.0%}",
        f"{row['accepted']:.3f}", ratio_text(row["accepted_ratio"]), "-" if speed is None else f"{speed:.1f}",
        ratio_text(row["speed_ratio"]),
    ]  # fmt: skip
