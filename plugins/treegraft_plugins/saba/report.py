"""What budgets are worth on the same rounds: the fitted one, the training-free rule, the best fixed one, the oracle."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from treegraft.bench.intervals import Work, ratio
from treegraft.bench.report import markdown_table, ratio_text
from treegraft.statistics import CostModel
from treegraft.tree import Floats, Ints
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.saba.fit import columns
from treegraft_plugins.saba.labels import Labels
from treegraft_plugins.saba.model import GainModel

ALL = "all"
SETTLED = 4  # passes until choices and the rate that they reach agree
OWN = "own"


def cost_shapes(own: FixedCosts, most: int) -> dict[str, FixedCosts]:
    """The pipeline's own table, and three with its target latency at one row and other shapes beyond.

    Args:
        own: the table of the run.
        most: B, the most nodes.

    Returns:
        "own"; "flat", as on a GPU, where B more rows cost a tenth; "kinked", where the rows beyond a quarter of B cost
        the first row's latency a quarter of B each; "linear", where each row costs a tenth of the first.
    """
    first = float(own.target_ms(1, 0))
    knee = max(most // 4, 1)
    curves = {
        "flat": {1: first, most + 2: 1.1 * first},
        "kinked": {1: first, knee + 1: 1.05 * first, most + 2: (1.05 + (most + 1 - knee) / knee) * first},
        "linear": {1: first, most + 2: (1.0 + 0.1 * (most + 1)) * first},
    }
    return {OWN: own} | {name: attrs.evolve(own, target=curve) for name, curve in curves.items()}


@attrs.frozen(eq=False)
class Costed:
    """Labels under one cost table.

    Attributes:
        labels: N rounds.
        nodes: int64 [N, G], nodes that each budget of the grid verifies in each round.
        emitted, ms: float64 [N, G], what that brings and takes.
        costs, sources: the table, and the names of the pipeline's sources.
    """

    labels: Labels
    nodes: Ints
    emitted: Floats
    ms: Floats
    costs: CostModel
    sources: Sequence[str]

    @classmethod
    def of(cls, labels: Labels, budgets: Ints, costs: CostModel, sources: Sequence[str]) -> "Costed":
        nodes = np.minimum(budgets, labels.num_nodes[:, None])
        emitted = labels.emitted(nodes).astype(np.float64)
        return cls(labels, nodes, emitted, labels.ms(costs, sources, nodes), costs, sources)

    def totals(self, nodes: Ints) -> tuple[Floats, Floats]:
        """Tokens and ms [N] where `nodes` [N] are verified."""
        nodes = np.minimum(nodes, self.labels.num_nodes)
        return self.labels.emitted(nodes).astype(np.float64), self.labels.ms(self.costs, self.sources, nodes)

    # -- policies: the nodes [N] that each verifies -------------------------------------------------------------------

    def fixed(self) -> int:
        """The index of the budget with the most tokens per ms over all rounds."""
        return int((self.emitted.sum(0) / self.ms.sum(0)).argmax())

    def expected_gain(self) -> Ints:
        """The training-free rule's choice."""
        every = np.broadcast_to(np.arange(self.labels.expected.shape[1]), self.labels.expected.shape)
        nodes = np.minimum(every, self.labels.num_nodes[:, None])
        ms = self.labels.ms(self.costs, self.sources, nodes)
        return _at(nodes, ((1.0 + self.labels.expected) / ms).argmax(-1))

    def saba(self, model: GainModel) -> tuple[Ints, Floats]:
        """The model's choice, and the draft tokens that it expects of it; the rule's where a signal is missing.

        Time earns in every text what these choices make of it, as a request finds out by itself.
        """
        choose = self.saba_by_rate(model)
        nodes, gain = choose(self._rates(self.expected_gain()))
        for _ in range(SETTLED):
            nodes, gain = choose(self._rates(nodes))
        return nodes, gain

    def saba_by_rate(self, model: GainModel) -> Callable[[Floats], tuple[Ints, Floats]]:
        """The same as a function of what time earns, [N] tokens per ms."""
        x = columns(self.labels, model.names)
        missing = np.isnan(x).any(-1)
        gains = model(np.where(missing[:, None], 0.0, x), self.labels.expecting(self.nodes))
        rule = self.expected_gain()
        expected = _at(self.labels.expected, rule)

        def choose(rate: Floats) -> tuple[Ints, Floats]:
            best = (gains - rate[:, None] * self.ms).argmax(-1)
            return np.where(missing, rule, _at(self.nodes, best)), np.where(missing, expected, _at(gains, best))

        return choose

    def _rates(self, nodes: Ints) -> Floats:
        """float64 [N]: tokens per ms of each round's text where `nodes` [N] are verified."""
        _, text = np.unique(self.labels.text, return_inverse=True)
        emitted, ms = (np.bincount(text, values) for values in self.totals(nodes))
        rates: Floats = (emitted / ms)[text]
        return rates

    def oracle(self) -> Ints:
        """In hindsight, the budgets of the grid that together make the most tokens per ms.

        Dinkelbach: a round's best budget at rate r maximises emitted - r * ms; r is raised until it stands.
        """
        rate = float((self.emitted.sum(0) / self.ms.sum(0)).max())
        while True:
            best = (self.emitted - rate * self.ms).argmax(-1)
            raised = float(_at(self.emitted, best).sum() / _at(self.ms, best).sum())
            if raised <= rate * (1 + 1e-12):
                return _at(self.nodes, best)
            rate = raised


def _at(values: Any, index: Ints) -> Any:
    return values[np.arange(len(index)), index]


def rows(
    labels: Labels,
    validation: Labels,
    budgets: Ints,
    model: GainModel,
    tables: Mapping[str, CostModel],
    sources: Sequence[str],
    categories: Sequence[str],
) -> list[dict[str, Any]]:
    """A row for each cost table, kind of text and policy.

    Args:
        labels: held-out rounds.
        validation: rounds that the best fixed budget is chosen on.
        budgets: int [G], the grid.
        model: fitted to neither.
        tables: by name.
        sources: the names of the pipeline's sources.
        categories: of each text.
    """
    found = []
    for table, costs in tables.items():
        place, other = (Costed.of(each, budgets, costs, sources) for each in (labels, validation))
        best = int(budgets[other.fixed()])
        policies = {
            "saba": place.saba(model)[0],
            "expected_gain": place.expected_gain(),
            f"fixed {best}": np.full(len(labels), best),
            "oracle": place.oracle(),
        }
        totals = {name: place.totals(nodes) for name, nodes in policies.items()}
        kinds = np.array(categories)[labels.text]
        for category in (ALL, *dict.fromkeys(categories)):
            own = np.ones(len(labels), bool) if category == ALL else kinds == category
            if own.any():
                found += _rows_of(table, category, labels, own, policies, totals, f"fixed {best}")
    return found


def _rows_of(
    table: str,
    category: str,
    labels: Labels,
    own: Any,
    policies: Mapping[str, Ints],
    totals: Mapping[str, tuple[Floats, Floats]],
    base: str,
) -> Iterator[dict[str, Any]]:
    oracle_emitted, oracle_ms = totals["oracle"]
    oracle_rate = oracle_emitted[own].sum() / oracle_ms[own].sum()
    for name, (emitted, ms) in totals.items():
        rate = emitted[own].sum() / ms[own].sum()
        near = emitted[own] / ms[own] >= 0.95 * oracle_emitted[own] / oracle_ms[own]
        yield {
            "costs": table,
            "category": category,
            "policy": name,
            "tokens_per_second": float(rate * 1e3),
            "emitted": float(emitted[own].mean()),
            "nodes": float(np.minimum(policies[name], labels.num_nodes)[own].mean()),
            "of_oracle": float(rate / oracle_rate),
            "rounds_near_oracle": float(near.mean()),
            "to_fixed": attrs.asdict(ratio(_work(labels, own, emitted, ms), _work(labels, own, *totals[base]))),
            "num_rounds": int(own.sum()),
        }


def _work(labels: Labels, own: Any, emitted: Floats, ms: Floats) -> Work:
    """By text."""
    texts = np.unique(labels.text[own])
    sums = [
        np.array([[values[own & (labels.text == text)].sum() for text in texts]]) for values in (emitted, ms)
    ]  # fmt: skip
    return Work(*sums)


def round_lines(place: Costed, model: GainModel, ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each round with what was chosen, expected and accepted, and the oracle's choice.

    Args:
        place: rounds under a cost table.
        model: the fitted one.
        ids: of each text.
    """
    nodes, gain = place.saba(model)
    emitted, ms = place.totals(nodes)
    oracle = place.oracle()
    for number in range(len(place.labels)):
        yield {
            "id": ids[place.labels.text[number]], "position": int(place.labels.position[number]),
            "budget": int(nodes[number]), "expected_accepted": float(gain[number]), "expected_ms": float(ms[number]),
            "emitted": int(emitted[number]), "oracle_budget": int(oracle[number]),
        }  # fmt: skip


def write_report(
    folder: Path, found: Sequence[Mapping[str, Any]], rounds: Iterator[Mapping[str, Any]], lines: Sequence[str]
) -> Path:
    """report.json with all `rows`, rounds.jsonl with `round_lines`, and report.md for a reader; returns the last."""
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    text = ["# Budgets", "", *lines]
    columns = ("policy", "tokens/s", "to fixed", "of oracle", "rounds near it", "nodes", "emitted")
    for table, category in dict.fromkeys((row["costs"], row["category"]) for row in found):
        own = [row for row in found if (row["costs"], row["category"]) == (table, category)]
        text += ["", f"## {table} costs, {category} ({own[0]['num_rounds']} rounds)", ""]
        text.append(markdown_table(columns, [_cells(row) for row in own]))
    text += [
        "",
        "Policies choose in the same rounds; latencies include drafting. *Fixed* is the budget that was best on the",
        "validation prompts, *to fixed* the ratio to it with a 95 % interval over texts; *oracle* the choice in",
        "hindsight that makes the most tokens a second; *rounds near it* those that reach 95 % of its rate.",
    ]
    path = folder / "report.md"
    path.write_text("\n".join(text) + "\n")
    return path


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["policy"], f"{row['tokens_per_second']:.1f}", ratio_text(row["to_fixed"]), f"{row['of_oracle']:.1%}",
        f"{row['rounds_near_oracle']:.0%}", f"{row['nodes']:.1f}", f"{row['emitted']:.3f}",
    ]  # fmt: skip
