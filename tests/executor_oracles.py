"""Plans run element by element: deliberately stupid, over one byte array a buffer; and programs run in any legal order."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.blocks import LINEAR
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.memories import Buffers, Part
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.plans import SOURCE, TARGET, Op, Plan

Memory = dict[tuple[int, int, str], NDArray[np.uint8]]  # (rank, Part, buffer name or slot number) -> its bytes
Box = list[tuple[int, int]]


def random_memory(buffers: Buffers, seed: int) -> Memory:
    """Every buffer of every rank, full of noise."""
    noise = np.random.default_rng(seed)
    return {
        (rank, part, buffers.names[i] if part != Part.SLOT else str(i)): noise.integers(0, 256, n, dtype=np.uint8)
        for rank, part, i, n in zip(*(c.tolist() for c in (buffers.rank, buffers.part, buffers.id, buffers.n_bytes)), strict=True)
    }


def in_arenas(memory: Memory, buffers: Buffers) -> list[NDArray[np.uint8]]:
    """The arenas that hold this memory."""
    arenas = [np.zeros(n, np.uint8) for n in buffers.arena_bytes.tolist()]
    for (rank, at), data in zip(zip(buffers.rank.tolist(), buffers.offset.tolist(), strict=True), memory.values(), strict=True):
        arenas[rank][at : at + len(data)] = data
    return arenas


def run_plan_by_elements(plan: Plan, memory: Memory) -> None:
    """All steps in plan order, each element by itself, in place."""
    steps, bundles = plan.steps, plan.bundles
    for i in range(len(steps)):
        group = plan.group(int(steps.group[i])).tolist() if steps.op[i] != Op.COPY else []
        for e in range(*bundles.ptr[[steps.bundle[i], steps.bundle[i] + 1]].tolist()):
            tensor, piece, offset = int(bundles.tensor[e]), int(bundles.piece[e]), int(bundles.offset[e])
            boxes = plan.boxes[int(plan.tensor_class[tensor])]
            box = list(zip(boxes.lo[piece].tolist(), boxes.hi[piece].tolist(), strict=True))
            src, to = int(steps.src[i]), [int(steps.dst[i])]
            if steps.op[i] == Op.BROADCAST:
                to = [r for r in group if r != src]
            if steps.op[i] == Op.ALL_GATHER:
                src, to = next(r for r in group if _containing(plan.problem.source.fragments[tensor], r, box)), group
            data = {rank: _read(plan, memory, src, int(steps.src_at[i]), tensor, box, offset) for rank in to}
            for rank in to:
                _write(plan, memory, rank, int(steps.dst_at[i]), tensor, box, offset, data[rank])


def _containing(fragments: Fragments, rank: int, box: Box) -> list[int]:
    return [
        f
        for f in range(len(fragments))
        if fragments.rank[f] == rank
        and all(fragments.lo[f, d] <= lo and hi <= fragments.hi[f, d] for d, (lo, hi) in enumerate(box))
    ]


def _element_at(
    plan: Plan, at: int, rank: int, tensor: int, box: Box, offset: int
) -> list[tuple[tuple[int, int, str], list[int]]]:
    """For each place where the box lies: the buffer, and the byte at which each of its elements begins, in row-major order."""
    itemsize = plan.problem.tensors[tensor].itemsize
    indices = list(itertools.product(*(range(lo, hi) for lo, hi in box)))
    if at >= 0:
        return [((rank, Part.SLOT, str(at)), [offset + k * itemsize for k in range(len(indices))])]
    layout, part = (plan.problem.source, Part.SOURCE) if at == SOURCE else (plan.problem.target, Part.TARGET)
    fragments = layout.fragments[tensor]
    return [
        (
            (rank, part, layout.buffers[tensor][int(fragments.buffer[f])]),
            [
                itemsize * int(fragments.offset[f] + fragments.strides[f] @ (np.array(index, np.int64) - fragments.lo[f]))
                for index in indices
            ],
        )
        for f in _containing(fragments, rank, box)
    ]  # fmt: skip


def _read(plan: Plan, memory: Memory, rank: int, at: int, tensor: int, box: Box, offset: int) -> list[bytes]:
    itemsize = plan.problem.tensors[tensor].itemsize
    buffer, starts = _element_at(plan, at, rank, tensor, box, offset)[0]
    return [memory[buffer][k : k + itemsize].tobytes() for k in starts]


def _write(plan: Plan, memory: Memory, rank: int, at: int, tensor: int, box: Box, offset: int, data: list[bytes]) -> None:
    assert at >= TARGET
    for buffer, starts in _element_at(plan, at, rank, tensor, box, offset):
        for k, element in zip(starts, data, strict=True):
            memory[buffer][k : k + len(element)] = np.frombuffer(element, np.uint8)


def run_programs(programs: Programs, arenas: Sequence[NDArray[np.uint8]], choose: Callable[[int], int]) -> None:
    """All actions, in an order in which ranks could run them; `choose(n)` picks which of n possible things happens next.

    A rank gets ready for its next action when all that it waits for is complete; then it copies (if it must meet, when all
    ranks of the step are ready), which completes its cell. Fails when nothing can happen before all is done.
    """
    actions, cells = programs.actions, programs.cells
    at, ready, done = actions.ptr[:-1].tolist(), set[int](), set[int]()
    while any(at[rank] < actions.ptr[rank + 1] for rank in range(len(at))):
        possible = []
        for rank, action in enumerate(at):
            if action == actions.ptr[rank + 1]:
                continue
            cell = int(actions.cell[action])
            waits = actions.wait[actions.wait_ptr[action] : actions.wait_ptr[action + 1]].tolist()
            if cell in ready:
                if not actions.meets[action] or _cells(programs, int(actions.step[action])) <= ready:
                    possible.append(rank)
            elif all(_cells(programs, step) <= done for step in waits):
                possible.append(rank)
        assert possible, "deadlock"
        rank = possible[choose(len(possible))]
        action, cell = at[rank], int(actions.cell[at[rank]])
        if cell not in ready:
            ready.add(cell)
            continue
        for row in range(int(actions.block_ptr[action]), int(actions.block_ptr[action + 1])):
            _copy(programs, arenas, rank, row)
        done.add(cell)
        at[rank] += 1
    assert done == set(range(len(cells.rank)))


def _cells(programs: Programs, step: int) -> set[int]:
    return set(range(int(programs.cells.ptr[step]), int(programs.cells.ptr[step + 1])))


def _copy(programs: Programs, arenas: Sequence[NDArray[np.uint8]], rank: int, row: int) -> None:
    blocks, forms = programs.blocks, programs.forms
    src, dst, to, form = int(blocks.src[row]), int(blocks.dst[row]), int(blocks.to[row]), int(blocks.form[row])
    run, count = (int(blocks.n_bytes[row]), []) if form == LINEAR else (int(forms.run[form]), forms.count[form].tolist())
    for index in itertools.product(*(range(n) for n in count)):
        a = src + (sum(i * s for i, s in zip(index, forms.src_stride[form].tolist(), strict=True)) if count else 0)
        b = dst + (sum(i * s for i, s in zip(index, forms.dst_stride[form].tolist(), strict=True)) if count else 0)
        assert a >= 0
        assert b >= 0
        arenas[to][b : b + run] = arenas[rank][a : a + run].copy()
