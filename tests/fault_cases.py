"""What is done to which rank while four ranks reshard along a chain, and what must come of it; see fault_ranks."""

from dataclasses import dataclass
from typing import Literal

N_RANKS = 4
# What all ranks tell each other, in order: plans, readiness; then before and after each transfer.
READY, FIRST_END, BEGIN, END = 1, 3, 4, 5
SOON_S = 2.5  # of transfers that end at their deadline
FAR_S = 20.0  # of those that must end long before it


@dataclass(frozen=True, slots=True)
class Case:
    """Rank `rank` does `does`: to its second message, or before the ranks tell each other something for the `at`th time.

    fails   what the survivors' errors say, each at least one of these (regular expressions); () if the transfer ends well
    holds   what destination tensors hold afterwards
    gate    whether the gate runs it; `pytest -m faults` runs all
    """

    rank: int
    does: str
    fails: tuple[str, ...] = ()
    at: int = -1
    holds: Literal["old", "new", "torn", "either", ""] = "old"
    verify: bool = False
    timeout_s: float = FAR_S
    spare_bytes: int | None = None

    @property
    def dies(self) -> bool:
        """Whether the rank is gone afterwards."""
        return self.does in ("die", "die afterwards", "stop")


def late(rank: int) -> tuple[str, ...]:
    """Errors of ranks that waited until the deadline, or heard of it from one that did."""
    return (rf"waiting for rank [0-3], when the {SOON_S:g} s", rf"rank [0-3] gave up: rank [0-3] .*waiting for rank {rank}")


def lost(rank: int) -> tuple[str, ...]:
    """Errors of ranks that lost one, or a neighbour that gave up for it."""
    return (r"rank [0-3] is lost: ", rf"rank [0-3] gave up: rank [0-3] .*rank {rank} is lost")


def wrong(rank: int, peer: int) -> tuple[str, ...]:
    """Errors about a piece that isn't what was sent."""
    return (rf"rank {rank} at step \d+ \(copy of 1 piece, 32 B, rank {peer} -> rank {rank}\): piece \[.*\] of t0 .*"
            rf"isn't what rank {peer} sent, by its checksum",)  # fmt: skip


CASES = {
    "relay dies before the transfer": Case(1, "die", lost(1), BEGIN),
    "source dies before the transfer": Case(0, "die", lost(0), BEGIN),
    "last rank dies before the transfer": Case(3, "die", lost(3), BEGIN),
    "rank dies before it is ready": Case(2, "die", lost(2), READY, ""),
    "relay dies during the transfer": Case(1, "die", lost(1)),
    "source dies during the transfer": Case(0, "die", lost(0)),
    "second relay dies during the transfer": Case(2, "die", lost(2)),
    "relay dies before it votes": Case(1, "die", lost(1), END),
    "source dies before it votes": Case(0, "die", lost(0), END),
    "last rank dies before it votes": Case(3, "die", lost(3), END),
    "relay dies afterwards": Case(1, "die afterwards", holds="new"),
    "source dies afterwards": Case(0, "die afterwards", holds="new"),
    "relay stops": Case(1, "stop", (*late(1), *lost(1)), timeout_s=SOON_S),
    "last rank stops before it votes": Case(3, "stop", (*late(3), *lost(3)), END, timeout_s=SOON_S),
    "relay stops and is resumed": Case(1, "stop for a while", holds="new"),
    "source stops and is resumed": Case(0, "stop for a while", at=END, holds="new"),
    "link drops a message": Case(1, "drop", (*late(1), *lost(1)), timeout_s=SOON_S),
    "first link drops a message": Case(0, "drop", (*late(0), *lost(0)), timeout_s=SOON_S),
    "link is cut": Case(1, "cut", lost(1)),
    "link of the source is cut": Case(0, "cut", lost(0)),
    "link is cut before the vote": Case(2, "cut", lost(2), END),
    "link stalls": Case(1, "stall", (*late(1), *lost(1)), timeout_s=SOON_S),
    "link stalls before the vote": Case(3, "stall", (*late(3), *lost(3)), END, timeout_s=SOON_S),
    "link is late": Case(1, "late", holds="new"),
    "vote is late": Case(2, "late", at=END, holds="new"),
    "first hop is corrupted": Case(0, "corrupt", wrong(1, 0), verify=True),
    "second hop is corrupted": Case(1, "corrupt", wrong(2, 1), verify=True),
    "last hop is corrupted": Case(2, "corrupt", wrong(3, 2), verify=True),
    "memory is corrupted after arrival": Case(3, "corrupt what arrived", wrong(3, 2), verify=True),
    "memory of a relay is corrupted": Case(2, "corrupt what arrived", wrong(2, 1), verify=True),
    "one rank has another plan": Case(2, "have another plan", ("the ranks have different plans: .*rank 2 has",), holds=""),
    "one rank has another version": Case(2, "say another version", ("different versions: most 2, rank 2 7; no byte was moved",)),
    "source has another version": Case(0, "say another version", ("different versions: most 2, rank 0 7",)),
    "one rank verifies alone": Case(3, "verify alone", ("different settings: most verify=False, rank 3 verify=True",), holds=""),
    "one rank lacks memory for staging": Case(
        1, "lack memory", ("rank 1 couldn't get ready: there is no memory for 1.07 GB",), holds=""
    ),
    "one rank gives no tensors": Case(2, "give no tensors", (*late(2), *lost(2)), timeout_s=SOON_S),
    "one rank stays away": Case(2, "stay away", late(2), timeout_s=SOON_S),
    "one rank raises": Case(1, "raise", (*lost(1), "rank 1 gave up: the rank's own code failed")),
    "one rank's weights are read on": Case(
        2, "read on", ("its weights were still read", "rank 2 gave up: rank 2 .*its weights were still read", *late(2)),
        timeout_s=SOON_S,
    ),
    "relay dies while weights are written in place": Case(1, "die", lost(1), spare_bytes=0, holds="torn"),
    "link is corrupted while weights are written in place": Case(
        1, "corrupt", wrong(2, 1), verify=True, spare_bytes=0, holds="either"
    ),
}  # fmt: skip

# The gate runs these, `pytest -m faults` all.
IN_GATE = frozenset({
    "link drops a message",
    "link is cut",
    "memory is corrupted after arrival",
    "one rank has another plan",
    "one rank has another version",
    "one rank lacks memory for staging",
    "relay dies afterwards",
    "relay dies before it votes",
    "relay dies during the transfer",
    "relay stops",
    "relay stops and is resumed",
    "second hop is corrupted",
})
OVER_MPI = (
    "second hop is corrupted", "one rank has another version", "link drops a message", "first hop is corrupted",
    "memory is corrupted after arrival", "one rank has another plan", "link is late", "one rank gives no tensors",
)  # fmt: skip
