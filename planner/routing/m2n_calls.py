"""What one call of M2N does for the tensors of a class: the flows by which pieces travel, and where they lie in slots.

A *flow* is what enters a chain of domains by one leader. Places in slots are counted in *cells*, each as large as the largest
part of a source: a rank receives into one slot, and a source packs into *blocks* of as many cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.routing.lowering import SLOT_ALIGNMENT
from shardroute.planner.routing.m2n_rules import Chain, Comm, chains, is_split, leaders
from shardroute.topologies.topologies import Topology

# Places of a call, which become slots when its stream is known: the receive slot, then the blocks of packed bytes.
RECEIVE: Final = 0
PACKED: Final = 1


@dataclass(slots=True)
class Flow:
    """What enters a chain by one leader of its first domain: a part from each of some source shards, passed on together.

    leaders   of each domain; parts   (source rank, pieces) of each source shard; turn   the number of its destination shard
    cells     where in the receive slot, counted in cells, each part lies; blocks   in which packed block its source has it
    """

    nodes: tuple[tuple[int, ...], ...]
    leaders: tuple[int, ...]
    turn: int
    parts: list[tuple[int, Ints]]
    cells: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def receivers(self) -> list[int]:
        """All ranks that it reaches."""
        return [rank for node in self.nodes for rank in node]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What one call of M2N does for a tensor of a class.

    room        bytes that each piece takes in a slot
    keeps       (rank, pieces) that a rank copies from itself
    cell_bytes  a cell: what the largest part takes; even   whether all parts take as much
    n_cells     of each receiving rank, the cells of its receive slot; gaps   the ranks among whose cells some are free
    place_bytes what each place takes: the receive slot, then each packed block; empty where nothing crosses
    """

    stage: tuple[int, ...]
    group: Ranks
    room: Ints
    keeps: list[tuple[int, Ints]]
    flows: list[Flow]
    split: bool
    n_cells: dict[int, int]
    gaps: set[int]
    cell_bytes: int
    even: bool
    place_bytes: list[int]


def call_of(pieces: Pieces, itemsize: int, receivers: Ranks, topology: Topology) -> Call:
    """The call for a tensor with these pieces, whose communicator ends with `receivers`, all destination ranks of the problem."""
    stage = np.unique(np.concatenate([np.zeros(0, np.int32), *pieces.holders]))
    by_pattern = [np.flatnonzero(pieces.pattern == i) for i in range(len(pieces.holders))]
    comm = Comm(
        n_ranks=len(np.union1d(stage, receivers)),
        n_domains=len(np.unique(topology.domain[receivers])),
        apart=not np.isin(receivers, stage).any(),
        whole=len(pieces.holders) == 1 and len(pieces.needers[0]) == len(receivers),
    )
    room = -(-(pieces.n_elements * itemsize) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    flows, split = _flows(pieces, by_pattern, topology, comm)
    n_cells, gaps = _lay_out(flows)
    keeps = [
        (rank, which)
        for holders, needers, which in zip(pieces.holders, pieces.needers, by_pattern, strict=True)
        for rank in ([] if comm.apart else np.intersect1d(holders, needers).tolist())
    ]
    group = np.concatenate([stage, np.setdiff1d(receivers, stage)]).astype(np.int32)
    sizes = {int(room[part].sum()) for flow in flows for _, part in flow.parts}
    cell_bytes = max(sizes, default=0)
    places = [n * cell_bytes for n in _cells_of_places(flows, max(n_cells.values(), default=0))]
    return Call(tuple(stage.tolist()), group, room, keeps, flows, split, n_cells, gaps, cell_bytes, len(sizes) == 1, places)


def _flows(pieces: Pieces, by_pattern: Sequence[Ints], topology: Topology, comm: Comm) -> tuple[list[Flow], bool]:
    """The flows of a class, by destination shard; and whether its call is split."""
    shards: dict[tuple[int, ...], list[int]] = {}
    for i, (holders, needers) in enumerate(zip(pieces.holders, pieces.needers, strict=True)):
        left = needers if comm.apart else np.setdiff1d(needers, holders)
        shards.setdefault(tuple(left.tolist()), []).append(i)
    shards.pop((), None)
    flows: list[Flow] = []
    for turn, (receivers, sources) in enumerate(sorted(shards.items())):
        sources.sort(key=lambda i: (int(pieces.holders[i][0]), i))
        fewest = min(len(pieces.holders[i]) for i in sources)
        for chain in chains(fewest, receivers, topology, comm):
            flows += _flows_of(chain, turn, [(int(pieces.holders[i][chain.replica]), by_pattern[i]) for i in sources])
    return flows, any(is_split(comm, len(receivers)) for receivers in shards)


def _flows_of(chain: Chain, turn: int, sources: Sequence[tuple[int, Ints]]) -> list[Flow]:
    """The flows of a chain; which comes first in the receive slots goes round, as cells do within a flow."""
    flows = [Flow(chain.nodes, lead, turn, [sources[i] for i in part]) for part, lead in leaders(chain, len(sources))]
    first = turn // len(flows[0].parts) % len(flows)
    return flows[first:] + flows[:first]


def _lay_out(flows: Sequence[Flow]) -> tuple[dict[int, int], set[int]]:
    """Give each part its cell and block. The cells of each receiver, and the receivers with free ones among them.

    Where a piece lies in a bundle holds for both ends of a copy, so a part has one cell for its source and its receivers. Cells
    go round from flow to flow, so that a source needs few blocks.
    """
    ends: dict[int, int] = {}
    gaps: set[int] = set()
    used: dict[tuple[int, int], int] = {}  # blocks of each source in which a cell is in use
    for flow in flows:
        n = len(flow.parts)
        base = max(ends.get(rank, 0) for rank in flow.receivers)
        gaps.update(rank for rank in flow.receivers if ends.get(rank, 0) < base)
        ends |= dict.fromkeys(flow.receivers, base + n)
        for i, (source, _) in enumerate(flow.parts):
            cell = base + (i + flow.turn) % n
            flow.cells.append(cell)
            flow.blocks.append(used.get((source, cell), 0))
            used[source, cell] = flow.blocks[-1] + 1
    return ends, gaps


def _cells_of_places(flows: Sequence[Flow], n_received: int) -> list[int]:
    cells = [n_received] if flows else []
    for flow in flows:
        for cell, block in zip(flow.cells, flow.blocks, strict=True):
            cells += [0] * (PACKED + block + 1 - len(cells))
            cells[PACKED + block] = max(cells[PACKED + block], cell + 1)
    return cells


