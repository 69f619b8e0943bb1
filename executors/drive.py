"""One rank drives its program: wait, meet, copy, mark, in order. Knows no library."""

import time

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpret import Programs
from shardroute.executors.transports import Transport


def drive(programs: Programs, rank: int, transport: Transport, start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> None:
    """Run all actions of the rank, writing when each cell's copies began and ended (time.monotonic: one clock for all)."""
    actions, several = programs.actions, np.diff(programs.cells.ptr) > 1
    rows = slice(int(actions.ptr[rank]), int(actions.ptr[rank + 1]))
    waits: list[int] = actions.wait_ptr[rows.start : rows.stop + 1].tolist()
    blocks: list[int] = actions.block_ptr[rows.start : rows.stop + 1].tolist()
    together: list[bool] = several[actions.step[rows]].tolist()
    wait: list[int] = actions.wait[waits[0] : waits[-1]].tolist()
    for i, (action, step, cell, meets) in enumerate(
        zip(
            range(rows.start, rows.stop),
            actions.step[rows].tolist(),
            actions.cell[rows].tolist(),
            actions.meets[rows].tolist(),
            strict=True,
        )
    ):
        transport.enter(step)
        for before in wait[waits[i] - waits[0] : waits[i + 1] - waits[0]]:
            transport.wait(before)
        if together[i]:
            transport.meet(action, all_ready=meets)
        start_s[cell] = time.monotonic()
        if blocks[i] != blocks[i + 1]:
            transport.post(blocks[i], blocks[i + 1])
            transport.finish()
        end_s[cell] = time.monotonic()
        transport.mark(action)
