"""`treegraft fit`: what makes fitted parts; one small module a subcommand, imported when it is asked for."""

from importlib import import_module

import click

from treegraft.cli import with_debug

COMMANDS = {
    "collect": "treegraft.cli.fit_collect",
    "scheduler": "treegraft.cli.fit_scheduler",
    "dflash": "treegraft.cli.fit_dflash",
    "heads": "treegraft.cli.fit_heads",
    "edges": "treegraft.cli.fit_edges",
    "budget": "treegraft.cli.fit_budget",
}


class _Fits(click.Group):
    """Subcommands by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        return with_debug(command)


@click.group(cls=_Fits)
def fit() -> None:
    """Fit the parts of a pipeline that are learnt offline."""
