"""Proof that staging memory isn't overwritten before it is read, and that each read of it finds what it carries."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.plans import Op, Plan
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import PlanError

# Steps between two shares that are told: some 20 ms.
_A_SHARE: Final = 1024


@dataclass(slots=True)
class _Written:
    """Bytes lo to hi of a slot: the step that wrote them last, its bundle, and who has to be done before they are overwritten."""

    step: int
    bundle: int
    lo: int
    hi: int
    uses: list[int]


def check_slots(plan: Plan, progress: Told = untold) -> None:
    """Reads of a slot must find the piece where the last write put it; writes must wait for all use of what they overwrite.

    Steps may write different bytes of one slot independently of each other; the bytes of a step are those from the first of its
    bundle to the last. progress is told the share of the steps that is done.
    """
    steps = plan.steps
    staged = np.flatnonzero((steps.src_at >= 0) | (steps.dst_at >= 0))
    layouts = _Layouts(plan)
    slots: dict[tuple[int, int], list[_Written]] = defaultdict(list)
    for n_done, step in enumerate(staged.tolist()):
        if n_done % _A_SHARE == 0:
            progress(n_done / len(staged))
        after = set(steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]].tolist())
        bundle, src, src_at, dst_at = (int(c[step]) for c in (steps.bundle, steps.src, steps.src_at, steps.dst_at))
        lo, hi = layouts.span(bundle)
        if src_at >= 0:
            there = [w for w in slots[src, src_at] if w.lo < hi and lo < w.hi]
            written = [w for w in there if w.step in after]
            if not layouts.holds(tuple(w.bundle for w in written), bundle):
                if not written or layouts.holds(tuple(w.bundle for w in there), bundle):
                    raise PlanError(f"step {step} reads slot {src_at} of rank {src} without waiting for the step that fills it")
                by = " and ".join(str(w.step) for w in written)
                raise PlanError(f"step {step} reads pieces from slot {src_at} of rank {src} that step {by} didn't put there")
            for w in written:  # who waits for a reader waits for the writer too
                w.uses = [*(use for use in w.uses if use != w.step), step]
        if dst_at >= 0:
            _check_room(plan, step, bundle, dst_at)
            members = (
                [int(steps.dst[step])]
                if steps.op[step] == Op.COPY
                else [r for r in plan.group(int(steps.group[step])).tolist() if r != src]
            )
            for rank in members:
                held = slots[rank, dst_at]
                over = [w for w in held if w.lo < hi and lo < w.hi]
                read = layouts.known_done(after, [use for w in over if w.uses != [w.step] for use in w.uses])
                unread = [w.step for w in over if w.uses == [w.step]]
                if not read or not all(known_by(plan, rank, w, after) or _is_behind(plan, rank, w, step) for w in unread):
                    raise PlanError(f"step {step} overwrites slot {dst_at} of rank {rank} without waiting for its last use")
                slots[rank, dst_at] = [*(w for w in held if w not in over), _Written(step, bundle, lo, hi, [step])]


class _Layouts:
    """Where the pieces of each bundle lie in a slot, and what steps wait for; each is worked out once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tells: list[bool] = tells(plan).tolist()
        self._spans: dict[int, tuple[int, int]] = {}
        self._layouts: dict[int, dict[tuple[int, int], int]] = {}
        self._holds: dict[tuple[tuple[int, ...], int], bool] = {}
        self._after: dict[int, frozenset[int]] = {}

    def span(self, bundle: int) -> tuple[int, int]:
        """The first byte of a bundle's pieces in a slot, and the end of the last; (0, 0) for an empty one."""
        if bundle not in self._spans:
            row = slice(self._plan.bundles.ptr[bundle], self._plan.bundles.ptr[bundle + 1])
            start = self._plan.bundles.offset[row]
            end = start + self._plan.entry_bytes[row]
            self._spans[bundle] = (int(start.min()), int(end.max())) if len(start) else (0, 0)
        return self._spans[bundle]

    def holds(self, written: tuple[int, ...], bundle: int) -> bool:
        """Whether the bundles that were written hold all pieces of the other, where it has them."""
        key = written, bundle
        if key not in self._holds:
            held = {k: v for one in written for k, v in self._layout(one).items()}
            self._holds[key] = all(held.get(piece) == offset for piece, offset in self._layout(bundle).items())
        return self._holds[key]

    def _layout(self, bundle: int) -> dict[tuple[int, int], int]:
        if bundle not in self._layouts:
            bundles = self._plan.bundles
            row = slice(bundles.ptr[bundle], bundles.ptr[bundle + 1])
            keys = zip(bundles.tensor[row].tolist(), bundles.piece[row].tolist(), strict=True)
            self._layouts[bundle] = dict(zip(keys, bundles.offset[row].tolist(), strict=True))
        return self._layouts[bundle]

    def known_done(self, after: set[int], uses: list[int]) -> bool:
        """Whether a step that waits for `after` waits for all `uses`: straight, or by a step of `after` that does and tells of it
        (a credit, a barrier).
        """
        left = [use for use in uses if use not in after]
        if not left:
            return True
        for step in sorted(after):
            if step not in self._after:
                self._after[step] = frozenset(waits_of(self._plan, step) if self._tells[step] else ())
            left = [use for use in left if use not in self._after[step]]
        return not left


def waits_of(plan: Plan, step: int) -> list[int]:
    """The steps that a step waits for."""
    steps = plan.steps
    found: list[int] = steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]].tolist()
    return found


def tells(plan: Plan) -> NDArray[np.bool_]:
    """Whether a rank that is done with its part in each step knows by it that all of the step's ranks have come to theirs, and
    so that what any of them waited for is over. A collective that carries nothing is no message between them, unless a BARRIER.
    """
    return np.isin(plan.steps.op, (Op.COPY, Op.BARRIER, Op.COMPUTE)) | (plan.step_pieces > 0)


def known_by(plan: Plan, rank: int, writer: int, after: Collection[int]) -> bool:
    """Whether a step that waits for `after` finds on the rank what `writer` brings there: it waits for that straight, or for a
    step that the rank itself drives and that does. That another rank says so isn't enough: its message may overtake the other.
    """
    return writer in after or any(drives(plan, rank, step) and writer in waits_of(plan, step) for step in after)


def _is_behind(plan: Plan, rank: int, before: int, step: int) -> bool:
    """Whether a rank drives a step behind a collective in the same queue: then the one waits there for all of the other."""
    steps = plan.steps
    same = steps.op[before] != Op.COPY and steps.lane[before] == steps.lane[step]
    return bool(same) and drives(plan, rank, before) and drives(plan, rank, step)


def drives(plan: Plan, rank: int, step: int) -> bool:
    """Whether a rank drives a step."""
    steps = plan.steps
    return int(steps.src[step]) == rank or (steps.op[step] != Op.COPY and rank in plan.group(int(steps.group[step])))


def _check_room(plan: Plan, step: int, bundle: int, slot: int) -> None:
    row = slice(plan.bundles.ptr[bundle], plan.bundles.ptr[bundle + 1])
    order = np.argsort(plan.bundles.offset[row], kind="stable")
    start = plan.bundles.offset[row][order]
    end = start + plan.entry_bytes[row][order]
    if len(start) and (start[0] < 0 or end.max() > plan.slot_bytes[slot] or (end[:-1] > start[1:]).any()):
        raise PlanError(f"step {step}: pieces overlap in slot {slot}, or leave its {plan.slot_bytes[slot]} bytes")
