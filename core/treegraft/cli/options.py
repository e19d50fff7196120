"""What several commands take: a pipeline with overrides, and where to find it."""

import json
import math
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


class Finite(click.FloatRange):
    """A number in a range, none that is not one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def finite(suits: Callable[[float], bool]) -> Callable[[str], float]:
    """Reads a finite number that suits, for `Listed`."""

    def read(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and suits(value)):
            raise ValueError(text)
        return value

    return read


TEMPERATURES = Listed(finite(lambda value: value >= 0), "a list of finite numbers >= 0")


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


def model_options(command: Command) -> Command:
    """Adds `--dtype D --device D --registry FILE --plugin MODULE`."""
    dtype = click.option("--dtype", help="Of every model that does not say its own: float32, bfloat16, ...")
    device = click.option("--device", help="Of every model that does not say its own: cpu, cuda, cuda:1, ...")
    return dtype(device(registry_options(command)))


def prompt_options(command: Command) -> Command:
    """Adds `--chat --limit N --per-task N`: how prompts are read from files."""
    chat = click.option("--chat", is_flag=True, help="Put each prompt as a user's message into the chat template.")
    limit = click.option(
        "--limit", type=click.IntRange(min=1), help="Take the first so many prompts of each file."
    )  # fmt: skip
    per_task = click.option("--per-task", type=click.IntRange(min=1), help="Of those, so many of each task.")
    return chat(limit(per_task(command)))


def pipeline_options(command: Command) -> Command:
    """Adds `PIPELINE [KEY=VALUE ...] --registry FILE --plugin MODULE`, which `resolve_options` reads."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
    return click.argument("pipeline")(overrides(registry_options(command)))


def costs_of(file: Path) -> str:
    """The override that takes a cost table from a file."""
    return f"costs={{use: file, path: {json.dumps(str(file))}}}"


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
