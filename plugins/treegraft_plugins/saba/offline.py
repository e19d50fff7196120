"""From prompts to a fitted budget and its report; labels go on where they were interrupted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from treegraft.interfaces import Setting, TargetModel
from treegraft.pipeline import Pipeline
from treegraft.replay.recording import record, wants_of
from treegraft.sampling import SamplingOptions
from treegraft_plugins.collection import Collection, Progress, Text, cell_name, kept_apart, require_apart, texts_hash
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.fitted import save, versions
from treegraft_plugins.saba import report
from treegraft_plugins.saba.budget import COARSE, FORMAT, GRID, below, described
from treegraft_plugins.saba.fit import fit_gain
from treegraft_plugins.saba.labels import Labels, labelled

SABA_FILE = "saba.safetensors"


@attrs.frozen(kw_only=True)
class BudgetFit:
    """Everything a fit of the state-aware budget is given.

    Args:
        target: decodes the texts.
        pipeline: loaded with a ReplayTarget and fixed costs.
        setting: of the pipeline, for the weights' header.
        texts: prompts to fit to; every eighth is kept from the fit, to choose the best fixed budget by.
        held_out: prompts to report on.
        max_new_tokens, temperatures, seed: of the continuations.
        num_steps: of the fit.
        costs: the pipeline's own table.
        settings: what else labels depend on, as JSON has it.
        out: the folder of weights, labels and report.
        progress: called with (what is being done, how much is done, how much there is).
    """

    target: TargetModel
    pipeline: Pipeline
    setting: Setting
    texts: Sequence[Text]
    held_out: Sequence[Text]
    max_new_tokens: int
    temperatures: Sequence[float]
    seed: int
    num_steps: int
    costs: FixedCosts
    settings: Mapping[str, Any]
    out: Path
    progress: Progress

    def run(self) -> Path:
        """Label, fit, report; returns the report's path.

        Raises:
            RequestError: too few prompts, some that are held out too, or a folder of another fit.
        """
        fitting, validation = kept_apart(self.texts)
        require_apart(self.texts, self.held_out)
        sets = {"fit": fitting, "validation": validation, "held out": self.held_out}
        labels = {what: self._labels(what, texts) for what, texts in sets.items()}
        most, sources = self.pipeline.parts.budget.max_verify_nodes, [source.name for source in self.pipeline.sources]
        budgets = np.array(below(GRID, most))
        self.progress("fitting", 0, 1)
        model = fit_gain(labels["fit"], np.array(below(COARSE, most)), num_steps=self.num_steps, seed=self.seed)
        self.progress("fitting", 1, 1)
        header = {"kind": "saba", "format": FORMAT, "signals": model.names, "versions": versions()}
        save(self.out / SABA_FILE, model.arrays, header | described(self.setting))
        found = report.rows(
            labels["held out"], labels["validation"], budgets, model, report.cost_shapes(self.costs, most), sources,
            [text.category for text in self.held_out for _ in self.temperatures],
        )  # fmt: skip
        kinds = ", ".join(dict.fromkeys(text.category for text in fitting))
        lines = [
            f"Fitted to {len(labels['fit'])} rounds in {len(fitting)} prompts of: {kinds}.",
            f"Signals: {', '.join(model.names)}.",
        ]
        place = report.Costed.of(labels["held out"], budgets, self.costs, sources)
        ids = [text.id for text in self.held_out for _ in self.temperatures]
        return report.write_report(self.out, found, report.round_lines(place, model, ids), lines)

    def _labels(self, what: str, texts: Sequence[Text]) -> Labels:
        cells = [(text, temperature) for text in texts for temperature in self.temperatures]
        budgets = np.array(below(COARSE, self.pipeline.parts.budget.max_verify_nodes))
        wants = wants_of([self.pipeline])

        def make(number: int) -> Any:
            text, temperature = cells[number]
            recording = record(
                self.target, text.token_ids, self.max_new_tokens, SamplingOptions(temperature), self.seed, wants
            )  # fmt: skip
            return labelled(self.pipeline, recording, budgets, np.random.default_rng((self.seed, number)))

        collection = Collection(
            self.out / "labels" / what.replace(" ", "_"), {**self.settings, "texts": texts_hash(texts)}
        )
        names = [cell_name(text, temperature) for text, temperature in cells]
        return Labels.joined(collection.parts(f"labelling ({what})", names, make, self.progress))
