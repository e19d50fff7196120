"""From prompts to fitted edge scorers and their report, step by step; each step goes on where it was interrupted."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from treegraft.interfaces import EdgeScorer
from treegraft.pipeline import Pipeline
from treegraft.statistics import CostModel
from treegraft_plugins.blocktree.distil import report
from treegraft_plugins.blocktree.distil.report import Judgement
from treegraft_plugins.blocktree.distil.traces import Traces, traced
from treegraft_plugins.blocktree.distil.training import (
    BIGRAM_FILE,
    TDES_FILE,
    Distillation,
    Pupil,
    TowersNetwork,
    fit_bigram,
)
from treegraft_plugins.blocktree.edges import FORMAT, CompatibilityScorer, IdentityScorer, Towers
from treegraft_plugins.collection import Collection, Progress, Text, cell_name, kept_apart, require_apart, texts_hash
from treegraft_plugins.fitted import save, versions
from treegraft_plugins.hf.training.loop import Schedule, Trainer

PAPERS_BETA = 0.2


@attrs.frozen(kw_only=True)
class EdgeFit:
    """Everything a fit of edge scorers is given.

    Args:
        pipeline: with one source, whose drafter takes an edge scorer, and a fixed budget; the source's own scorer is
            not used.
        texts: prompts to fit to; every eighth is kept from the fit, to choose beta by.
        held_out: prompts to report on.
        max_new_tokens, temperatures, seed: of the continuations.
        betas: > 0, to choose from.
        distillation, schedule: what the towers are taught, and how long.
        costs: the table for modelled throughput.
        settings: what else traces depend on, as JSON has it.
        out: the folder of weights, traces, checkpoint, curve and report.
        progress, say: where progress and lines go.
    """

    pipeline: Pipeline
    texts: Sequence[Text]
    held_out: Sequence[Text]
    max_new_tokens: int
    temperatures: Sequence[float]
    seed: int
    betas: Sequence[float]
    distillation: Distillation
    schedule: Schedule
    costs: CostModel
    settings: Mapping[str, Any]
    out: Path
    progress: Progress
    say: Callable[[str], None]

    def run(self) -> Path:
        """Fit, choose beta, report; returns the report's path.

        Raises:
            RequestError: too few prompts, some that are held out too, or a folder of another fit.
        """
        fitting, validation = kept_apart(self.texts)
        require_apart(self.texts, self.held_out)
        (source,), target = self.pipeline.sources, self.pipeline.target
        traces, unseen = (self._traces(what, texts) for what, texts in (("fit", fitting), ("validation", validation)))
        self.say(f"{len(traces)} drafted parents to fit to, {len(unseen)} to validate on")
        header = {
            "format": FORMAT, "target": target.model_name, "drafter": source.drafter.model_name,
            "vocabulary": target.vocab_size, "beta": PAPERS_BETA, "versions": versions(),
        }  # fmt: skip
        bigram = fit_bigram(traces, target.vocab_size)
        network = self._towers(Pupil.of(traces, target), Pupil.of(unseen, target), {**header, "kind": "tdes"})
        tables = {"bigram": bigram, "tdes": Towers.of(network.arrays(), target)}
        files = {"bigram": BIGRAM_FILE, "tdes": TDES_FILE}
        weights = {"bigram": {"pairs": bigram.pairs, "gain": bigram.gain}, "tdes": network.arrays()}
        digest = hashlib.sha256(b"".join(array.tobytes() for each in weights.values() for array in each.values()))
        lines = [f"Fitted to {len(traces)} drafted parents in {len(fitting)} prompts of: {_kinds(fitting)}.", ""]
        scorers: dict[tuple[str, float], EdgeScorer] = {("identity", 0.0): IdentityScorer()}
        scorers |= {
            (kind, beta): CompatibilityScorer(table, beta) for kind, table in tables.items() for beta in self.betas
        }
        chosen = self._judged("validating", validation, scorers, digest.hexdigest())
        for kind in tables:
            beta = report.best(chosen, kind).beta
            save(self.out / files[kind], weights[kind], {**header, "kind": kind, "beta": beta})
            found = f"beta {beta:g} is the best" if beta else "no beta beats the drafter alone"
            lines.append(f"- {kind}: {found} on {len(validation)} other prompts.")
        judged = self._judged("reporting", self.held_out, scorers, digest.hexdigest())
        kinds = [text.category for text in self.held_out for _ in self.temperatures]
        return report.write_report(self.out, report.rows(judged, kinds), lines)

    def _traces(self, what: str, texts: Sequence[Text]) -> Traces:
        cells = self._cells(texts)

        def make(number: int) -> Any:
            text, temperature = cells[number]
            return traced(self.pipeline, text, self.max_new_tokens, temperature, self.seed)

        collection = Collection(self.out / "traces" / what, {**self.settings, "texts": texts_hash(texts)})
        return Traces.joined(collection.parts(f"tracing ({what})", _names(cells), make, self.progress))

    def _towers(self, pupil: Pupil, unseen: Pupil, header: Mapping[str, Any]) -> TowersNetwork:
        """The trained towers."""
        with torch.random.fork_rng():
            torch.manual_seed(self.schedule.seed)
            network = TowersNetwork(
                pupil.embedded.shape[1], pupil.traces.tokens.shape[1], self.distillation.rank, header
            )  # fmt: skip

        def loss(rng: np.random.Generator) -> torch.Tensor:
            batch = pupil.sample(rng, self.distillation.batch)
            return self.distillation.loss(network(batch.place, batch.parent, batch.children), batch)

        settings = {**self.settings, "texts": texts_hash(self.texts), "distillation": attrs.asdict(self.distillation)}
        trainer = Trainer(network, self.schedule, settings, self.out, self.say)
        trainer.resume()
        trainer.run(loss, lambda: unseen.measured(network))
        return network.eval()

    def _judged(
        self, what: str, texts: Sequence[Text], scorers: Mapping[tuple[str, float], EdgeScorer], digest: str
    ) -> list[Judgement]:
        cells = self._cells(texts)
        settings = {**self.settings, "texts": texts_hash(texts), "weights": digest}
        collection = Collection(self.out / what, settings)
        places = [(kind, beta, number) for kind, beta in scorers for number in range(len(cells))]
        names = [f"{kind}-{beta:g}-{name}" for kind, beta in scorers for name in _names(cells)]

        def make(place: int) -> Any:
            kind, beta, number = places[place]
            text, temperature = cells[number]
            return report.judged(
                self.pipeline, scorers[kind, beta], text, self.max_new_tokens, temperature, self.seed, self.costs
            )  # fmt: skip

        parts = collection.parts(what, names, make, self.progress)
        figures = np.array([part["figures"] for part in parts]).reshape(len(scorers), len(cells), -1)
        return [Judgement(kind, beta, figures[index]) for index, (kind, beta) in enumerate(scorers)]

    def _cells(self, texts: Sequence[Text]) -> list[tuple[Text, float]]:
        return [(text, temperature) for text in texts for temperature in self.temperatures]


def _names(cells: Sequence[tuple[Text, float]]) -> list[str]:
    return [cell_name(text, temperature) for text, temperature in cells]


def _kinds(texts: Sequence[Text]) -> str:
    return ", ".join(dict.fromkeys(text.category for text in texts))
