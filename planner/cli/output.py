"""How every command speaks: tables and JSON on stdout, progress and trouble on stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

JsonFlag = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON for programs instead of tables.")]


# A first column up to this wide is never folded; longer ones (tensor names) fold so that numbers keep their units.
_LONGEST_KEY = 24


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
    cells = [list(row) for row in rows]
    for i, name in enumerate(columns):
        widest = max(len(name), *(len(row[i]) for row in cells), 0)
        keep = name in right or (i == 0 and widest <= _LONGEST_KEY)
        justify: JustifyMethod = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=keep, min_width=widest if keep else None)
    for row in cells:
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
