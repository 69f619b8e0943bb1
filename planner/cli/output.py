"""How every command speaks: tables and JSON on stdout, progress and trouble on stderr.

Rule: colour and bars are for terminals. `say` is for what a person should know (--quiet leaves it out), `tell` for what --verbose
asks for; errors are neither.
"""

import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import msgspec
import typer
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardroute.planner.shares import Told, untold
from shardroute.topologies.units import format_seconds

JsonFlag = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON for programs instead of tables.")]


# A first column up to this wide is never folded; longer ones (tensor names) fold so that numbers keep their units.
_LONGEST_KEY = 24
# Rows from which a table takes its while to lay out, and the microseconds that each of its cells takes (3,000 rows of 6).
_MANY_ROWS, _CELL_US = 1000, 70.0
# What a column of words is left with at least: the length of most words.
_LEAST_WORDS = 10
_BAR = 16
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")

# Control characters but the line feed, marks that turn the direction of text, and halves of surrogate pairs: a name in a file
# could move the cursor, colour what follows, or stop the printing.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Values in quotes; an apostrophe within a word opens none.
_QUOTED = re.compile(r"(?<!\w)'[^'\n]{200,}'|\"[^\"\n]{200,}\"")
_MOST_QUOTED, _MOST_MESSAGE = 200, 2000
# Seconds between lines of progress where standard error is no terminal: a log of minutes stays a page.
_LINE_S = 10.0
# Seconds in which one share is shown at most: showing one takes some 20 us, and loops tell thousands.
_SHARE_S = 0.02
# The same where telling draws the bar, which takes some 0.5 ms in which whoever tells does nothing else.
_DRAWN_S = 0.5


def printable(text: str) -> str:
    """The text as it may go to a terminal: what isn't for reading becomes `?`."""
    return _UNPRINTABLE.sub("?", text)


def message_text(error: Exception) -> str:
    """An error's message for a person: printable, and without the middle of values, and of the whole, that are very long."""
    text = _QUOTED.sub(lambda found: _shortened(found[0], _MOST_QUOTED), printable(str(error)))
    return _shortened(text, _MOST_MESSAGE)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[len(text) - most // 3 :]}"


class Speech(StrEnum):
    """How much a command says beside its results."""

    QUIET = "quiet"
    PLAIN = "plain"
    VERBOSE = "verbose"


# Of the command that runs; `speak` sets it, in a context that ends with the program's main.
_SPEECH: ContextVar[Speech] = ContextVar("speech", default=Speech.PLAIN)


def speak(speech: Speech) -> None:
    """From here on say so much."""
    _SPEECH.set(speech)


def say(text: str, style: str = "") -> None:
    """A line on standard error: a note, a caution, where something was written. Not with --quiet."""
    if _SPEECH.get() is not Speech.QUIET:
        stderr().print(printable(text), style=style, soft_wrap=True)


def tell(text: str) -> None:
    """A line on standard error with --verbose: what was read or chosen, how long a part took."""
    if _SPEECH.get() is Speech.VERBOSE:
        stderr().print(printable(text), style="dim", soft_wrap=True)


def stdout() -> Console:
    """A console on the standard output of this moment (a test may have replaced it)."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=False, markup=False, emoji=False)


def stderr() -> Console:
    """A console on standard error."""
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Print a value (struct, dict, list) as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a title and `name  value` lines."""
    console = stdout()
    console.print(printable(title), style="bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(f"  {printable(name)}", printable(value))
    console.print(grid)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """Print rows under headings; columns named in `right` are aligned to the right, and never folded. Where a terminal is too
    narrow for that, each row is a list of what its columns say.
    """
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, padding=(0, 2, 0, 0))
    cells = [list(row) for row in rows]
    least = 0
    for i, name in enumerate(columns):
        column = [name, *(row[i] for row in cells)]
        widest = max(map(len, column))
        keep = name in right or (i == 0 and widest <= _LONGEST_KEY)
        least += 2 + (widest if keep else min(max(len(word) for text in column for word in text.split() or [""]), _LEAST_WORDS))
        justify: JustifyMethod = "right" if name in right else "left"
        table.add_column(printable(name), justify=justify, overflow="fold", no_wrap=keep, min_width=widest if keep else None)
    console = stdout()
    if least > console.width and cells:
        _print_lists(columns, cells, title)
        return
    for row in cells:
        table.add_row(*map(printable, row))
    if len(cells) < _MANY_ROWS:
        console.print(table)
        return
    with progress("laying out a table", _CELL_US * len(cells) * len(columns)), console.capture() as laid_out:
        console.print(table)
    sys.stdout.write(laid_out.get())


def _print_lists(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    """The rows of a table, each as a list under its first cell."""
    if title:
        stdout().print(printable(title), style="bold")
    for first, *others in rows:
        print_facts(" ".join(filter(None, (columns[0], first))), [(n, v) for n, v in zip(columns[1:], others, strict=True) if v])


def bar_text(share: float) -> str:
    """A bar of up to 16 characters for a share from 0 to 1, by eighths of a character; hashes where stdout takes ASCII only."""
    eighths = round(min(max(share, 0.0), 1.0) * 8 * _BAR)
    if not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf"):
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


@contextmanager
def progress(what: str, foreseen_us: float | None = None, *, between_shares: bool = True) -> Iterator[Told]:
    """Show `what` on standard error while the block runs. On a terminal: a bar, the time so far and, once the share that is done
    (0 to 1) is told to what this yields, the time left, which runs down until the next share; before the first one what was
    `foreseen_us` in all, in microseconds, where that is given. Else the same as a line every 10 s, when a share is told. With
    --quiet show nothing; with --verbose say how long it took. Without `between_shares` it is drawn as shares are told and at no
    other time, for what is measured in this process meanwhile.
    """
    console = stderr()
    began = time.perf_counter()
    if _SPEECH.get() is Speech.QUIET:
        yield untold
        return
    on_terminal = sys.stderr.isatty() and not console.is_dumb_terminal
    described = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), described, BarColumn(), TimeElapsedColumn(), _TimeLeftColumn())
    # Disabled it draws nothing and starts no thread, but still knows the time left. Old versions of rich print a line as it ends.
    bar = Progress(*columns, console=console, transient=True, auto_refresh=between_shares, disable=not on_terminal)
    with bar if on_terminal else nullcontext():
        foreseen_s = None if foreseen_us is None else foreseen_us / 1e6
        task = bar.add_task(printable(what), total=None, left_s=foreseen_s, at_s=began)
        every_s = _SHARE_S if between_shares else _DRAWN_S
        last_s, shown, shown_s = began, 0.0, began - every_s

        def done(share: float) -> None:
            nonlocal last_s, shown, shown_s
            now_s = time.perf_counter()
            if share < shown or (share < 1.0 and now_s - shown_s < every_s):
                return
            shown, shown_s = share, now_s
            bar.update(task, completed=share, total=1.0)
            left_s = _left_s(bar.tasks[0], foreseen_s)
            if left_s is not None:
                bar.update(task, left_s=left_s, at_s=now_s)
            if not between_shares:
                bar.refresh()
            if not on_terminal and share < 1.0 and now_s - last_s >= _LINE_S:
                last_s = now_s
                say(_progress_line(what, share, last_s - began, left_s))

        yield done
    tell(f"{what}: {format_seconds(time.perf_counter() - began)}")


class _TimeLeftColumn(ProgressColumn):
    """The time left as h:mm:ss, from the first share above 0 on, or as it was foreseen. Between shares it runs down."""

    max_refresh = 0.5  # seconds; a digit that changes oftener can't be read

    def render(self, task: Task) -> Text:
        left_s: float | None = task.fields["left_s"]
        if left_s is None:
            return Text("")
        left_s = max(left_s - (time.perf_counter() - task.fields["at_s"]), 0.0)
        return Text(str(timedelta(seconds=round(left_s))), style="progress.remaining")


def _left_s(task: Task, foreseen_s: float | None) -> float | None:
    """Seconds that are left: the mean of what the pace of late says and that of all so far, which parts were weighed by; of the
    latter alone while only one share has been told; None before that. Up to half of the whole what was foreseen counts, too, the
    more the less is done: the pace of a hundredth that was quick says little.
    """
    if task.total is None or not task.completed or task.elapsed is None:
        return None
    by_whole_s = task.elapsed * (task.total - task.completed) / task.completed
    by_pace_s = by_whole_s if task.time_remaining is None else (by_whole_s + task.time_remaining) / 2
    if foreseen_s is None:
        return by_pace_s
    known = min(2 * task.completed / task.total, 1.0)
    return known * by_pace_s + (1 - known) * max(foreseen_s - task.elapsed, 0.0)


def _progress_line(what: str, share: float, so_far_s: float, left_s: float | None) -> str:
    left = "" if left_s is None else f", some {_clock_text(left_s)} left"
    return f"{what}: {share:.0%} after {_clock_text(so_far_s)}{left}"


def _clock_text(seconds: float) -> str:
    """Whole seconds, from a minute on with minutes."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
