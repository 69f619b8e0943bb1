"""A deliberately simple interpreter of plans: one step after the other, one element after the other, in dictionaries.

It shares nothing with checking, predicting or running but the meaning of a plan as `shardroute.planner.plans` states it.
"""

import itertools

from shardroute.planner.plans import SOURCE, TARGET, Op, Plan


def box_elements(lo, hi):
    """The element indices of a box, row-major."""
    return list(itertools.product(*(range(a, b) for a, b in zip(lo, hi, strict=True))))


def fragment_elements(fragments):
    """(rank, element) -> the (buffer, position) pairs where that rank stores it."""
    where = {}
    for i in range(len(fragments)):
        lo, hi = fragments.lo[i].tolist(), fragments.hi[i].tolist()
        for element in box_elements(lo, hi):
            position = int(fragments.offset[i]) + sum(
                (e - a) * s for e, a, s in zip(element, lo, fragments.strides[i].tolist(), strict=True)
            )
            where.setdefault((int(fragments.rank[i]), element), []).append((int(fragments.buffer[i]), position))
    return where


def deliver(plan: Plan):
    """What each rank holds at the end: {(rank, buffer name, position): (tensor, element)}. Fails where a read finds nothing."""
    problem = plan.problem
    source = [fragment_elements(f) for f in problem.source.fragments]
    target = [fragment_elements(f) for f in problem.target.fragments]
    memory: dict[tuple[int, str, int], tuple[int, tuple[int, ...]]] = {}
    slots: dict[tuple[int, int], dict[int, tuple[int, tuple[int, ...]]]] = {}
    steps, bundles = plan.steps, plan.bundles

    def entries(bundle):
        for e in range(int(bundles.ptr[bundle]), int(bundles.ptr[bundle + 1])):
            tensor = int(bundles.tensor[e])
            boxes = plan.boxes[plan.tensor_class[tensor]]
            lo, hi = boxes.lo[bundles.piece[e]].tolist(), boxes.hi[bundles.piece[e]].tolist()
            yield tensor, box_elements(lo, hi), int(bundles.offset[e])

    def read(rank, place, tensor, element, position):
        if place == SOURCE:
            assert (rank, element) in source[tensor], f"rank {rank} doesn't hold {tensor} {element}"
            return (tensor, element)
        if place == TARGET:
            buffer, at = target[tensor][(rank, element)][0]
            return memory[(rank, problem.target.buffers[tensor][buffer], at)]
        return slots[(rank, place)][position]

    def write(rank, place, tensor, element, position, value):
        if place == TARGET:
            for buffer, at in target[tensor][(rank, element)]:
                key = (rank, problem.target.buffers[tensor][buffer], at)
                assert key not in memory, f"written twice: {key}"
                memory[key] = value
        else:
            slots.setdefault((rank, place), {})[position] = value

    for step in range(len(steps)):
        src, dst_at = int(steps.src[step]), int(steps.dst_at[step])
        group = [] if steps.group[step] < 0 else plan.group(int(steps.group[step])).tolist()
        for tensor, box, offset in entries(int(steps.bundle[step])):
            itemsize = problem.tensors[tensor].itemsize
            sender, receivers = src, [int(steps.dst[step])]
            if steps.op[step] == Op.BROADCAST:
                receivers = [r for r in group if r != src]
            elif steps.op[step] == Op.ALL_GATHER:
                sender, receivers = next(r for r in group if all((r, e) in source[tensor] for e in box)), group
            for i, element in enumerate(box):
                value = read(sender, int(steps.src_at[step]), tensor, element, offset + i * itemsize)
                for receiver in receivers:
                    write(receiver, dst_at, tensor, element, offset + i * itemsize, value)
    return memory


def wanted(plan: Plan):
    """What each rank must hold at the end, from the problem alone."""
    memory = {}
    for tensor, fragments in enumerate(plan.problem.target.fragments):
        for (rank, element), places in fragment_elements(fragments).items():
            for buffer, position in places:
                memory[(rank, plan.problem.target.buffers[tensor][buffer], position)] = (tensor, element)
    return memory
