"""What a user can ask of a plan beside its strategy."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shardroute.planner.plans import WINDOW_BYTES, Backend
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError

# Messages that a rank sends at once on a lane. One at a time leaves the NIC idle for every hop's latency and for every
# moment in which a receiver is shared. On EP16 -> DP8 x TP32 the simulator gives 20, 16, 15 and 14 ms for 1, 2, 4 and 8 in NCCL's
# groups over 34 DGX H100 (were receivers always ready, 23, 17, 13.0 and 12.4), and 10.1, 8.2, 7.4 and 7.1 over 4 racks of GB200.
N_QUEUES = 8
# Staging memory a GPU where the user sets no limit. NCCL M2N (nccl-extensions 0.1.0) takes up to 8 GiB, four slots of 2 GiB.
STAGING_BYTES = 2**30
# Of all that a rank may take beside its weights, one part in so many goes to each of its two windows, up to WINDOW_BYTES; below
# this size starting a message costs more than copying it (25 us at 2.6 GB/s, gloo), so then none.
_WINDOW_SHARE = 8
_LEAST_WINDOW_BYTES = 2**16
# Seconds that `optimal` may take for its linear program where the user sets no limit.
TIME_LIMIT_S = 20.0
# Puts need symmetric memory, which plans can't promise, so they carry steps only where the user says so.
DEFAULT_BACKENDS = (Backend.NCCL,)


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of a plan.

    message_bytes      the largest message; None chooses it by size
    staging_bytes      the most memory that a rank may use to hold pieces for others; 0: none, routes then use only ranks that
                       hold or need a piece
    window_bytes       the most that it may use beside that, each way, to pack what lies apart where ranks send and receive
    max_ops_in_flight  the most steps that a rank drives at once, and the most that arrive at it; None: as many as queues allow
    time_limit_s       seconds for a solver
    backends           libraries that may carry steps between GPUs, NVLink and NICs apart; of several, the cheapest by `costs`
    calibration        costs by which ways to route are compared; None: those that ship for the machine, else nominal rates
    told               is told the share of planning that is done; no part of what is asked
    """

    message_bytes: int | None = None
    staging_bytes: int = STAGING_BYTES
    window_bytes: int = WINDOW_BYTES
    max_ops_in_flight: int | None = None
    time_limit_s: float = TIME_LIMIT_S
    backends: tuple[Backend, ...] = DEFAULT_BACKENDS
    calibration: Calibration | None = None
    told: Callable[[float], None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.message_bytes is not None and self.message_bytes < 1:
            raise InputError(f"message size: expected 1 byte or more, found {self.message_bytes}")
        if self.staging_bytes < 0:
            raise InputError(f"staging memory: expected 0 bytes or more, found {self.staging_bytes}")
        if self.window_bytes < 0:
            raise InputError(f"window memory: expected 0 bytes or more, found {self.window_bytes}")
        if self.max_ops_in_flight is not None and self.max_ops_in_flight < 1:
            raise InputError(f"operations in flight: expected 1 or more, found {self.max_ops_in_flight}")
        if not self.backends or Backend.PROCESSES in self.backends:
            raise InputError("backends: expected one or more libraries that GPUs have: NCCL, NCCL_PUT, NVSHMEM")
        if not self.time_limit_s > 0:
            raise InputError(f"time limit: expected more than 0 seconds, found {self.time_limit_s}")

    def within(self, n_bytes: int) -> "Options":
        """The same options for ranks that use at most so many bytes beside their weights: slots and both windows."""
        window = min(WINDOW_BYTES, n_bytes // _WINDOW_SHARE)
        window = window if window >= _LEAST_WINDOW_BYTES else 0
        return replace(self, staging_bytes=n_bytes - 2 * window, window_bytes=window)

    def tell(self, share: float) -> None:
        """Tell the share of planning that is done, if anyone wants to know."""
        if self.told is not None:
            self.told(share)

    def part(self, first: float, last: float) -> "Options":
        """The same options for a part of planning, which lasts from `first` to `last` of the whole."""
        told = self.told
        return self if told is None else replace(self, told=lambda share: told(first + share * (last - first)))
