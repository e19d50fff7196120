"""What several commands take: a pipeline with overrides, and where to find it."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from treegraft.compose import ResolvedPipeline, resolve
from treegraft.plugins import Plugins, load_plugins

Command = Callable[..., Any]


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Values between commas, each of which another type reads, none twice."""

    name = "list"

    def __init__(self, of: Callable[[str], Any], allowed: str):
        self._of, self._allowed = of, allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            values = tuple(self._of(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            values = ()
        if not values:
            self.fail(f"{value!r} is not {self._allowed}.", param, ctx)
        if len(set(values)) < len(values):
            self.fail(f"{value!r} names something twice.", param, ctx)
        return values


def plugin_option(command: Command) -> Command:
    """Adds `--plugin MODULE`, which may be repeated."""
    return click.option(
        "--plugin", "modules", multiple=True, metavar="MODULE", help="Load an unpackaged plugin; may be repeated."
    )(command)


def registry_options(command: Command) -> Command:
    """Adds `--registry FILE --plugin MODULE`."""
    return click.option(
        "--registry", type=click.Path(path_type=Path), metavar="FILE",
        help="Registry file laid over the packaged one.  [default: ./registry.yaml, if there is one]",
    )(plugin_option(command))  # fmt: skip


def pipeline_options(command: Command) -> Command:
    """Adds `PIPELINE [KEY=VALUE ...] --registry FILE --plugin MODULE`, which `resolve_options` reads."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
    return click.argument("pipeline")(overrides(registry_options(command)))


def resolve_options(
    pipeline: str, overrides: Sequence[str], registry: Path | None, modules: Sequence[str]
) -> ResolvedPipeline:
    """The pipeline that a command line asks for; no model is loaded."""
    return resolve(pipeline, overrides, registry=registry, plugins=plugins_from_here(modules))


def plugins_from_here(modules: Sequence[str]) -> Plugins:
    """The installed plugins and `modules`, which may lie in the working directory."""
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that nothing there shadows an installed package
    return load_plugins(modules)
