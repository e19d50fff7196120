"""The command line: one small module a command, imported when it is asked for.

To add one, write `treegraft/cli/NAME.py` with a click command of the same name, and name it in `COMMANDS`.

Text goes to stdout, statistics and errors to stderr. Exit status: 0, 1 (failure), 2 (bad use: a command line, pipeline
or request that cannot be what was meant).
"""

import traceback
from importlib import import_module
from typing import Any

import click

from treegraft.errors import ComposeError, PluginError, RequestError, TreeGraftError

COMMANDS = ("demo", "run", "bench", "replay", "fit", "audit", "show", "plugins")
BAD_USE = (ComposeError, RequestError, PluginError)  # a PluginError is about --plugin: others are kept and listed


def _set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["debug"] = True


_DEBUG = click.Option(
    ["--debug"], is_flag=True, is_eager=True, expose_value=False, callback=_set_debug, help="Show tracebacks."
)


def with_debug(command: click.Command) -> click.Command:
    """The command with the option that every one has."""
    if _DEBUG not in command.params:
        command.params.append(_DEBUG)
    return command


class _Commands(click.Group):
    """Commands by name, each with `--debug`; errors are messages, not tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return with_debug(getattr(import_module(f"treegraft.cli.{cmd_name}"), cmd_name))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click knows what to do
        except Exception as error:
            if ctx.meta.get("debug"):
                traceback.print_exc()
            elif isinstance(error, TreeGraftError):
                click.echo(f"{type(error).__name__}: {error}", err=True)
            else:
                click.echo(f"{type(error).__name__}: {error}\n  Not foreseen; --debug shows where.", err=True)
            ctx.exit(2 if isinstance(error, BAD_USE) else 1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="treegraft")
def main() -> None:
    """Lossless tree-based speculative decoding, in which several drafters grow one shared draft tree."""
