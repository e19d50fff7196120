"""A pipeline's twin that replays what the pipeline's target has decoded."""

import attrs

from treegraft.compose import ResolvedPipeline
from treegraft.interfaces import Drafter
from treegraft.pipeline import Pipeline
from treegraft.replay import ReplayTarget
from treegraft.replay.recording import check_verifier
from treegraft.statistics import CostModel


def drafters(pipeline: Pipeline) -> dict[str, Drafter]:
    """By key path."""
    return {f"sources.{source.name}.draft": source.drafter for source in pipeline.sources}


def check_replayable(resolved: ResolvedPipeline) -> None:
    """Refuse a pipeline that no recording can stand for, before a model is loaded.

    Raises:
        RequestError: its text depends on its trees.
    """
    verifier = resolved.parts["verifier"]
    check_verifier(resolved.name, verifier.cls, repr(verifier.use))


def replaying(resolved: ResolvedPipeline, live: Pipeline, costs: CostModel) -> ResolvedPipeline:
    """The pipeline with `live`'s drafters, fixed costs, and a target that replays what `live`'s has decoded."""
    given = {"target": ReplayTarget(live.target), "costs": costs, **drafters(live)}
    parts = {path: attrs.evolve(part, given=given.get(path, part.given)) for path, part in resolved.parts.items()}
    return attrs.evolve(resolved, parts=parts)
