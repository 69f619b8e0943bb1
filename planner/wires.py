"""Wires: over which of its streams a GPU runs NCCL's groups, each stream with a communicator of its own.

Rule: the queues of a lane have wires of their own, up to QUEUES; further ones share those. Groups of one wire go one after the
other, beside those of other wires. A kernel of NCCL's keeps its SMs while it waits for its peers, so kernels of all wires must
fit a GPU together, else one that has come first could keep out the one that its peers wait for: wires share the SMs out, as
channels of their communicators. Executors make their communicators by this, and predictions count channels by it.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Lane, lane_of, queue_of

QUEUES: Final = 8
# NCCL's default of channels for point-to-point behind NVSwitch (src/init.cc), and the most of any collective whose number ships.
MOST_CHANNELS: Final = 32
# SMs left to what packs, unpacks and copies. Assumed: nobody has measured how few do.
_LEFT_SMS: Final = 4
_LANES: Final = len(Lane)


def wires_of(column: NDArray[np.uint8]) -> Ints:
    """The wire of each step, by the `lane` column of steps: lanes apart, then queues."""
    return lane_of(column) + _LANES * (queue_of(column).astype(np.int64) % QUEUES)


def is_credit(wire: int) -> bool:
    """Whether a wire carries empty messages only."""
    return wire % _LANES == Lane.CREDIT


def channels_of(wires: Sequence[int], n_sms: int) -> list[int]:
    """The most channels of each wire's communicator, so that kernels of all wires fit n_sms SMs: powers of 2, as NCCL takes them.

    A credit is an empty message, which takes one channel. What collectives take isn't ours to say: they count as MOST_CHANNELS,
    and of more than three queues of them not all may fit.
    """
    lanes = [wire % _LANES for wire in wires]
    taken = lanes.count(Lane.CREDIT) + MOST_CHANNELS * lanes.count(Lane.COLLECTIVE)
    n_sharing = max(sum(lane not in (Lane.CREDIT, Lane.COLLECTIVE) for lane in lanes), 1)
    share = max((n_sms - _LEFT_SMS - taken) // n_sharing, 1)
    of_lane = {Lane.CREDIT: 1, Lane.COLLECTIVE: MOST_CHANNELS}
    return [of_lane.get(Lane(lane), min(1 << (share.bit_length() - 1), MOST_CHANNELS)) for lane in lanes]
