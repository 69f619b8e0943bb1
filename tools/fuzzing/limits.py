"""One input read under a memory and a time limit, and what counts as a crash.

Rule: time is the processor's, so that a busy machine makes no crashes; what doesn't even come back is ended by the parent.
"""

import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from shardroute.topologies.errors import ShardrouteError

# For one input, above what the process has when it begins. The largest file that any of these samples stands for is some
# hundred kB; a reader that multiplies it by ten thousand is one that a stranger can stop a host with.
MEMORY_BYTES: Final = 2**30
TIME_S: Final = 5.0
_PAGE_BYTES: Final = resource.getpagesize()
_HERE: Final = str(Path(__file__).resolve().parent.parent)


class OverTimeError(BaseException):
    """An input has taken longer than it may; no reader may catch it."""


@dataclass(frozen=True, slots=True)
class Crash:
    """What went wrong: its kind and place, by which crashes are told apart, and the whole text."""

    kind: str
    place: str
    text: str


def read_within_limits(read: Callable[[bytes], None], data: bytes) -> Crash | None:
    """What is wrong with how `data` was read; None for a result, or for an error that says in words what the input has."""
    signal.setitimer(signal.ITIMER_PROF, TIME_S)
    try:
        read(data)
    except ShardrouteError as error:
        if not str(error).strip():
            return _crash(error, "an error without words")
    except OverTimeError as error:
        return _crash(error, f"more than {TIME_S:g} s of processor time")
    except MemoryError as error:
        return _crash(error, f"more than {MEMORY_BYTES >> 20} MiB")
    except RecursionError as error:
        return _crash(error, "nested too deeply")
    except Exception as error:
        return _crash(error, type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def set_limits() -> None:
    """Give this process its limits: address space for good, and an alarm that `read_within_limits` sets."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def over(number: int, frame: FrameType | None) -> None:
        raise OverTimeError

    signal.signal(signal.SIGPROF, over)


def _crash(error: BaseException, kind: str) -> Crash:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if not f.filename.startswith(_HERE + "/fuzz") and "site-packages" not in f.filename and
            "/lib/python" not in f.filename]  # fmt: skip
    last = ours[-1] if ours else frames[-1]
    # Deep recursion and alarms strike anywhere; the first frame of ours tells them apart better than the last.
    told = (ours or frames)[0] if isinstance(error, (RecursionError, OverTimeError)) else last
    text = "".join(traceback.format_exception(error, limit=-12))
    return Crash(kind, f"{Path(told.filename).name}:{told.name}", text[-6000:])
