"""How every command speaks: tables and JSON on stdout, progress and trouble on stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

JsonFlag = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON for programs instead of tables.")]


def stdout() -> Console:
    """A console on the standard output of this moment (a test may have replaced it)."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=False)


def stderr() -> Console:
    """A console on standard error."""
    return Console(file=sys.stderr, highlight=False)


def print_json(value: object) -> None:
    """Print a value (struct, dict, list) as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a title and `name  value` lines."""
    console = stdout()
    console.print(title, style="bold", markup=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(f"  {name}", value)
    console.print(grid)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """Print rows under headings; columns named in `right` are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=i == 0 or name in right)
    for row in rows:
        table.add_row(*row)
    stdout().print(table, markup=False)


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Show `what` on standard error while the block runs, if that is a terminal; the value given takes the share done (0 to
    1).
    """
    console = stderr()
    if not console.is_terminal:
        yield lambda _share: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)
