"""`treegraft plugins`: what is loaded from where, and what is not."""

import json
from collections.abc import Sequence
from typing import Any

import click

from treegraft.cli.options import plugin_option, plugins_from_here
from treegraft.cli.tables import table
from treegraft.plugins import Plugins


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, and nothing else.")
@plugin_option
def plugins(as_json: bool, modules: Sequence[str]) -> None:
    """List the parts that can be named in a registry file, who provides them, and which plugins failed to load."""
    loaded = plugins_from_here(modules)
    if as_json:
        click.echo(json.dumps(_as_object(loaded)))
        return
    rows = [
        (row.kind, row.name, f"{row.cls.__module__}.{row.cls.__qualname__}", str(row.provider))
        for row in loaded.registrations()
    ]
    for line in table(("kind", "name", "class", "provided by"), rows):
        click.echo(line)
    for failure in loaded.failures:
        click.echo(f"not loaded: {failure}")


def _as_object(loaded: Plugins) -> dict[str, Any]:
    registered = [
        {
            "kind": row.kind,
            "name": row.name,
            "class": f"{row.cls.__module__}.{row.cls.__qualname__}",
            "provider": row.provider.name,
            "version": row.provider.version,
        }
        for row in loaded.registrations()
    ]
    failed = [
        {"provider": failure.provider.name, "version": failure.provider.version, "error": failure.reason}
        for failure in loaded.failures
    ]
    return {"registered": registered, "failed": failed}
