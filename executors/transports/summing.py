"""What GPU transports have in common where a library adds up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shardroute.executors.gpus.devices import within
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.library_sums import Shape, Summation, find_summations
from shardroute.executors.transports.seam import Deadline
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class Sum:
    """A call on this rank: pointers to its addends and to where its sum goes (0 if it gets none), bytes of what a rank gets."""

    shape: Shape
    ranks: tuple[int, ...]
    root: int
    src: int
    dst: int
    n_bytes: int
    code: int


@runtime_checkable
class Summing(Protocol):
    """A library that adds up."""

    def why_not(self, sums: Sequence[Summation]) -> str | None:
        """Why it can't make these calls, None if it can; the same on all ranks."""

    def prepare(self, ranks: Sequence[tuple[int, ...]]) -> None:
        """Make what calls among these sets of ranks take. All ranks call it with the same sets."""

    def add_up(self, sums: Sequence[Sum], stream: int) -> None:
        """Put calls on a stream. All ranks of a set make the same calls in one order."""


class LibrarySums:
    """The calls of one rank by their steps. Raises InputError where the library can't add up what the plan asks for."""

    def __init__(self, programs: Programs, rank: int, library: object, deadline: Deadline) -> None:
        found = find_summations(programs)
        self._rank = rank
        self._calls: dict[int, list[Summation]] = {}
        self._library: Summing | None = None
        if not found:
            return
        reason = library.why_not(found) if isinstance(library, Summing) else "it has no reductions for a part of its ranks"
        if reason is not None or not isinstance(library, Summing):
            raise InputError(f"step {found[0].step} can't be added up by this transport: {reason}; processes, gloo and mpi can")
        self._library = library
        within(deadline, lambda: library.prepare(sorted({each.ranks for each in found})))
        for each in found:
            if rank in each.ranks:
                self._calls.setdefault(each.step, []).append(each)

    def __contains__(self, step: int) -> bool:
        return step in self._calls

    def peers(self, step: int) -> list[int]:
        """The other ranks of a step."""
        return sorted({rank for each in self._calls.get(step, ()) for rank in each.ranks} - {self._rank})

    def put(self, step: int, place: Callable[[int], int], stream: int) -> None:
        """Put a step's calls on a stream; `place` gives the pointer to an address of this rank."""
        assert self._library is not None
        sums = []
        for each in self._calls[step]:
            at = each.ranks.index(self._rank)
            dst = each.dst[at]
            src, gets = place(each.src[at]), place(dst) if dst >= 0 else 0
            sums.append(Sum(each.shape, each.ranks, each.root, src, gets, each.n_bytes, each.code))
        self._library.add_up(sums, stream)
