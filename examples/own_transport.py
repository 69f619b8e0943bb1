"""A transport of your own: plans carried by a library that shardroute doesn't know, here the queues of `multiprocessing`.

    python examples/own_transport.py

A library that sends and receives tagged messages needs three things (`Wire`) and a way for ranks to meet (`World`); what to send
when, packing, sums, verifying and deadlines are shardroute's. Two ranks that cut a matrix by rows give it to one that
has it whole.
"""

import multiprocessing
import queue
from collections import defaultdict

import numpy as np

from shardroute.executors.interpreting.packing import Pool
from shardroute.executors.launching.launched import run_launched
from shardroute.executors.messages.separate import compile_separate
from shardroute.executors.run import result_of
from shardroute.executors.transports.exchanges import MessageTransport
from shardroute.executors.transports.seam import Deadline, LateError
from shardroute.planner import check, make_plan
from shardroute.planner.arguments import tensor_problem
from shardroute.topologies import build_topology, load_machine

CONTROL = -1  # the tag of what isn't part of a plan


class QueueWire:
    """Tagged messages between ranks, each of which has one inbox. A message's number tells it from others of its pair and tag."""

    def __init__(self, rank, inboxes):
        self.rank, self.inboxes = rank, inboxes
        self.sent, self.asked, self.come = defaultdict(int), defaultdict(int), {}

    def send(self, data, to, tag):
        self.sent[to, tag] += 1
        self.inboxes[to].put((self.rank, tag, self.sent[to, tag], bytes(data)))  # a thread of the queue sends it

    def receive(self, data, source, tag):
        self.asked[source, tag] += 1
        return data, (source, tag, self.asked[source, tag])

    def wait(self, handle, deadline):
        if handle is not None:  # a send is done at once: the queue has a copy
            data, wanted = handle
            data[:] = np.frombuffer(self.take(wanted, deadline), np.uint8)

    def take(self, wanted, deadline):
        while wanted not in self.come:
            try:
                *key, content = self.inboxes[self.rank].get(timeout=deadline.limit_s)
            except queue.Empty:
                raise LateError((wanted[0],)) from None
            self.come[tuple(key)] = content
        return self.come.pop(wanted)


class QueueWorld:
    """All ranks. `exchange` gives everyone what everyone has; plans are compared, and findings gathered, by it."""

    key = 0

    def __init__(self, rank, inboxes):
        self.rank, self.size = rank, len(inboxes)
        self.wire, self.pools = QueueWire(rank, inboxes), (Pool(), Pool())

    def exchange(self, payload, deadline):
        for to in range(self.size):
            self.wire.send(payload, to, CONTROL)
        return [self.wire.take(self.wire.receive(None, source, CONTROL)[1], deadline) for source in range(self.size)]

    def open(self, programs, messages, arena, deadline):
        return MessageTransport(self.wire, self.line_up, programs, messages, arena, self.rank, deadline, self.pools)

    def line_up(self, deadline):
        self.exchange(b"", deadline)

    def close(self):
        pass

    def abandon(self):
        pass


def run_rank(rank, inboxes, plan, findings):
    """What each rank does; rank 0 hears how it went."""
    separate = compile_separate(plan)
    world, deadline = QueueWorld(rank, inboxes), Deadline.after(30.0)
    trials = run_launched(world, separate.plan, separate.programs, separate.messages, n_trials=1, deadline=deadline)
    if trials:
        found = result_of(plan, separate.programs, separate.buffers, "queues", trials, None, separate)
        findings.put((found.verified.bytes, [wrong.text for wrong in found.mismatches]))


def main() -> None:
    """Start the ranks, and print what rank 0 has found."""
    problem = tensor_problem("96,64", "f32", "rows=2", "S0", "all=1", "R")
    plan = make_plan(problem, build_topology(load_machine("cpu-processes"), problem.n_ranks), "direct")
    check(plan)
    start = multiprocessing.get_context("spawn")
    inboxes, findings = [start.Queue() for _ in range(problem.n_ranks)], start.Queue()
    ranks = [start.Process(target=run_rank, args=(rank, inboxes, plan, findings)) for rank in range(problem.n_ranks)]
    for process in ranks:
        process.start()
    n_bytes, wrong = findings.get(timeout=60)
    for process in ranks:
        process.join()
    assert not wrong, wrong
    print(f"{len(ranks)} ranks, {len(plan.steps)} steps over queues: {n_bytes} bytes compared, 0 wrong")


if __name__ == "__main__":
    main()
