"""Ranks of transport `mpi` on this machine, started by MPI's own launcher, which no rank of MPI can do without.

Rule: the plan and what the ranks found go through files in a folder that only this user can read, gone with the session.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from shardroute.executors.attention.contents import Contents
from shardroute.executors.attention.jobs import load_arithmetic
from shardroute.executors.foresee import Foreseen, foresee
from shardroute.executors.interpreting.patterns import Finding
from shardroute.executors.interpreting.piece_sums import piece_rows
from shardroute.executors.launching.advances import moved_share, prepared_share, trials_share
from shardroute.executors.launching.boards import Seen
from shardroute.executors.launching.launched import GaveUpError, run_launched
from shardroute.executors.launching.launches import find_place
from shardroute.executors.launching.processes import ONE_THREAD, uninterrupted
from shardroute.executors.messages.separate import compile_separate
from shardroute.executors.steps import describe_place
from shardroute.executors.transports.libraries import MPI
from shardroute.executors.transports.mpi import connect, remove_segments, shared_segments
from shardroute.executors.transports.seam import Deadline, LateError, Progress, Trial
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import Plan
from shardroute.topologies.errors import InputError, RunError, ShardrouteError

_POLL_S: Final = 0.05
# Ranks report a passed deadline themselves; after this much more, for starting and ending too, the caller does it for them.
_GRACE_S: Final = 10.0
_PID, _AT_STEP, _PHASE, _SHARE, _N_SEEN = 0, 1, 2, 3, 4  # rows of what ranks let the caller see, and how many there are
# Python that becomes mpiexec, after asking Linux to end it (SIGTERM, upon which it ends its ranks) when the caller is killed:
# prctl(PR_SET_PDEATHSIG, ...) of linux/prctl.h, which holds across exec; the caller may be gone before it is asked.
_LEASH: Final = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); " \
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"  # fmt: skip
_BOOT: Final = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); " \
    "from shardroute.executors.launching.mpiexec import rank_main; sys.exit(rank_main(sys.argv[1]))"  # fmt: skip


class MpiexecSession:
    """A Session of processes that mpiexec starts. Raises InputError when there is no mpiexec."""

    def __init__(
        self, plan: Plan, *, timeout_s: float, n_trials: int, contents: Contents | None = None, verify: bool = False,
        foreseen: Foreseen | None = None,
    ) -> None:  # fmt: skip
        launcher = find_mpiexec()
        self._timeout_s, self._n_trials = timeout_s, n_trials
        self._deadline = Deadline.after(timeout_s + _GRACE_S)
        self._folder = Path(tempfile.mkdtemp(prefix="shardroute-"))
        save_plan(plan, self._folder / "run.plan")
        if contents is not None:
            np.savez(self._folder / "contents.npz", allow_pickle=False, **contents.columns())
        self._plan, self._foreseen = plan, foresee(plan, MPI) if foreseen is None else foreseen
        self._seen = np.memmap(self._folder / "seen", np.int64, "w+", shape=(_N_SEEN, plan.problem.n_ranks))
        self._seen[_AT_STEP] = -1
        (self._folder / "request").write_text(f"{n_trials} {timeout_s!r} {int(verify)}")
        with open(self._folder / "errors", "wb") as errors:
            leash = [sys.executable, "-ISc", _LEASH, str(os.getpid())] if sys.platform == "linux" else []
            ranks = [sys.executable, "-c", _BOOT, str(self._folder), json.dumps(sys.path)]
            self._process = subprocess.Popen(
                [*leash, launcher, "-n", str(plan.problem.n_ranks), *ranks],
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True,
                env=os.environ | ONE_THREAD,
            )  # fmt: skip

    def run(self, progress: Progress | None = None, preparing: Progress | None = None) -> Sequence[Trial]:
        """What the ranks saw and found; told as by `Session.run`. Raises RunError with what they said when they failed."""
        done = 0.0
        while self._process.poll() is None:
            if self._deadline.left_s <= 0:
                raise RunError(f"the ranks still ran {_GRACE_S:g} s after the {self._timeout_s:g} s that --timeout allows")
            phase, share = self._seen[_PHASE].astype(np.uint32), self._seen[_SHARE].view(np.float64)
            moved = moved_share(self._seen[_AT_STEP], len(self._plan.steps))
            done = max(done, trials_share(phase, share, moved, self._n_trials, self._foreseen))
            if preparing is not None and done == 0:
                preparing(prepared_share(self._seen[_PID], phase, share, self._foreseen))
            if progress is not None:
                progress(done)
            time.sleep(_POLL_S)
        if self._process.returncode != 0 or not (self._folder / "trials.npz").exists():
            raise RunError(self._failure())
        if progress is not None:
            progress(1.0)
        with np.load(self._folder / "trials.npz", allow_pickle=False) as found:
            names = ("began_s", "start_s", "end_s", "findings", "worst", "wrong_pieces")
            began_s, start_s, end_s, findings, worst, wrong_pieces = (found[name] for name in names)
        return [
            Trial(float(began_s[k]), start_s[k], end_s[k], [Finding(*row) for row in findings[k].tolist()], float(worst[k]),
                  wrong_pieces[k].tolist())
            for k in range(self._n_trials)
        ]  # fmt: skip

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _end)  # mpiexec, which has a session of its own, wouldn't hear of it
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with uninterrupted():
            if self._process.poll() is None:  # its ranks may be killed while MPI starts, before they could remove what they share
                remove_segments(segment for pid in self._seen[_PID].tolist() if pid for segment in shared_segments(pid))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM if self._process.poll() is None else signal.SIGKILL)
            try:
                self._process.wait(_GRACE_S)  # mpiexec ends its ranks when it is asked to end
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _failure(self) -> str:
        said = [path.read_text().splitlines() for path in sorted(self._folder.glob("words-*"))]
        if said:  # what each says of itself, then what they say of others
            return "; ".join(dict.fromkeys([line for line, *_ in said] + [line for _, *lines in said for line in lines]))
        text = (self._folder / "errors").read_text(errors="replace")
        died = re.search(r"PID (\d+) RUNNING AT.*?EXIT CODE: (\d+)", text, re.DOTALL)  # as MPICH's mpiexec has it
        ranks = np.flatnonzero(self._seen[_PID] == int(died[1])).tolist() if died is not None else []
        if died is not None and ranks:
            # Which may be one that mpiexec itself has ended for another's death: it doesn't tell them apart.
            where = [f"rank {k} {describe_place(self._plan, step)}" for k, step in enumerate(self._seen[_AT_STEP].tolist())]
            return (
                f"a rank died (exit code or signal {died[2]}), and mpiexec ended all others with it; it names rank {ranks[0]}. "
                f"Where each rank was: {'; '.join(where)}"
            )
        lines = text.strip().splitlines()
        return f"mpiexec ended with exit code {self._process.returncode}: {' '.join(lines[-3:]) or 'it said nothing'}"


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)  # by way of __exit__


def find_mpiexec() -> str:
    """The launcher beside this Python, or else on the path. Raises InputError when there is none."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("mpiexec")
    if found is None:
        raise InputError("no mpiexec was found to start ranks with; `pip install 'shardroute[mpi]'` brings MPICH's")
    return found


def rank_main(folder: str) -> int:
    """What each process that mpiexec starts does; its exit code."""
    place = find_place()
    assert place is not None
    world = None
    try:
        n_trials, timeout_s, verify = (Path(folder) / "request").read_text().split()
        deadline = Deadline.after(float(timeout_s))
        plan = load_plan(Path(folder) / "run.plan")
        seen = np.memmap(Path(folder) / "seen", np.int64, "r+", shape=(_N_SEEN, place.size))
        seen[_PID, place.rank] = os.getpid()
        world = connect(place, deadline, seen[_AT_STEP])
        found, contents = compile_separate(plan), _contents(Path(folder))
        trials = run_launched(
            world, found.plan, found.programs, found.messages, n_trials=int(n_trials), deadline=deadline, contents=contents,
            pieces=piece_rows(found.plan) if int(verify) else None,
            seen=Seen(seen[_AT_STEP], seen[_PHASE].view(np.uint32)[::2], seen[_SHARE].view(np.float64)),
        )  # fmt: skip
    except Exception as error:  # whatever it is, the caller says it, and no other rank waits for this one
        known = isinstance(error, (ShardrouteError, LateError))
        words = str(error) if known else f"rank {place.rank}: {type(error).__name__}: {error}"
        lines = [error.words, *error.others] if isinstance(error, GaveUpError) else [" ".join(words.splitlines())]
        (Path(folder) / f"words-{place.rank:06}").write_text("\n".join(lines))
        if world is not None:
            world.abandon()
        return 1
    world.close()
    if trials:
        np.savez(
            Path(folder) / "trials.npz", began_s=[t.began_s for t in trials], start_s=[t.start_s for t in trials],
            end_s=[t.end_s for t in trials], worst=[t.worst for t in trials], wrong_pieces=[t.wrong_pieces for t in trials],
            findings=[[[getattr(f, name) for name in Finding.__slots__] for f in t.findings] for t in trials],
        )  # fmt: skip
    return 0


def _contents(folder: Path) -> Contents | None:
    """What the caller left for a plan that computes."""
    path = folder / "contents.npz"
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as columns:
        contents = Contents.of(dict(columns))
    assert contents is not None
    load_arithmetic(contents.arithmetic)
    return contents
