"""A plan run by ranks that have found each other: each with its own memory, in a process that a launcher or we started.

Rule: before any byte of the plan moves, every rank has seen that all have the same plan, and ends in an error if not.
"""

import platform
import time
from collections.abc import Sequence

import numpy as np

from shardroute.executors.attention.contents import Contents
from shardroute.executors.attention.jobs import Attending
from shardroute.executors.attention.on_streams import TorchComputing, tensors_of
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.patterns import Finding
from shardroute.executors.interpreting.trials import run_trials
from shardroute.executors.launching.boards import Board
from shardroute.executors.messages.messages import Messages
from shardroute.executors.steps import describe_place
from shardroute.executors.transports.seam import Deadline, Enqueuing, LateError, Trial, World
from shardroute.planner.plans import Plan
from shardroute.topologies.errors import RunError

# Exchanges by which the clocks of two hosts are compared; the one that took least time counts.
_CLOCK_ROUNDS = 8


def run_over(
    world: World, programs: Programs, messages: Messages, board: Board, digest: str, deadline: Deadline,
    contents: Contents | None = None,
) -> None:  # fmt: skip
    """Run the trials of a board over a world, in memory of the rank's own; a plan that computes needs contents.

    Raises RunError on every rank if plans differ.
    """
    agree_on(world, digest, deadline)
    memory = np.empty(int(programs.arena_bytes[world.rank]), dtype=np.uint8)
    transport = world.open(programs, messages, Arena.whole(memory), deadline)
    job = None if contents is None else Attending.alone(memory, programs, contents, world.rank)
    if contents is not None and isinstance(transport, Enqueuing):
        transport.compute_by(lambda device: TorchComputing(programs, contents, world.rank, tensors_of(device)))
    run_trials(programs, board, memory, world.rank, transport, job)


def agree_on(world: World, digest: str, deadline: Deadline) -> None:
    """Return when all ranks have the same digest. Raises RunError on every rank when they don't, naming who differs."""
    digests = [given.decode() for given in world.exchange(digest.encode(), deadline)]
    if len(set(digests)) > 1:
        most = max(sorted(set(digests)), key=digests.count)
        odd = [f"rank {rank} has {given[:12]}" for rank, given in enumerate(digests) if given != most]
        raise RunError(f"the ranks have different plans: most have {most[:12]}, {', '.join(odd)}; no byte was moved")


def run_launched(
    world: World, plan: Plan, programs: Programs, messages: Messages, *, n_trials: int, deadline: Deadline,
    contents: Contents | None = None,
) -> Sequence[Trial]:
    """Run the plan as this rank of a world of its size; what all ranks saw and found, on rank 0, and nothing on the others.

    Raises RunError with the rank and its step.
    """
    board = Board.blank(programs.n_ranks, len(programs.cells.rank), n_trials, deadline.left_s)
    try:
        run_over(world, programs, messages, board, plan.digest, deadline, contents)
        return _gather(world, programs, board, deadline)
    except LateError as error:
        peers = f", waiting for rank {', '.join(map(str, error.peers))}," if error.peers else ""
        where = describe_place(plan, int(board.at_step[world.rank]))
        late = f"when the {deadline.allowed_s:g} s that --timeout allows were over"
        raise RunError(f"rank {world.rank} {where}{peers} {late}") from error
    except RunError as error:
        raise RunError(f"rank {world.rank} {describe_place(plan, int(board.at_step[world.rank]))}: {error}") from error


def _gather(world: World, programs: Programs, board: Board, deadline: Deadline) -> list[Trial]:
    """The trials as all ranks together saw them, on the clock of rank 0; on other ranks an empty list."""
    ahead_s = _ahead_of_first(world, deadline)
    mine = programs.cells.rank == world.rank
    times = np.concatenate([board.start_s[:, mine], board.end_s[:, mine], board.began_s[:, [world.rank]]], axis=1) - ahead_s
    found, worst = board.found[:, world.rank], board.worst[:, world.rank]
    parts = world.exchange(times.tobytes() + worst.tobytes() + found.tobytes(), deadline)
    if world.rank != 0:
        return []
    n_trials, n_fields = found.shape
    began_s = np.zeros((n_trials, world.size))
    findings = np.zeros((n_trials, world.size, n_fields), dtype=np.int64)
    for rank, part in enumerate(parts):
        cells = np.flatnonzero(programs.cells.rank == rank)
        n_times = n_trials * (2 * len(cells) + 1)
        times = np.frombuffer(part, np.float64, n_times).reshape(n_trials, -1)
        board.start_s[:, cells], board.end_s[:, cells] = times[:, : len(cells)], times[:, len(cells) : -1]
        began_s[:, rank] = times[:, -1]
        board.worst[:, rank] = np.frombuffer(part, np.float64, n_trials, offset=8 * n_times)
        findings[:, rank] = np.frombuffer(part, np.int64, offset=8 * (n_times + n_trials)).reshape(n_trials, n_fields)
    return [
        Trial(float(began_s[k].min()), board.start_s[k], board.end_s[k], [Finding(*row) for row in findings[k].tolist()],
              float(board.worst[k].max(initial=0.0)))
        for k in range(n_trials)
    ]


def _ahead_of_first(world: World, deadline: Deadline) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's; 0 on one host, whose processes share a clock.

    Else from exchanges: when one ends, rank 0 was at some time between those at which this rank entered and left it.
    """
    hosts = world.exchange(platform.node().encode(), deadline)
    if len(set(hosts)) == 1:
        return 0.0
    best_s, ahead_s = np.inf, 0.0
    for _ in range(_CLOCK_ROUNDS):
        entered_s = time.monotonic()
        first_s = world.exchange(np.float64(time.monotonic()).tobytes(), deadline)[0]
        left_s = time.monotonic()
        if left_s - entered_s < best_s:
            best_s = left_s - entered_s
            ahead_s = (entered_s + left_s) / 2 - float(np.frombuffer(first_s, np.float64)[0])
    return ahead_s

