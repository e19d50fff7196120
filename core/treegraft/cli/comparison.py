"""The same prompts through several pipelines, in turns: speed, calls, and whether the text is the same."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import attrs
from rich.table import Table

from treegraft.pipeline import Generation, Pipeline

REFERENCE = "plain"


@attrs.define
class Arm:
    """What one pipeline brought: a list of Generations, one a repeat, for each prompt."""

    name: str
    runs: list[list[Generation]]

    @property
    def last(self) -> list[Generation]:
        """The last repeat of each prompt."""
        return [runs[-1] for runs in self.runs]

    @property
    def num_rounds(self) -> int:
        """Rounds, in one pass over the prompts."""
        return sum(generation.num_rounds for generation in self.last)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the sum of each prompt's median time."""
        total_ms: float = sum(median(generation.latency_ms["total"] for generation in runs) for runs in self.runs)
        return sum(len(generation.token_ids) for generation in self.last) / total_ms * 1e3

    def a_round(self, count: Callable[[Generation], float]) -> float:
        """Mean over all rounds of what `count` says of a generation's rounds."""
        return sum(count(generation) * generation.num_rounds for generation in self.last) / max(self.num_rounds, 1)

    def calls(self, source: str) -> int:
        """Calls of a source, in one pass over the prompts."""
        return sum(generation.source_calls.get(source, 0) for generation in self.last)

    def same_as(self, other: "Arm") -> bool:
        """Whether every run brought the other's tokens."""
        return all(
            mine.token_ids == theirs[0].token_ids
            for ours, theirs in zip(self.runs, other.runs, strict=True)
            for mine in ours
        )


def compare(
    pipelines: Mapping[str, Pipeline], prompts: Sequence[str], max_new_tokens: int, repeats: int, max_seconds: float
) -> dict[str, Arm]:
    """Run every prompt through every pipeline, pipelines taking turns, `repeats` times or until the time is up.

    A turn that would overrun `max_seconds`, going by those before it, is not begun; the first always is.
    """
    turns = [index for _ in range(repeats) for index in range(len(prompts))]
    arms = {name: Arm(name, [[] for _ in prompts]) for name in pipelines}
    begin = time.perf_counter()
    for number, index in enumerate(turns):
        elapsed = time.perf_counter() - begin
        if number and elapsed * (number + 1) / number > max_seconds:
            break
        for name, pipeline in pipelines.items():
            arms[name].runs[index].append(pipeline.generate(prompts[index], max_new_tokens))
    return {name: Arm(name, [runs for runs in arm.runs if runs]) for name, arm in arms.items()}


def comparison_table(arms: Mapping[str, Arm], middle: str) -> Table:
    """A row for each arm, its speed beside the reference's."""
    reference = arms[REFERENCE]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("pipeline")
    for column in ("tokens/s", "ratio", "emitted", "accepted", "target calls", f"{middle} calls", "same text"):
        table.add_column(column, justify="right")
    for name, arm in arms.items():
        table.add_row(
            name,
            f"{arm.tokens_per_second:.1f}",
            f"{arm.tokens_per_second / reference.tokens_per_second:.2f}x",
            f"{arm.a_round(lambda generation: generation.emitted_per_round):.2f}",
            f"{arm.a_round(lambda generation: generation.accepted_per_round):.2f}",
            str(sum(generation.target_calls for generation in arm.last)),
            str(arm.calls(middle)),
            "yes" if arm.same_as(reference) else "no",
        )
    return table
