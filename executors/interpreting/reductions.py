"""A plan whose REDUCE_SCATTERs are copies and sums, for ranks that can't read each other's memory.

Each becomes a ring: for every home of pieces in the group, a partial sum travels from the rank behind that home round to it, and
each rank on the way adds its own part (Patarasuk and Yuan 2009, the first half of their all-reduce). A rank sends (n - 1) / n of
the slot, as any reduce-scatter must, and takes one more slot of the same size, in which partial sums arrive.

Rule: what comes out is a plan like any other, and check proves it. Arrivals of one REDUCE_SCATTER never meet in the slot; senders
of the next one first hear by a credit that the last one's sums were made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardroute.executors.interpreting.memories import Memory, Part
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import SOURCE, TARGET, Bundles, Computes, Kind, Lane, Mode, Op, Plan, Steps, queued
from shardroute.topologies.errors import PlanError

# A step that is there for the plan's meaning only, and stands for none of the plan that was given.
NO_STEP = -1


def without_reductions(plan: Plan) -> tuple[Plan, Ints]:
    """The plan with every REDUCE_SCATTER taken apart; and for each of its steps the one that it is a part of, or NO_STEP.

    A plan without any comes back as it is. Raises PlanError for pieces with several homes in one group.
    """
    if plan.attention is None or not (plan.steps.op == Op.REDUCE_SCATTER).any():
        return plan, np.arange(len(plan.steps))
    draft = _Draft(plan)
    for step in range(len(plan.steps)):
        if plan.steps.op[step] == Op.REDUCE_SCATTER:
            draft.reduce(step)
        else:
            draft.keep(step)
    return draft.plan(), np.array(draft.of, dtype=np.int64)


@dataclass(slots=True)
class _Row:
    op: Op
    lane: int
    backend: int
    bundle: int
    src: int
    dst: int
    group: int
    src_at: int
    dst_at: int
    after: set[int]
    ranks: frozenset[int]  # that see when it is complete


@dataclass(slots=True)
class _Made:
    """The steps that stand for one of the given plan: by rank those that it sees, of which it must wait for all."""

    by_rank: dict[int, set[int]] = field(default_factory=dict)

    def add(self, ranks: Iterable[int], step: int) -> None:
        for rank in ranks:
            self.by_rank.setdefault(rank, set()).add(step)

    def seen_by(self, ranks: Iterable[int]) -> set[int]:
        return set().union(*(self.by_rank.get(rank, set()) for rank in ranks))


class _Draft:
    def __init__(self, plan: Plan) -> None:
        self._plan, self._memory = plan, Memory(plan)
        self._rows: list[_Row] = []
        self.of: list[int] = []
        self._made: list[_Made] = []  # by step of the given plan
        bundles = plan.bundles
        self._entries: list[tuple[int, int, int]] = list(
            zip(bundles.tensor.tolist(), bundles.piece.tolist(), bundles.offset.tolist(), strict=True)
        )
        self._bundle_ptr: list[int] = bundles.ptr.tolist()
        self._bundle_ptr.append(len(self._entries))
        self._nothing = len(self._bundle_ptr) - 2  # an empty bundle
        self._groups: list[tuple[int, ...]] = [tuple(plan.group(g).tolist()) for g in range(len(plan.group_ptr) - 1)]
        self._slots: list[int] = plan.slot_bytes.tolist()
        self._computes: list[tuple[int, int, list[tuple[int, int, int]]]] = []
        self._landing: dict[tuple[int, ...], int] = {}  # the slot in which partial sums arrive, by group
        self._last_sums: dict[tuple[int, ...], dict[int, set[int]]] = {}  # of the last reduction, by group and rank

    def keep(self, step: int) -> None:
        steps, plan = self._plan.steps, self._plan
        op, group = Op(int(steps.op[step])), int(steps.group[step])
        ranks = [int(steps.src[step]), int(steps.dst[step])] if op is Op.COPY else list(self._groups[group])
        ranks += [int(steps.src[step])] if op is Op.BROADCAST else []
        driver = [int(steps.src[step])] if op is Op.COPY else ranks
        made = _Made()
        number = self._add(
            step,
            _Row(
                op, int(steps.lane[step]), int(steps.backend[step]), int(steps.bundle[step]), int(steps.src[step]),
                int(steps.dst[step]), group, int(steps.src_at[step]), int(steps.dst_at[step]), self._after(step, driver),
                frozenset(ranks),
            ),
        )  # fmt: skip
        if op is Op.COMPUTE:
            row = int(np.searchsorted(plan.computes.step, step))
            operands = range(int(plan.computes.ptr[row]), int(plan.computes.ptr[row + 1]))
            columns = (plan.computes.bundle, plan.computes.at, plan.computes.mode)
            found = [(int(columns[0][i]), int(columns[1][i]), int(columns[2][i])) for i in operands]
            self._computes.append((number, int(plan.computes.kind[row]), found))
        made.add(range(plan.problem.n_ranks) if op is Op.BARRIER else ranks, number)
        self._made.append(made)

    def reduce(self, step: int) -> None:
        steps = self._plan.steps
        members = self._groups[int(steps.group[step])]
        n, slot, made = len(members), int(steps.src_at[step]), _Made()
        homes = self._homes(step, members)
        landing = self._landing.setdefault(members, len(self._slots)) if n > 1 else -1
        if landing == len(self._slots):
            self._slots.append(0)
        if n > 1:
            self._slots[landing] = max(self._slots[landing], self._slots[slot])
        credits = self._credits(step, members)
        ready = {rank: self._after(step, [rank]) for rank in members}
        before: dict[tuple[int, int], int] = {}  # the last sum of a home's pieces on a rank
        sums: dict[int, set[int]] = {}
        for hop in range(n - 1):
            copies = {}
            for i, rank in enumerate(members):
                home, to = members[(i - 1 - hop) % n], members[(i + 1) % n]
                if home not in homes:
                    continue
                after = ready[rank] | credits.get(rank, set()) | ({before[rank, home]} if (rank, home) in before else set())
                copies[rank] = self._add(
                    step,
                    _Row(
                        Op.COPY, int(steps.lane[step]), int(steps.backend[step]), homes[home], rank, to, -1, slot, landing, after,
                        frozenset([rank, to]),
                    ),
                )  # fmt: skip
                made.add([rank, to], copies[rank])
            for i, rank in enumerate(members):
                home = members[(i - 1 - hop) % n]
                if rank in copies:
                    to = members[(i + 1) % n]
                    number = self._sum(step, to, homes[home], slot, landing, ready[to] | {copies[rank]}, home == to)
                    before[to, home] = number
                    made.add([to], number)
                    sums.setdefault(to, set()).add(number)
        if n == 1 and homes:
            made.add(members, self._sum(step, members[0], homes[members[0]], slot, -1, ready[members[0]], True))
        self._last_sums[members] = sums
        self._made.append(made)

    def _homes(self, step: int, members: Sequence[int]) -> dict[int, int]:
        """For each rank that is home to pieces of the step's bundle, a bundle of these."""
        bundle = int(self._plan.steps.bundle[step])
        entries = self._entries[self._bundle_ptr[bundle] : self._bundle_ptr[bundle + 1]]
        tensor, piece, _ = (np.array(column) for column in zip(*entries, strict=True))
        rank = np.repeat(np.array(members, dtype=np.int64), len(entries))
        row, _, _ = self._memory.locate(Part.TARGET, rank, np.tile(tensor, len(members)), np.tile(piece, len(members)))
        row = np.unique(row)
        if not np.array_equal(np.sort(row % len(entries)), np.arange(len(entries))):
            raise PlanError(f"step {step}: a piece that is reduced must have one home in its group")
        found: dict[int, int] = {}
        for i, member in enumerate(members):
            mine = (row[row // len(entries) == i] % len(entries)).tolist()
            if mine:
                found[member] = len(self._bundle_ptr) - 1
                self._entries += [entries[k] for k in mine]
                self._bundle_ptr.append(len(self._entries))
        return found

    def _credits(self, step: int, members: tuple[int, ...]) -> dict[int, set[int]]:
        """By rank the credits that its successor gives when the sums of the group's last reduction are made."""
        steps, found = self._plan.steps, dict[int, set[int]]()
        last = self._last_sums.get(members, {})
        if not last:
            return found
        lane = int(queued(np.array([Lane.CREDIT]), np.array([0]))[0])
        for i, rank in enumerate(members):
            after = members[(i + 1) % len(members)]
            if last.get(after):
                row = _Row(
                    Op.COPY, lane, int(steps.backend[step]), self._nothing, after, rank, -1, SOURCE, TARGET, set(last[after]),
                    frozenset([after, rank]),
                )  # fmt: skip
                found[rank] = {self._add(NO_STEP, row)}
        return found

    def _sum(
        self, step: int, rank: int, bundle: int, slot: int, landing: int, after: set[int], is_home: bool
    ) -> int:
        """Add what has arrived to the rank's own part; at home into the destination weights."""
        reads = [(bundle, landing, int(Mode.READ))] if landing >= 0 else []
        operands = [(bundle, TARGET, int(Mode.WRITE)), (bundle, slot, int(Mode.READ)), *reads]
        if not is_home:
            operands = [(bundle, slot, int(Mode.UPDATE)), *reads]
        lane = int(queued(np.array([Lane.COMPUTE]), np.array([0]))[0])
        row = _Row(
            Op.COMPUTE, lane, int(self._plan.steps.backend[step]), self._nothing, -1, -1, self._group(rank), SOURCE, TARGET,
            after, frozenset([rank]),
        )  # fmt: skip
        number = self._add(step, row)
        self._computes.append((number, int(Kind.ADD), operands))
        return number

    def _group(self, rank: int) -> int:
        if (rank,) not in self._groups:
            self._groups.append((rank,))
        return self._groups.index((rank,))

    def _after(self, step: int, ranks: Iterable[int]) -> set[int]:
        """What stands for the steps that it waits for, as far as these ranks see it."""
        steps, ranks = self._plan.steps, list(ranks)
        found: set[int] = set()
        for before in steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]].tolist():
            found |= self._made[before].seen_by(ranks)
        return found

    def _add(self, of: int, row: _Row) -> int:
        self._rows.append(row)
        self.of.append(of)
        return len(self._rows) - 1

    def plan(self) -> Plan:
        rows, operands = self._rows, [operand for _, _, found in self._computes for operand in found]
        steps = Steps(
            np.array([row.op for row in rows], np.uint8), np.array([row.lane for row in rows], np.uint8),
            np.array([row.backend for row in rows], np.uint8), np.array([row.bundle for row in rows], np.int32),
            np.array([row.src for row in rows], np.int32), np.array([row.dst for row in rows], np.int32),
            np.array([row.group for row in rows], np.int32), np.array([row.src_at for row in rows], np.int16),
            np.array([row.dst_at for row in rows], np.int16),
            np.cumsum([0, *(len(row.after) for row in rows)]),
            np.array([w for row in rows for w in sorted(row.after)], np.int32),
        )  # fmt: skip
        tensor, piece, offset = np.array(self._entries, dtype=np.int64).reshape(-1, 3).T
        bundle, at, mode = np.array(operands, dtype=np.int64).reshape(-1, 3).T
        return replace(
            self._plan,
            bundles=Bundles(np.array(self._bundle_ptr), tensor.astype(np.int32), piece.astype(np.int32), offset),
            steps=steps,
            group_ptr=np.cumsum([0, *map(len, self._groups)]),
            group_ranks=np.array([rank for group in self._groups for rank in group], np.int32),
            slot_bytes=np.array(self._slots, np.int64),
            computes=Computes(
                np.array([step for step, _, _ in self._computes], np.int32),
                np.array([kind for _, kind, _ in self._computes], np.uint8),
                np.cumsum([0, *(len(found) for _, _, found in self._computes)]), bundle.astype(np.int32), at.astype(np.int16),
                mode.astype(np.uint8),
            ),
        )  # fmt: skip
