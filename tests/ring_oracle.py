"""A simple interpreter of plans that compute attention: one step after the other, in any order that the plan allows.

Slots are real bytes, so whoever overwrites one too early spoils what is read from it. It shares nothing with checking, predicting
or running but the meaning of a plan as `shardroute.planner.plans` states it, and the arithmetic of one block.
"""

import numpy as np

from shardroute.executors.attention.kernels import Block, add, attend, grad, merge
from shardroute.executors.attention.references import one_device
from shardroute.planner.plans import SOURCE, TARGET, Kind, Mode, Op
from shardroute.planner.ring.chunks import rows_of
from shardroute.planner.ring.workloads import KEY_SIDE, LSE

DTYPES = {"f32": np.float32, "f64": np.float64}


def make_inputs(attention, seed=0):
    """q, k, v and do of the whole call, [batch, tokens, heads, width]."""
    random = np.random.default_rng(seed)
    shape = (attention.batch, attention.n_tokens)
    return {n: random.uniform(-2, 2, (*shape, attention.heads_of(n), attention.head_dim)) for n in ("q", "k", "v", "do")}


class Interpreter:
    """The memory of all ranks, by piece in source and target, by bytes in slots."""

    def __init__(self, plan, inputs):
        self.plan, self.attention = plan, plan.attention
        whole = inputs | one_device(self.attention, inputs, backward=True)
        self.expected = whole
        self.pieces = {}  # (rank, place, tensor, piece) -> array
        self.slots = {}
        for i, tensor in enumerate(plan.problem.tensors):
            boxes = plan.boxes[plan.tensor_class[i]]
            fragments = plan.problem.source.fragments[i]
            for row in range(len(fragments)):
                for piece in range(len(boxes.lo)):
                    if (boxes.lo[piece] >= fragments.lo[row]).all() and (boxes.hi[piece] <= fragments.hi[row]).all():
                        self.pieces[int(fragments.rank[row]), SOURCE, i, piece] = self.part(whole[tensor.name], i, piece)

    def part(self, array, tensor, piece):
        """A piece of a whole tensor, in the plan's dtype."""
        boxes, shape = self.plan.boxes[self.plan.tensor_class[tensor]], self.plan.problem.tensors[tensor].shape
        index = tuple(slice(a, b) for a, b in zip(boxes.lo[piece].tolist(), boxes.hi[piece].tolist(), strict=True))
        return array.reshape(shape)[index].astype(DTYPES[self.plan.problem.tensors[tensor].dtype])

    def view(self, rank, at, tensor, piece, offset, *, makes=False):
        """The piece's array at a place."""
        boxes = self.plan.boxes[self.plan.tensor_class[tensor]]
        shape = tuple((boxes.hi[piece] - boxes.lo[piece]).tolist())
        dtype = DTYPES[self.plan.problem.tensors[tensor].dtype]
        if at >= 0:
            slot = self.slots.setdefault((rank, at), np.full(int(self.plan.slot_bytes[at]), 0xFF, np.uint8))
            return np.ndarray(shape, dtype, slot.data, offset)
        key = (rank, at, tensor, piece)
        if makes and key not in self.pieces:
            self.pieces[key] = np.full(shape, np.nan, dtype)
        return self.pieces[key]

    def entries(self, bundle):
        bundles = self.plan.bundles
        rows = range(int(bundles.ptr[bundle]), int(bundles.ptr[bundle + 1]))
        return [(int(bundles.tensor[r]), int(bundles.piece[r]), int(bundles.offset[r])) for r in rows]

    def run(self, random):
        """Run all steps, each time any that may run."""
        plan, steps = self.plan, self.plan.steps
        queues = {}
        for step in range(len(steps)):
            ranks = [int(steps.src[step])] if steps.op[step] == Op.COPY else plan.group(int(steps.group[step])).tolist()
            for rank in ranks:
                queues.setdefault((rank, int(steps.lane[step])), []).append(step)
        ptr = steps.after_ptr.tolist()
        waiting = {step: set(steps.after[ptr[step] : ptr[step + 1]].tolist()) for step in range(len(steps))}
        done = set()
        while queues:
            heads = [queue[0] for queue in queues.values()]
            ready = sorted(
                s for s in set(heads) if waiting[s] <= done and all(q[0] == s for q in queues.values() if s in q)
            )
            assert ready, "no step may run"
            step = ready[random.integers(len(ready))]
            self.step(step)
            done.add(step)
            queues = {key: q for key, q in ((k, q[1:] if q[0] == step else q) for k, q in queues.items()) if q}

    def step(self, step):
        plan, steps = self.plan, self.plan.steps
        bundle, src, dst, src_at, dst_at = (
            int(c[step]) for c in (steps.bundle, steps.src, steps.dst, steps.src_at, steps.dst_at)
        )
        group = plan.group(int(steps.group[step])).tolist() if steps.group[step] >= 0 else []
        match Op(int(steps.op[step])):
            case Op.COPY:
                for tensor, piece, offset in self.entries(bundle):
                    self.view(dst, dst_at, tensor, piece, offset, makes=True)[...] = self.view(src, src_at, tensor, piece, offset)
            case Op.ALL_GATHER:
                for tensor, piece, offset in self.entries(bundle):
                    holder = next(r for r in group if (r, SOURCE, tensor, piece) in self.pieces)
                    for rank in group:
                        self.view(rank, dst_at, tensor, piece, offset)[...] = self.view(holder, SOURCE, tensor, piece, offset)
            case Op.REDUCE_SCATTER:
                for tensor, piece, offset in self.entries(bundle):
                    home = next(r for r in group if self.needs(r, tensor, piece))
                    self.view(home, TARGET, tensor, piece, offset, makes=True)[...] = sum(
                        self.view(rank, src_at, tensor, piece, offset) for rank in group
                    )
            case Op.COMPUTE:
                self.compute(int(np.searchsorted(plan.computes.step, step)), group[0])

    def needs(self, rank, tensor, piece):
        fragments, boxes = self.plan.problem.target.fragments[tensor], self.plan.boxes[self.plan.tensor_class[tensor]]
        inside = (fragments.lo <= boxes.lo[piece]).all(axis=1) & (boxes.hi[piece] <= fragments.hi).all(axis=1)
        return bool((inside & (fragments.rank == rank)).any())

    def compute(self, row, rank):
        computes = self.plan.computes
        blocks, outputs, parts = {}, {}, []
        for o in range(int(computes.ptr[row]), int(computes.ptr[row + 1])):
            mode, at = Mode(int(computes.mode[o])), int(computes.at[o])
            for tensor, piece, offset in self.entries(int(computes.bundle[o])):
                name = self.plan.problem.tensors[tensor].name
                array = self.view(rank, at, tensor, piece, offset, makes=mode is Mode.WRITE)
                block = self.block(tensor, piece, name, array)
                key = (name in KEY_SIDE, *self.key(tensor, piece))
                blocks.setdefault(key, block).arrays.update(block.arrays)
                if mode is Mode.READ:
                    parts.append((name, key, block.arrays[name]))
                else:
                    outputs[name, key] = (block.arrays[name], mode is Mode.WRITE)
        queries, keys = ([b for k, b in blocks.items() if k[0] is side] for side in (False, True))
        kind = Kind(int(computes.kind[row]))
        fresh = {name: is_fresh for (name, _), (_, is_fresh) in outputs.items()}
        if kind is Kind.ATTEND:
            attend(self.attention, queries, keys, fresh=fresh["o"])
        elif kind is Kind.GRAD:
            grad(self.attention, queries, keys, fresh_dq=fresh["dq"], fresh_dkv=fresh["dk"])
        else:
            for (name, key), (array, is_fresh) in outputs.items():
                found = [a for n, k, a in parts if (n, k) == (name, key)]
                if kind is Kind.ADD:
                    add(array, found, fresh=is_fresh)
                elif name == "o":
                    lses = [a for n, k, a in parts if (n, k) == (LSE, key)]
                    merge(array, outputs[LSE, key][0], list(zip(found, lses, strict=True)), fresh=is_fresh)

    def key(self, tensor, piece):
        boxes, n = self.plan.boxes[self.plan.tensor_class[tensor]], len(self.attention.seq_shape()) + 2
        return (*boxes.lo[piece, :n].tolist(), *boxes.hi[piece, :n].tolist())

    def block(self, tensor, piece, name, array):
        boxes, n = self.plan.boxes[self.plan.tensor_class[tensor]], len(self.attention.seq_shape())
        rows = rows_of(self.attention, boxes.lo[piece : piece + 1, 1 : 1 + n], boxes.hi[piece : piece + 1, 1 : 1 + n])
        n_heads = int(boxes.hi[piece, 1 + n] - boxes.lo[piece, 1 + n])
        return Block(rows, int(boxes.lo[piece, 1 + n]), n_heads, {name: array[:, :, 0] if n == 2 else array})

    def worst(self):
        """The largest difference of any destination piece from one device's, and how many pieces there are."""
        worst, n = 0.0, 0
        for (_, at, tensor, piece), array in self.pieces.items():
            if at == TARGET:
                want = self.part(self.expected[self.plan.problem.tensors[tensor].name], tensor, piece)
                same = (array == want) | (np.isneginf(array) & np.isneginf(want))
                with np.errstate(invalid="ignore"):
                    worst = max(worst, float(np.where(same, 0.0, np.nan_to_num(np.abs(array - want), nan=np.inf)).max(initial=0)))
                n += 1
        return worst, n

    def n_needed(self):
        """Pieces that destination ranks need."""
        tensors = self.plan.problem.tensors
        n_pieces = [len(self.plan.boxes[c].lo) for c in self.plan.tensor_class.tolist()]
        return sum(
            self.needs(r, t, p) for r in range(self.attention.n_ranks) for t in range(len(tensors)) for p in range(n_pieces[t])
        )
