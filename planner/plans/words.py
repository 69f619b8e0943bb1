"""The words of a plan: what a step does, on which lane and by which library, what it computes, and where it reads and writes."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

SOURCE = -2
TARGET = -1


class Op(IntEnum):
    """What a step does."""

    COPY = 0
    ALL_GATHER = 1
    BROADCAST = 2
    BARRIER = 3
    COMPUTE = 4
    REDUCE_SCATTER = 5
    ALL_REDUCE = 6


class Lane(IntEnum):
    """What kind of work a step is for its rank. Each lane has up to 32 queues; the column packs both, see `queued`."""

    INJECT = 0  # a holder sends a piece on its first hop
    RELAY = 1  # a rank that received a piece sends it on to another domain
    HAND_OVER = 2  # the same, inside an NVLink domain
    LOCAL = 3  # copies within a rank
    COLLECTIVE = 4
    CREDIT = 5  # an empty copy: tells the rank that writes to a staging slot next that its readers are done
    COMPUTE = 6  # attention, and adding up; beside a rank's copies, as a GPU's SMs work beside its copy engines


class Kind(IntEnum):
    """What a COMPUTE does. q, k, v, o, lse, do, dq, dk, dv are the tensors of that name; rows are masked as the call says."""

    ATTEND = 0  # reads q, k, v; adds to o and lse what these queries see in these keys
    GRAD = 1  # reads q, k, v, o, lse, do; adds to dq, dk, dv
    ADD = 2  # adds the operands that it reads to those that it updates
    MERGE = 3  # the same for o and lse of one query over different keys


class Mode(IntEnum):
    """What a COMPUTE does to an operand."""

    READ = 0
    WRITE = 1  # begins anew, whatever was there
    UPDATE = 2  # adds to what is there


class Backend(IntEnum):
    """The library that is meant to carry a step; a transport on CPUs carries any of them."""

    PROCESSES = 0  # memory shared by processes of one machine
    NCCL = 1  # send and receive
    NCCL_PUT = 2  # NCCL's put with a signal
    NVSHMEM = 3

    @property
    def label(self) -> str:
        """The name as commands spell it, `nccl-put`."""
        return self.name.lower().replace("_", "-")


_LANE_BITS = 3


def queued(lane: NDArray[np.integer], queue: NDArray[np.integer]) -> NDArray[np.uint8]:
    """The `lane` column of steps: the lane's number in the low three bits, the queue's above."""
    return (lane + (queue << _LANE_BITS)).astype(np.uint8)


def lane_of(column: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The lane of each step, without its queue."""
    return column & np.uint8((1 << _LANE_BITS) - 1)


def queue_of(column: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The queue of each step, without its lane."""
    return column >> np.uint8(_LANE_BITS)
