"""The program `shardroute` itself: its app, its version, and how errors leave it."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from shardroute.planner.cli.output import message_text
from shardroute.topologies.errors import RunError, ShardrouteError

app = typer.Typer(
    name="shardroute",
    help="Plan, predict and run how large tensors move between GPUs.\n\n"
    "Start with `shardroute demo`, or plan a refit of your own: `shardroute plan --help`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardroute {version('shardroute')}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program as a whole."""


def main() -> None:
    """Run the command line; a mistake of the user's or a failed run ends in one message, never in a traceback."""
    try:
        app()
    except ShardrouteError as error:
        print(f"error: {message_text(error)}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunError) else 2)
