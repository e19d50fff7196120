"""From names on a command line to arms that share one target: what there is, what an override reaches, what fits."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from treegraft.bench.arms import Arm, PipelineArm
from treegraft.compose import Part, ResolvedPipeline, resolve
from treegraft.errors import ComposeError, suggest
from treegraft.interfaces import TargetModel
from treegraft.plugins import Plugins
from treegraft.registry import Registry

PLAIN = "plain"
AGAIN = "plain (again)"
"""The second plain arm, whose distance from the first is the noise of the measurement."""
RIVALS: dict[str, str] = {
    "hf_plain": "plain", "hf_prompt_lookup": "plain", "hf_assisted": "all_middle", "hf_dflash": "dflash_chain"
}  # fmt: skip
"""transformers' own arms, and the pipelines that draft with the models that they need."""
_EVERYWHERE = ("models", "target", "verifier")  # overrides that reach pipelines without sources too


@attrs.frozen
class Lineup:
    """The arms of a run before any model is loaded.

    Attributes:
        names: in the order asked for; `plain (again)` comes last where `plain` is among them.
        pipelines: by arm.
        base: the pipeline whose target all decode with.
        rivals: by transformers' arm among the names, a pipeline with the models that it needs.
    """

    names: tuple[str, ...]
    pipelines: dict[str, ResolvedPipeline]
    base: ResolvedPipeline
    rivals: dict[str, ResolvedPipeline]

    def mapped(self, change: Callable[[ResolvedPipeline], ResolvedPipeline]) -> "Lineup":
        """The same with every pipeline changed."""
        return attrs.evolve(
            self,
            pipelines={name: change(pipeline) for name, pipeline in self.pipelines.items()},
            base=change(self.base),
            rivals={name: change(pipeline) for name, pipeline in self.rivals.items()},
        )

    @property
    def models(self) -> dict[str, Any]:
        """Every model that is used, by name."""
        found: dict[str, Any] = dict(self.base.models)
        for pipeline in [*self.pipelines.values(), *self.rivals.values()]:
            found |= pipeline.models
        return found

    def build(self) -> tuple[TargetModel, list[Arm]]:
        """Load every model once, and make the arms: one target object serves all."""
        made: dict[str, Arm] = {}
        target: TargetModel | None = None
        for name, pipeline in self.pipelines.items():
            made[name] = arm = PipelineArm(pipeline, target, name)
            target = arm.pipeline.target
        if target is None:
            target = PipelineArm(self.base).pipeline.target
        if self.rivals:
            from treegraft_plugins.hf.rivals import rival  # transformers' part, where it is asked for

            made |= {name: rival(name, target, pipeline.models) for name, pipeline in self.rivals.items()}
        return target, [made[name] for name in self.names]


def resolve_arms(
    names: Sequence[str], overrides: Sequence[str], registry: Path | None, plugins: Plugins
) -> Lineup:  # fmt: skip
    """What the arms are; no model is loaded.

    Args:
        names: pipelines of the registry, and transformers' arms (`RIVALS`).
        overrides: `KEY=VALUE`. One of a source reaches the pipelines that have it, one of drafting those that draft,
            one of models, target or verifier all.
        registry, plugins: as for `resolve`.

    Raises:
        ComposeError: a name that is no arm, an override that reaches none, a pipeline that is not sound, or two arms
            that decode with different targets.
    """
    known = [*Registry.read(registry).concrete(), *RIVALS]
    for index, name in enumerate(names):
        if name not in known:
            raise ComposeError(
                "--arms", f"no arm named {name!r}.", f"Known: {', '.join(known)}.", suggest(name, known)
            )  # fmt: skip
        if name in names[:index]:
            raise ComposeError("--arms", f"{name!r} a second time", "Allowed: each arm once.")
    if not names:
        raise ComposeError("--arms", "no arm", f"Allowed: {', '.join(known)}.")
    own = [name for name in names if name not in RIVALS]
    everywhere = [text for text in overrides if _head(text)[0] in _EVERYWHERE]
    models = [text for text in everywhere if _head(text)[0] == "models"]

    find = partial(resolve, registry=registry, plugins=plugins)
    pipelines = {name: find(name, models) for name in own}
    if len(models) < len(overrides):
        _check_reach(overrides, pipelines)
        pipelines = {
            name: find(name, [text for text in overrides if _reaches(text, pipeline)])
            for name, pipeline in pipelines.items()
        }
    if PLAIN in pipelines:
        pipelines[AGAIN] = pipelines[PLAIN]
    base = pipelines[own[0]] if own else find(PLAIN, everywhere)
    _check_targets(base, pipelines)
    rivals = {name: find(RIVALS[name], models) for name in names if name in RIVALS}
    return Lineup((*names, AGAIN) if PLAIN in names else tuple(names), pipelines, base, rivals)


def _head(override: str) -> list[str]:
    """`sources`, `small`, ... of `sources.small.width=4`."""
    return override.partition("=")[0].strip().split(".")


def _reaches(override: str, pipeline: ResolvedPipeline) -> bool:
    head = _head(override)
    if head[0] == "sources" and len(head) > 1:
        return head[1] in pipeline.sources
    return head[0] in _EVERYWHERE or bool(pipeline.sources)


def _check_reach(overrides: Sequence[str], pipelines: dict[str, ResolvedPipeline]) -> None:
    sources = sorted({name for pipeline in pipelines.values() for name in pipeline.sources})
    for text in overrides:
        head = _head(text)
        if head[0] in _EVERYWHERE or any(_reaches(text, pipeline) for pipeline in pipelines.values()):
            continue
        if head[0] == "sources" and len(head) > 1:
            raise ComposeError(
                f"override {text!r}", f"no arm has a source named {head[1]!r}.",
                f"Sources: {', '.join(sources) or 'none'}.", suggest(head[1], sources),
            )  # fmt: skip
        raise ComposeError(
            f"override {text!r}", "no arm that it could change",
            "Allowed: models.NAME=PATH for any arm, a path inside a pipeline where one that drafts is among the arms.",
        )  # fmt: skip


def _check_targets(base: ResolvedPipeline, pipelines: dict[str, ResolvedPipeline]) -> None:
    def key(resolved: ResolvedPipeline) -> tuple[Any, ...]:
        part: Part = resolved.parts["target"]
        return part.use, part.arguments, resolved.models.get(part.model or "")

    for name, pipeline in pipelines.items():
        if key(pipeline) != key(base):
            raise ComposeError(
                f"pipelines.{name}.target", f"another target than that of {base.name}",
                "Arms are compared on one target; models.target=PATH changes that of all.",
            )  # fmt: skip
