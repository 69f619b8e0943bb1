"""One rank drives its program: wait, meet, copy, mark, in order. Knows no library."""

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.transports.seam import Enqueuing, Transport


class Computing(Protocol):
    """What a rank computes."""

    def computes(self, step: int) -> bool:
        """Whether the rank computes anything in a step."""

    def compute(self, step: int) -> None:
        """Do what the rank computes in a step, if anything."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """An action whose copies go on, over a transport that overlaps."""

    action: int
    step: int
    cell: int


def drive(
    programs: Programs,
    rank: int,
    transport: Transport | Enqueuing,
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    at_step: NDArray[np.int64],
    job: Computing | None = None,
) -> None:
    """Run all actions of the rank, writing when each cell's copies began and ended (time.monotonic: one clock for all), and to
    at_step[0] where the rank is. `rank` is a driver (see `interpret`); `job` does what its rank computes in a step.

    Over a transport that overlaps, one action of each queue is on its way at a time, and its end is when this rank has seen it.
    """
    if isinstance(transport, Enqueuing):
        transport.run(start_s, end_s, at_step)
        return
    actions, several = programs.actions, np.diff(programs.cells.ptr) > 1
    rows = slice(int(actions.ptr[rank]), int(actions.ptr[rank + 1]))
    waits: list[int] = actions.wait_ptr[rows.start : rows.stop + 1].tolist()
    owns: list[int] = actions.own_ptr[rows.start : rows.stop + 1].tolist()
    together: list[bool] = several[actions.step[rows]].tolist()
    queues: list[int] = actions.queue[rows].tolist()
    wait: list[int] = actions.wait[waits[0] : waits[-1]].tolist()
    own: list[int] = actions.own[owns[0] : owns[-1]].tolist()
    begun: dict[int, _Begun] = {}  # by queue

    def end(queue: int) -> None:
        done = begun.pop(queue)
        transport.finish(done.action)
        end_s[done.cell] = time.monotonic()
        transport.mark(done.action)

    for i, (action, step, cell, meets) in enumerate(
        zip(
            range(rows.start, rows.stop),
            actions.step[rows].tolist(),
            actions.cell[rows].tolist(),
            actions.meets[rows].tolist(),
            strict=True,
        )
    ):
        at_step[0] = step
        transport.enter(step)
        if begun:
            before = {queues[i], *(q for q, b in begun.items() if b.step in own[owns[i] - owns[0] : owns[i + 1] - owns[0]])}
            for queue in sorted(before & begun.keys()):
                end(queue)
        for dependency in wait[waits[i] - waits[0] : waits[i + 1] - waits[0]]:
            transport.wait(dependency)
        if together[i]:
            transport.meet(action, all_ready=meets)
        start_s[cell] = time.monotonic()
        transport.post(action)
        computes = job is not None and job.computes(step)
        if job is not None:
            job.compute(step)
        begun[queues[i]] = _Begun(action, step, cell)
        if not transport.overlaps or together[i] or computes:
            end(queues[i])
    for queue in sorted(begun, key=lambda q: begun[q].step):
        end(queue)
    transport.drain()
