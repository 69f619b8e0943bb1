"""Tasks of steps before their dependencies: what the parts of a plan hand to `costs`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints


@dataclass(frozen=True, slots=True, eq=False)
class StepTasks:
    """Columns, one row a task: its step, its lane and engine (-1: none), its cost and its route (CSR); steps ascend.

    Tasks of one lane run one after the other, and so do those of one engine. A task's amount is `late` more (None: none's is)
    if its lane was free before all that it waits for was done. n_bytes is what all of them copy or send. pack_s and unpack_s have
    one row a step: what members of a group pack and unpack (None: nothing).
    """

    step: Ints
    lane: NDArray[np.int64]
    delay_s: NDArray[np.float64]
    amount: NDArray[np.float64]
    cap: NDArray[np.float64]
    route_ptr: Ints
    route_links: NDArray[np.int32]
    n_bytes: int
    engine: NDArray[np.int32] | None = None
    late: NDArray[np.float64] | None = None
    pack_s: NDArray[np.float64] | None = None
    unpack_s: NDArray[np.float64] | None = None
