"""A process beside a rank, which speaks where the rank can't: while its library's start holds it, and when a signal has stopped
it.

Rule: it is forked before the library starts and never calls it; it ends with its rank, and leaves nothing behind. Ranks hear of
each other through their witnesses, so one that fails doesn't end the others before they have said where they were.
"""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.launching.accounts import Accounts, Stage
from shardroute.executors.launching.couriers import Courier, is_on_one_host, knows_where, open_anywhere
from shardroute.executors.launching.presences import come, missing_ranks
from shardroute.executors.transports.seam import Deadline, Place, Silent

GRACE_S: Final = 2.0  # for all ranks to say where they were once one has given up; docs/running.md states it
# How often a witness looks at its rank: while all goes well, while it can't hear others, and while a run ends.
_IDLE_S, _DEAF_S, _ENDING_S = 1.0, 0.1, 0.05
_LOOK_AGAIN_S: Final = 0.01  # of a rank that waits for what others say
_HEARING_S: Final = 0.5  # how long a witness whose library hasn't started in time waits to hear who has come
_MOST_READ: Final = 4096


class Witness:
    """A rank's side. `at_step` (int64[n_ranks]) is where the rank notes the step that it has come to; `where` is what the other
    ranks must be told (`tell_where`) for their witnesses to reach rank 0's, b"" for nothing.
    """

    def __init__(self, place: Place, deadline: Deadline, at_step: NDArray[np.int64] | None, end: Callable[[int], None]) -> None:
        """Have this process watched. If its library hasn't started by the deadline, the witness says who is missing and kills it;
        before that `end` is called with its process id.
        """
        self._rank, self._accounts = place.rank, Accounts.blank(place.size)
        self.at_step = self._accounts.step if at_step is None else at_step
        self._accounts.stage[place.rank] = Stage.STARTING
        self._here, here = come(place), is_on_one_host(place)
        opened = open_anywhere() if place.rank == 0 and not knows_where(place) else None
        self.where = b"" if opened is None else f"{socket.gethostname()} {opened[0].getsockname()[1]} {opened[1].hex()}".encode()
        watched, self._tells = os.pipe()
        process = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._tells)
            watch = _Watch(place, deadline, self._accounts, self.at_step, process, watched, end, here)
            if self._here is not None:
                self._here.close()
            _run(watch, opened)
        os.close(watched)
        if opened is not None:
            opened[0].close()

    def tell_where(self, where: bytes) -> None:
        """Let the witness know where rank 0's is."""
        self._tell(where + b"\n")

    def started(self) -> None:
        """The library has started."""
        self._accounts.stage[self._rank] = Stage.RUNNING
        self._leave_door()
        self._tell(b"\n")

    def failed(self) -> str:
        """What another rank said that gave up; "" while none has."""
        accounts = self._accounts
        if accounts.stage.max() >= Stage.FAILED:
            for rank in np.flatnonzero(accounts.stage >= Stage.FAILED).tolist():
                if rank != self._rank:
                    return accounts.text(rank)
        return ""

    def fail(self, text: str) -> None:
        """Tell all others why this rank gives up; waits for nobody."""
        if self._accounts.stage[self._rank] < Stage.FAILED:
            self._accounts.fail(self._rank, text)
            self._tell(b"\n")

    def silent(self) -> list[Silent]:
        """Ranks that haven't said where they were, a grace after this one has; waits no longer for them."""
        accounts = self._accounts
        self._await((Stage.ABSENT, Stage.STARTING, Stage.OVERDUE, Stage.RUNNING))  # others aren't heard of until a run ends
        quiet = (accounts.stage > Stage.ABSENT) & (accounts.stage < Stage.FAILED) & (accounts.stage != Stage.CLOSED)
        return [
            Silent(rank, int(accounts.step[rank]), bool(accounts.stopped[rank]), bool(accounts.stage[rank] == Stage.GONE))
            for rank in np.flatnonzero(quiet).tolist()
            if rank != self._rank
        ]

    def leave(self) -> None:
        """Return when all ranks that have given up have said why to whoever called them, or a grace has passed."""
        if self._accounts.hears[0] <= 0:  # nor do others hear of this rank, and so may need all of theirs
            time.sleep(GRACE_S + _HEARING_S)
            return
        self._accounts.stage[self._rank] = Stage.LEFT
        self._tell(b"\n")
        self._await((Stage.FAILED,))

    def close(self) -> None:
        """End the witness."""
        self._accounts.stage[self._rank] = Stage.CLOSED
        self._leave_door()
        if self._tells >= 0:
            os.close(self._tells)
            self._tells = -1
            with suppress(ChildProcessError):  # who collects children of its program has done so
                os.waitpid(self._process, 0)

    def _await(self, stages: Sequence[Stage]) -> None:
        accounts, until_s = self._accounts, time.monotonic() + GRACE_S
        others = np.arange(len(accounts.stage)) != self._rank
        while accounts.hears[0] >= 0 and np.isin(accounts.stage[others], stages).any() and time.monotonic() < until_s:
            time.sleep(_LOOK_AGAIN_S)

    def _tell(self, line: bytes) -> None:
        if self._tells >= 0:
            with suppress(OSError):  # somebody has killed the witness
                os.write(self._tells, line)

    def _leave_door(self) -> None:
        if self._here is not None:
            self._here.close()
            self._here = None


def _run(watch: "_Watch", opened: tuple[socket.socket, bytes] | None) -> None:
    """What the forked process does, and no more."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its rank's business
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        watch.run(opened)
        code = 0
    except BaseException as error:  # nothing above it would say so
        os.write(2, f"error: the witness of a rank failed: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


class _Watch:
    """The witness's side."""

    def __init__(
        self, place: Place, deadline: Deadline, accounts: Accounts, at_step: NDArray[np.int64], process: int, watched: int,
        end: Callable[[int], None], here: bool,
    ) -> None:  # fmt: skip
        self._place, self._deadline, self._accounts, self._at_step = place, deadline, accounts, at_step
        self._process, self._watched, self._end, self._here = process, watched, end, here
        self._told = (-1, 0, -1)  # stage, stopped, step
        self._beat_s = self._overdue_s = self._kill_s = self._ending_s = np.inf
        self._line = b""
        self._has_ended = False

    def run(self, opened: tuple[socket.socket, bytes] | None) -> None:
        """Watch until the rank's process ends."""
        accounts, rank = self._accounts, self._place.rank
        with selectors.DefaultSelector() as events:
            self._courier = Courier(self._place, accounts, events, opened, on_one_host=self._here)
            events.register(self._watched, selectors.EVENT_READ, self._hear_rank)
            while not self._has_ended and os.getppid() == self._process:
                for key, _ in events.select(self._patience_s()):
                    key.data()
                self._look()
                self._courier.go_on()
            if accounts.stage[rank] < Stage.CLOSED:
                accounts.stage[rank] = Stage.GONE
            self._courier.tell()
            self._courier.go_on()

    def _patience_s(self) -> float:
        if self._accounts.is_ending:
            return _ENDING_S
        wait_s = _IDLE_S if self._accounts.hears[0] > 0 else _DEAF_S
        return min(wait_s, self._deadline.limit_s) if self._accounts.stage[self._place.rank] == Stage.STARTING else wait_s

    def _hear_rank(self) -> None:
        data = os.read(self._watched, _MOST_READ)
        self._has_ended = not data
        *lines, self._line = (self._line + data).split(b"\n")
        for line in filter(None, lines):
            host, port, token = line.decode().split(" ")
            self._courier.look_at(host, int(port), bytes.fromhex(token))

    def _look(self) -> None:
        """See how far the rank is, and tell others where that is new: at once if it matters, else now and then."""
        accounts, rank, now_s = self._accounts, self._place.rank, time.monotonic()
        self._see_start(now_s)
        accounts.step[rank], accounts.stopped[rank] = self._at_step[rank], _is_stopped(self._process)
        self._ending_s = min(self._ending_s, now_s) if accounts.is_ending else np.inf
        if accounts.stopped[rank] and now_s > self._ending_s + GRACE_S + _HEARING_S:
            self._kill()  # mpiexec would wait for it: it asks before it kills
        seen = (int(accounts.stage[rank]), int(accounts.stopped[rank]), int(accounts.step[rank]))
        if seen != self._told and (accounts.is_ending or seen[0] != self._told[0] or now_s >= self._beat_s):
            self._courier.tell()
            self._told, self._beat_s = seen, now_s + _IDLE_S

    def _see_start(self, now_s: float) -> None:
        """Say who is missing, once the library should have started or another rank gives it up; then end the rank."""
        accounts, rank = self._accounts, self._place.rank
        others = np.arange(self._place.size) != rank
        if accounts.stage[rank] == Stage.STARTING:
            if not self._deadline.left_s or (accounts.stage == Stage.OVERDUE).any():
                accounts.stage[rank], self._overdue_s = Stage.OVERDUE, now_s
        elif accounts.stage[rank] == Stage.OVERDUE and now_s >= self._overdue_s + _HEARING_S:
            os.write(2, f"error: {self._couldnt_join()}\n".encode())
            self._end(self._process)  # now and below: whoever comes first to its end has all others ended
            accounts.stage[rank], self._kill_s = Stage.LEFT, now_s + GRACE_S
        elif self._kill_s < np.inf:
            waits = accounts.hears[0] <= 0 or (accounts.stage[others] == Stage.OVERDUE).any()
            if now_s >= self._kill_s or not waits:
                self._end(self._process)
                self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, which is seen in a moment
            os.kill(self._process, signal.SIGKILL)

    def _couldnt_join(self) -> str:
        place, missing = self._place, list[int]()
        if self._here:
            missing = missing_ranks(place)
        elif self._accounts.hears[0] > 0 and knows_where(place):
            missing = np.flatnonzero(self._accounts.stage == Stage.ABSENT).tolist()
        to = f" to {place.rendezvous}" if place.rendezvous and not self._here else ""
        who = f"rank {', '.join(map(str, missing))} didn't come{to}" if missing else "not all of them came"
        why = f" ({self._courier.trouble})" if self._courier.trouble and not missing else ""
        late = f"{who} within the {self._deadline.allowed_s:g} s that --timeout allows{why}"
        return f"rank {place.rank} couldn't join the {place.size} ranks of the run: {late}"


def _is_stopped(process: int) -> bool:
    """Whether a signal (SIGSTOP, a debugger) has stopped a process, as far as the system tells: Linux does."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith(("T", "t"))
    return False
