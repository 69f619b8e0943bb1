"""Give every reader of shardroute inputs that are nearly right, and see that each ends in a result or in an error in words.

    python tools/fuzz.py --seconds 120 [--readers plan,machine] [--engine hypothesis] [--keep build/fuzz] [--json]

Inputs are real samples after a few changes, by hypothesis; where atheris is installed too (`pip install 'shardroute[fuzz]'`) it
takes half of the time, guided by what each input reaches. A crash is an exception that isn't one of shardroute's, a traceback or
an exit code of nobody's at the command line, more than a GiB of memory or 5 s of processor time for one input, or a process
that ends. Inputs that crash are kept, as small as hypothesis could make them. Exit code 1 if any did.

Each reader is read in a process of its own. The same --seed gives the same inputs of hypothesis.
"""

import argparse
import contextlib
import io
import json
import mmap
import os
import pickle
import re
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

try:
    import atheris  # first, so that what it instruments is imported through it
except ImportError:
    atheris = None

from rich.console import Console
from rich.table import Table

with (
    contextlib.nullcontext() if atheris is None else atheris.instrument_imports(include=["shardroute"]),
    contextlib.redirect_stderr(io.StringIO()),  # a line for each module
):
    from fuzzing.engines import Told, by_atheris, by_hypothesis, warm_up
    from fuzzing.limits import MEMORY_BYTES, TIME_S, Crash, read_within_limits, set_limits
    from fuzzing.readers import Reader, make_samples, readers

# An input that doesn't come back, in seconds of the clock: its alarm is of processor time, and the machine may be busy.
_STUCK_S: Final = 60.0
_INPUT_BYTES: Final = 2**25  # room to tell the parent of the input that is being read
_LIBFUZZER: Final = 77  # how it ends when it takes an input for a crash
_HEAD: Final = struct.Struct("<QQQ")  # how many inputs, when the last one began (ns of the monotonic clock), its length


@dataclass(slots=True)
class Row:
    """What became of one reader. `n_inputs` by all engines together, in `seconds`."""

    reader: str
    n_inputs: int = 0
    seconds: float = 0.0
    crashes: list[Crash] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Inputs a second."""
        return self.n_inputs / self.seconds if self.seconds else 0.0


class Shared(Told):
    """What a child leaves for its parent in shared memory: how far it is, and the input that it reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + _INPUT_BYTES)

    def begin(self, data: bytes) -> None:
        """Say which input comes next."""
        n, _, _ = _HEAD.unpack_from(self._memory)
        kept = data[:_INPUT_BYTES]
        self._memory[_HEAD.size : _HEAD.size + len(kept)] = kept
        _HEAD.pack_into(self._memory, 0, n + 1, time.monotonic_ns(), len(kept))

    @property
    def n_inputs(self) -> int:
        """How many there were."""
        return int(_HEAD.unpack_from(self._memory)[0])

    @property
    def since_s(self) -> float:
        """Seconds since the last one began."""
        began = _HEAD.unpack_from(self._memory)[1]
        return (time.monotonic_ns() - began) / 1e9 if began else 0.0

    @property
    def last(self) -> bytes:
        """The last input."""
        length = _HEAD.unpack_from(self._memory)[2]
        return self._memory[_HEAD.size : _HEAD.size + length]


def fuzz_reader(reader: Reader, engines: Sequence[str], seconds: float, seed: int, row: Row) -> list[tuple[Crash, bytes]]:
    """Give one reader inputs for so long, an engine after the other, each in a process of its own; what crashed, and by what."""
    found: dict[tuple[str, str], tuple[Crash, bytes]] = {}
    for engine in engines:
        began, share_s = time.monotonic(), seconds / len(engines)
        while (left_s := share_s - (time.monotonic() - began)) > 0.1 * share_s:
            ended, crashes = _in_child(reader, engine, left_s, seed + row.n_inputs, row)
            for crash, data in crashes:
                found.setdefault((crash.kind, crash.place), (crash, data))
            if ended or crashes:
                break
        row.seconds += time.monotonic() - began
    return list(found.values())


def _in_child(reader: Reader, engine: str, seconds: float, seed: int, row: Row) -> tuple[bool, list[tuple[Crash, bytes]]]:
    """Whether the engine came to its end, and what crashed. Now and then libFuzzer says "fuzz target exited" of inputs that
    nothing is wrong with, mostly on a busy machine: such an input is read once more by itself, and counts if that goes wrong too.
    """
    shared, (reading, writing), said = Shared(), os.pipe(), Path(tempfile.mkdtemp()) / "said"
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(reader, engine, seconds, seed, shared, writing, said)
    os.close(writing)
    found: list[tuple[Crash, bytes]] = []
    with open(reading, "rb") as pipe:
        told, stuck = b"", False
        while True:
            if select.select([pipe], [], [], 1.0)[0]:
                part = os.read(pipe.fileno(), 1 << 20)
                if not part:
                    break
                told += part
            elif not stuck and shared.since_s > _STUCK_S:
                stuck = True
                os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    row.n_inputs += shared.n_inputs
    while len(told) >= 8 and len(told) >= 8 + (size := int.from_bytes(told[:8], "little")):
        crash, data = pickle.loads(told[8 : 8 + size])  # of our own child
        told = told[8 + size :]
        found.append((crash, data))
    if os.waitstatus_to_exitcode(status) == _LIBFUZZER and _is_read(reader, shared.last):
        status, ended = 0, False
    else:
        ended = True
    if status:
        how = f"no end after {_STUCK_S:g} s" if stuck else f"the process ended with {os.waitstatus_to_exitcode(status)}"
        found.append((Crash(how, "the last input", said.read_text(errors="replace")[-6000:] or how), shared.last))
    shutil.rmtree(said.parent)
    return ended, found


def _is_read(reader: Reader, data: bytes) -> bool:
    """Whether a process of its own reads the input without a crash."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            set_limits()
            with _silent():
                code = int(read_within_limits(reader.read, data) is not None)
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _child(reader: Reader, engine: str, seconds: float, seed: int, shared: Shared, writing: int, said: Path) -> None:
    """Read inputs until the time is over, and tell of each crash; never returns. What libraries say is left in `said`."""

    def tell(crash: Crash, data: bytes) -> None:
        message = pickle.dumps((crash, data))
        os.write(writing, len(message).to_bytes(8, "little") + message)

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = 1
    try:
        set_limits()
        run = by_hypothesis if engine == "hypothesis" else by_atheris
        with _silent(said):  # libFuzzer talks, and a program that is read writes to its console
            run(reader, seconds, seed, shared, tell)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _silent(said: Path | None = None) -> Iterator[None]:
    """For as long as the block lasts standard output leads nowhere, and standard error into a file, if one is named."""
    before = os.dup(1), os.dup(2)
    with open(os.devnull, "wb") as nothing, open(os.devnull if said is None else said, "wb") as errors:
        os.dup2(nothing.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    try:
        yield
    finally:
        for number, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, number)
            os.close(kept)


def keep(folder: Path, reader: str, found: Sequence[tuple[Crash, bytes]]) -> list[str]:
    """Write what crashed, and how, into the folder; the files."""
    names = []
    for crash, data in found:
        folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"\W+", "-", f"{reader} {crash.place} {crash.kind}")[:80]
        (folder / f"{stem}.input").write_bytes(data)
        (folder / f"{stem}.txt").write_text(crash.text)
        names.append(str(folder / f"{stem}.input"))
    return names


def main() -> int:
    """Fuzz and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="for all readers together; default: 120")
    parser.add_argument("--readers", default="", help="names, or parts of them, between commas; default: all")
    parser.add_argument("--engine", choices=["hypothesis", "atheris"], help="default: both, if atheris is installed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), metavar="FOLDER", help="for inputs that crash")
    parser.add_argument("--read", type=Path, metavar="FILE", help="read one kept input by the first of --readers, and say how")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.engine == "atheris" and atheris is None:
        parser.error("atheris is not installed: pip install 'shardroute[fuzz]'")
    if not arguments.seconds > 0:
        parser.error(f"--seconds {arguments.seconds:g}: expected more than 0")
    engines = [arguments.engine] if arguments.engine else ["hypothesis", *(["atheris"] if atheris is not None else [])]
    with tempfile.TemporaryDirectory() as folder:
        with _silent():
            make_samples(Path(folder))
        os.chdir(folder)
        known = readers(Path(folder))
        wanted = [name.strip() for name in arguments.readers.split(",") if name.strip()]
        chosen = [each for each in known if not wanted or any(name in each.name for name in wanted)]
        if not chosen:
            names = dict.fromkeys(each.name for each in known)
            parser.error(f"--readers {arguments.readers}: expected some of {', '.join(names)}")
        if arguments.read is not None:
            return _show(chosen[0], (_AT_FIRST / arguments.read).read_bytes())
        rows = []
        warm_up()
        for reader in chosen:
            row = Row(reader.name)
            seconds = arguments.seconds * reader.weight / sum(each.weight for each in chosen)
            found = fuzz_reader(reader, engines, seconds, arguments.seed, row)
            row.crashes = [crash for crash, _ in found]
            row.kept = keep(_AT_FIRST / arguments.keep, reader.name, found)
            rows.append(row)
        os.chdir(_AT_FIRST)
    _print(rows, engines, as_json=arguments.json)
    return 1 if any(row.crashes for row in rows) else 0


def _show(reader: Reader, data: bytes) -> int:
    """Read one input, and print how it crashes; 1 if it does."""
    set_limits()
    crash = read_within_limits(reader.read, data)
    print(f"{reader.name}: " + ("no crash" if crash is None else f"{crash.kind} in {crash.place}\n{crash.text}"))
    return int(crash is not None)


def _print(rows: Sequence[Row], engines: Sequence[str], *, as_json: bool) -> None:
    limits = {"memory_bytes": MEMORY_BYTES, "time_s": TIME_S}
    if as_json:
        print(json.dumps({"engines": list(engines), "limits": limits, "readers": [asdict(row) for row in rows]}))
        return
    n_crashes = sum(len(row.crashes) for row in rows)
    table = Table("reader", "inputs", "inputs/s", "crashes", title=f"By {' and '.join(engines)}")
    for row in rows:
        table.add_row(row.reader, f"{row.n_inputs:,}", f"{row.rate:,.0f}", str(len(row.crashes) or "-"))
    console = Console(width=100)
    console.print(table)
    console.print(f"{len(rows)} readers, {sum(row.n_inputs for row in rows):,} inputs, {n_crashes} crashes")
    for row in rows:
        for crash, kept in zip(row.crashes, row.kept, strict=True):
            console.print(f"{row.reader}: {crash.kind} in {crash.place}; {kept}", markup=False, soft_wrap=True)


_AT_FIRST: Final = Path.cwd()

if __name__ == "__main__":
    sys.exit(main())
