"""`treegraft show`: a pipeline as it comes out of files, inheritance and overrides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from omegaconf import OmegaConf

from treegraft.cli.options import pipeline_options, resolve_options
from treegraft.cli.tables import table
from treegraft.compose import ResolvedPipeline
from treegraft.interfaces import ModelSpec


@click.command()
@pipeline_options
def show(pipeline: str, overrides: Sequence[str], registry: Path | None, modules: Sequence[str]) -> None:
    """Show a pipeline, resolved: itself, the files that took part, who provides each part.

    What is shown is a registry file again; no model is loaded.
    """
    resolved = resolve_options(pipeline, overrides, registry, modules)
    click.echo(_yaml(resolved))
    rows = [
        (path, part.use, f"{part.cls.__module__}.{part.cls.__qualname__}", str(part.provider))
        for path, part in resolved.parts.items()
    ]
    facts = [f"file: {file}" for file in resolved.files]
    facts += [f"{path}: {note}" for path, note in resolved.notes.items()]
    facts.append(f"lossless: {'yes' if resolved.lossless else 'no'}")
    for line in [*facts, "", *table(("part", "use", "class", "provided by"), rows)]:
        click.echo(f"# {line}".rstrip())
    for failure in resolved.plugins.failures:
        click.echo(f"not loaded: {failure}", err=True)


def _yaml(resolved: ResolvedPipeline) -> str:
    content = {
        "models": {name: _model(model) for name, model in resolved.models.items()},
        "pipelines": {resolved.name: resolved.config},
    }
    return OmegaConf.to_yaml(OmegaConf.create(content)).rstrip()


def _model(spec: ModelSpec) -> Any:
    """A model as one would write it: what differs from the defaults."""
    fields = attrs.asdict(spec, filter=lambda field, value: value != field.default)
    return fields["path"] if list(fields) == ["path"] else fields
