"""What changes about a problem and its machine when GPUs go, come or slow down.

Rule: ranks keep their numbers. A rank that is gone holds and needs nothing; a new one needs what another one does.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.plans import SOURCE, TARGET, Lane, Op, Plan, Steps, lane_of
from shardroute.planner.problems import Problem
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import Topology, build_topology, join_topologies


def of_ranks(problem: Problem, ranks: NDArray[np.bool_]) -> Problem:
    """The problem with the fragments of these ranks alone (bool[n_ranks])."""
    source, target = (_changed(side, lambda f: _rows(f, ranks[f.rank])) for side in (problem.source, problem.target))
    return Problem(problem.tensors, source, target, problem.n_ranks, problem.about)


def without_ranks(problem: Problem, gone: Sequence[int]) -> Problem:
    """The problem without what these ranks hold and need. Raises InputError for a rank that does neither."""
    _check_used(problem, gone, np.union1d(problem.source.ranks, problem.target.ranks), "holds and needs nothing")
    kept = np.ones(problem.n_ranks, dtype=bool)
    kept[list(gone)] = False
    return of_ranks(problem, kept)


def with_new_ranks(problem: Problem, new: Sequence[int], like: Sequence[int]) -> Problem:
    """The problem in which each of the new ranks needs what the rank beside it in `like` needs, and no longer what it did.

    Raises InputError for lists of different lengths, a rank named twice, and a rank in `like` that needs nothing.
    """
    if len(new) != len(like) or len(set(new)) < len(new):
        raise InputError(f"{len(new)} new ranks {_shown(new)} like {len(like)} ranks {_shown(like)}: expected as many, each once")
    _check_used(problem, like, problem.target.ranks, "needs nothing")
    copies = {old: [n for n, o in zip(new, like, strict=True) if o == old] for old in sorted(set(like))}

    def with_copies(fragments: Fragments) -> Fragments:
        stays = np.flatnonzero(~np.isin(fragments.rank, new))
        rows, ranks = [stays], [fragments.rank[stays]]
        for old, wanted in copies.items():
            mine = np.flatnonzero(fragments.rank == old)
            for rank in wanted:
                rows.append(mine)
                ranks.append(np.full(len(mine), rank, dtype=np.int32))
        return replace(_rows(fragments, np.concatenate(rows)), rank=np.concatenate(ranks))

    target = _changed(problem.target, with_copies)
    return Problem(problem.tensors, problem.source, target, max(problem.n_ranks, max(new) + 1), problem.about)


def silent_nics(topology: Topology, gone: Sequence[int]) -> dict[int, float]:
    """Rates for `changed_topology`, by GPU, so that ranks that are gone carry nothing for others; none for GPUs without NICs."""
    return {gpu: 0.0 for gpu in gone if topology.nic_Bps[gpu] > 0}


def changed_topology(topology: Topology, nics: Mapping[int, float], n_ranks: int) -> Topology:
    """The topology with NICs of GPUs as given (bytes per second, 0: down) and units for the ranks; the rest stays."""
    if n_ranks > topology.n_gpus:
        topology = join_topologies([topology, build_topology(topology.parts[-1][0], None, n_ranks - topology.n_gpus)])
    return replace(topology, own_nic_Bps=tuple({**dict(topology.own_nic_Bps), **nics}.items()))


def carried_over(
    plan: Plan, topology: Topology, *, gone: Collection[int] = (), new: Sequence[int] = (), like: Sequence[int] = ()
) -> Plan:
    """What `replan` best starts from after these ranks have gone and come: ways mended where that is simple. Not to be run.

    A new rank steps in for the first one in `like` beside it that is gone. Who was served by a rank that is gone for good is
    served by whoever served that. Any other new rank is served by the one that it is like. Waits are left out. Raises InputError
    for a plan with collectives.
    """
    if (plan.steps.op != Op.COPY).any():
        raise InputError(f"a plan of {plan.strategy} can't be replanned: it has collectives; plan the changed problem anew")
    n_ranks = max([plan.problem.n_ranks, *(rank + 1 for rank in new)])
    instead: dict[int, int] = {}
    added = []
    for rank, old in zip(new, like, strict=True):
        if old in gone and old not in instead:
            instead[old] = rank
        else:
            added.append((rank, old))
    table = np.arange(n_ranks, dtype=np.int32)
    table[list(instead)] = list(instead.values())
    steps = plan.steps
    hops = _Hops(
        steps.bundle, table[steps.src], table[steps.dst], steps.src_at, steps.dst_at, lane_of(steps.lane),
    ).without(sorted(set(gone) - set(instead)), topology)  # fmt: skip
    for rank, old in added:
        hops = hops.with_copy_of(rank, instead.get(old, old), topology)
    n = len(hops.bundle)
    zeros = np.zeros(n, dtype=np.uint8)
    backend = np.full(n, steps.backend[0] if len(steps) else 0, dtype=np.uint8)
    mended = Steps(
        zeros, hops.lane, backend, hops.bundle, hops.src, hops.dst, np.full(n, -1, dtype=np.int32), hops.src_at, hops.dst_at,
        np.zeros(n + 1, dtype=np.int64), np.zeros(0, dtype=np.int32),
    )  # fmt: skip
    return replace(plan, steps=mended, problem=replace(plan.problem, n_ranks=n_ranks), topology=topology)


@dataclass(frozen=True, slots=True, eq=False)
class _Hops:
    """The columns of copies that say who sends what to whom; lanes without queues."""

    bundle: NDArray[np.int32]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    src_at: NDArray[np.int16]
    dst_at: NDArray[np.int16]
    lane: NDArray[np.uint8]

    def without(self, gone: Sequence[int], topology: Topology) -> "_Hops":
        """The hops without these ranks; whom one of them served, its server serves. What only they held is served by nobody."""
        if not gone:
            return self
        src, src_at, lane = self.src.copy(), self.src_at.copy(), self.lane.copy()
        from_gone, to_gone = np.isin(src, gone), np.isin(self.dst, gone)
        kept = ~to_gone
        server: dict[tuple[int, int], tuple[int, int]] = {}
        for row in np.flatnonzero(from_gone | to_gone).tolist():
            bundle, to = int(self.bundle[row]), int(self.dst[row])
            from_, at = int(src[row]), int(src_at[row])
            if from_gone[row]:
                if at == SOURCE or (bundle, from_) not in server:
                    kept[row] = False
                    continue
                from_, at = server[bundle, from_]
            if to_gone[row]:
                server[bundle, to] = from_, at
            else:
                near = topology.domain[from_] == topology.domain[to]
                src[row], src_at[row] = from_, at
                lane[row] = Lane.HAND_OVER if near else Lane.INJECT if at == SOURCE else Lane.RELAY
        return _Hops(self.bundle[kept], src[kept], self.dst[kept], src_at[kept], self.dst_at[kept], lane[kept])

    def with_copy_of(self, rank: int, old: int, topology: Topology) -> "_Hops":
        """The hops, then one from `old` to `rank` of all that arrives at `old`."""
        arrives = np.flatnonzero((self.dst == old) & (self.dst_at == TARGET))
        near = topology.domain[old] == topology.domain[rank]
        n = len(arrives)
        more = _Hops(
            self.bundle[arrives], np.full(n, old, np.int32), np.full(n, rank, np.int32), np.full(n, TARGET, np.int16),
            np.full(n, TARGET, np.int16), np.full(n, Lane.HAND_OVER if near else Lane.RELAY, np.uint8),
        )  # fmt: skip
        return _Hops(*(np.concatenate([getattr(self, f), getattr(more, f)]) for f in self.__dataclass_fields__))


def _rows(fragments: Fragments, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Fragments:
    return Fragments(
        fragments.shape, fragments.rank[rows], fragments.lo[rows], fragments.hi[rows], fragments.buffer[rows],
        fragments.offset[rows], fragments.strides[rows], fragments.buffer_size[rows],
    )  # fmt: skip


def _changed(side: Layout, change: Callable[[Fragments], Fragments]) -> Layout:
    """The layout with each of its distinct fragments changed once, so that equal ones stay one object."""
    known: dict[int, Fragments] = {}
    for fragments in side.fragments:
        if id(fragments) not in known:
            known[id(fragments)] = change(fragments)
    return Layout(tuple(known[id(fragments)] for fragments in side.fragments), side.buffers)


def _check_used(problem: Problem, ranks: Sequence[int], used: NDArray[np.int32], lacks: str) -> None:
    for rank in ranks:
        if rank not in used:
            raise InputError(f"rank {rank} {lacks} in this plan; it has ranks 0 to {problem.n_ranks - 1}")


def _shown(ranks: Sequence[int]) -> str:
    return f"{list(ranks[:4])}"[:-1] + (", ...]" if len(ranks) > 4 else "]")
