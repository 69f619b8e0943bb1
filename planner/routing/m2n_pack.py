"""`m2n-pack`: refit as NCCL M2N Reshard does it by default (its PACK path), tensor by tensor.

For each tensor a source packs what it sends into staging memory, all ranks meet at a barrier, sources send to the leaders of the
first domains, and a leader that has the whole part of a source stores it to the ranks of its domain and sends it on to the leader
in the next: a store-and-forward ring of domains, one source's part after the other. Another barrier, and each rank unpacks. Who
sends to whom is in `m2n_rules`. As NeMo RL calls it, every pipeline stage has a communicator of its own with all inference ranks;
the stages are walked in turn, on two streams, and within a stream nothing overlaps.

What a class of like tensors does is worked out once, as steps numbered from its own first; each tensor is a copy of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Backend, Lane, Op, Plan, classes_of, lane_of, queued, ranges
from shardroute.planner.problems import Problem
from shardroute.planner.routing.drafts import Draft, Rows
from shardroute.planner.routing.m2n_calls import Call, call_of
from shardroute.planner.routing.m2n_steps import NO_USES, QUEUES, Template, Uses, template_of
from shardroute.planner.routing.options import Options
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import Topology

# NRL_REFIT_NUM_STREAMS of NeMo RL.
STREAMS: Final = 2
# The share of planning that is over when the steps are written, and of writing when those of each class are known: roughly, as it
# is with DeepSeek-V3 from 256 to 256 GPUs. For those who wait.
_WRITTEN: Final = 0.6
_TEMPLATES: Final = 0.8
# Steps of a plan; each takes some 200 bytes while planning, so this is 4 GB.
MOST_STEPS: Final = 20_000_000


def plan(problem: Problem, pieces: Sequence[Pieces], topology: Topology, backend: Backend, options: Options) -> Plan:
    """The plan that moves every tensor by M2N's PACK; of the options, none applies but `told`."""
    draft = Draft()
    write(draft, problem, pieces, topology, np.arange(len(problem.tensors), dtype=np.int64), options.part(0.0, _WRITTEN))
    return draft.plan("m2n-pack", problem, pieces, topology, backend)


def write(
    draft: Draft, problem: Problem, pieces: Sequence[Pieces], topology: Topology, tensors: Ints, options: Options
) -> Ints:
    """Append the steps that move these tensors; the steps that must be complete before all of it is.

    The options' `told` is told the share of it that is written. Raises InputError when that takes more than MOST_STEPS.
    """
    receivers = problem.target.ranks
    calls: dict[int, Call] = {}
    of_tensor = classes_of(problem)
    for i, cls in enumerate(problem.classes):
        if np.isin(cls.members, tensors).any() and len(pieces[i]):
            calls[i] = call_of(pieces[i], cls.itemsize, receivers, topology)
    templates: dict[int, Template] = {}
    for i, call in calls.items():
        templates[i] = template_of(call, i)
        options.tell(_TEMPLATES * len(templates) / len(calls))
    n_steps = sum(len(templates[c].rows.op) for c in of_tensor[tensors].tolist() if c in templates)
    if n_steps > MOST_STEPS:
        raise InputError(
            f"m2n-pack would take {n_steps:,} steps, one for each part of a tensor and rank that it reaches, and {MOST_STEPS:,} "
            "are the most that are planned; use greedy or domain-relay, which bundle tensors"
        )
    n_places = max((len(c.place_bytes) for c in calls.values()), default=0)
    slot_bytes = [max(c.place_bytes[i] for c in calls.values() if i < len(c.place_bytes)) for i in range(n_places)]
    first_slot = draft.slots(slot_bytes * STREAMS)
    streams = [_Stream.of(problem.n_ranks, first_slot + i * n_places, i) for i in range(STREAMS)]
    stages = sorted({t.stage for t in templates.values()}, key=lambda stage: (stage[0], len(stage), stage))
    waiting: dict[tuple[int, ...], list[int]] = {stage: [] for stage in stages}
    for tensor in tensors.tolist():
        if int(of_tensor[tensor]) in templates:
            waiting[templates[int(of_tensor[tensor])].stage].append(tensor)
    last: list[Ints] = [np.zeros(0, np.int64)]
    n_turns = max(map(len, waiting.values()), default=0)
    for turn in range(n_turns):
        options.tell(_TEMPLATES + (1.0 - _TEMPLATES) * turn / n_turns)
        for number, stage in enumerate(stages):
            if turn < len(waiting[stage]):
                tensor = waiting[stage][turn]
                last.append(_append(draft, templates[int(of_tensor[tensor])], tensor, streams[number % STREAMS]))
    return np.concatenate([*last, *(s.received.step for s in streams)])


@dataclass(slots=True)
class _Stream:
    """Where a stream stands.

    slot        the first of its slots
    barrier     of each rank, the last barrier that it came to, -1 for none
    received    uses of receive slots, by rank; sent   of packed blocks, by block * n_ranks + rank
    """

    slot: int
    number: int
    barrier: Ints
    received: Uses = NO_USES
    sent: Uses = NO_USES

    @classmethod
    def of(cls, n_ranks: int, slot: int, number: int) -> "_Stream":
        """A stream on which nothing has happened."""
        return cls(slot, number, np.full(n_ranks, -1))


def _append(draft: Draft, template: Template, tensor: int, stream: _Stream) -> Ints:
    """Append one tensor's steps on the stream; those of them that nothing on the stream will wait for."""
    rows = template.rows
    first = draft.n_steps
    bundle = draft.bundles(template.counts, np.full(len(template.piece), tensor), template.piece, template.offset)
    owner, dep = [template.owner], [template.dep + first]
    if template.enters >= 0:
        n_ranks = len(stream.barrier)
        sender = rows.src[template.packs]
        sent = replace(template.sent.moved(first), key=template.block * n_ranks + sender)
        n_keys = n_ranks * (1 + int(max(sent.key.max(), stream.sent.key.max(initial=0))) // n_ranks)
        before = stream.barrier[sender]
        over, left = stream.sent.overwritten(sent, n_keys)
        # Of the uses of a block, each pack of it waits for each.
        by_key = np.argsort(stream.sent.key[over], kind="stable")
        key, step = stream.sent.key[over][by_key], stream.sent.step[over][by_key]
        item, pack = ranges(np.searchsorted(key, np.arange(n_keys + 1)), sent.key)
        owner += [template.packs[before >= 0], template.packs[pack]]
        dep += [before[before >= 0], step[item]]
        stream.sent = left
        over, left = stream.received.overwritten(template.received.moved(first), n_ranks)
        owner.append(np.full(int(over.sum()), template.enters))
        dep.append(stream.received.step[over])
        stream.received = left
        stream.barrier[template.group] = first + template.leaves
    group = draft.group(template.group) if template.enters >= 0 else -1
    barrier = rows.op == Op.BARRIER
    in_stream = queued(np.array(0), np.array(stream.number * QUEUES))
    draft.steps(
        Rows(
            rows.op, np.where(lane_of(rows.lane.astype(np.uint8)) == Lane.RELAY, rows.lane, rows.lane + in_stream),
            np.where(barrier, draft.empty_bundle() if barrier.any() else -1, rows.bundle + bundle), rows.src, rows.dst,
            np.where(barrier, group, -1),
            np.where(rows.src_at >= 0, rows.src_at + stream.slot, rows.src_at),
            np.where(rows.dst_at >= 0, rows.dst_at + stream.slot, rows.dst_at),
        ),
        np.concatenate(owner), np.concatenate(dep),
    )  # fmt: skip
    return template.local + first
