"""A plan run by ranks that have found each other: each with its own memory, in a process that a launcher or we started.

Rule: before any byte of the plan moves, every rank has seen that all have the same plan, and ends in an error if not.
"""

import platform
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention.contents import Contents
from shardroute.executors.attention.jobs import Attending
from shardroute.executors.attention.on_streams import TorchComputing
from shardroute.executors.gpus.tensors import tensors_of
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.patterns import Finding
from shardroute.executors.interpreting.piece_sums import PieceRows
from shardroute.executors.interpreting.trials import Following, run_trials
from shardroute.executors.launching.boards import Board, Seen
from shardroute.executors.launching.tokens import NONCE_BYTES, VARIABLE, is_same, proof, token_of
from shardroute.executors.messages.messages import Messages
from shardroute.executors.steps import describe_place
from shardroute.executors.transports.following import follow_on_device, follow_over
from shardroute.executors.transports.roll_calls import GAVE_UP
from shardroute.executors.transports.seam import (
    Deadline,
    Enqueuing,
    Gapped,
    GivingUp,
    LateError,
    Silent,
    Trial,
    Witnessed,
    World,
)
from shardroute.planner.plans import Plan
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import RunError
from shardroute.topologies.units import format_bytes

# Exchanges by which the clocks of two hosts are compared; the one that took least time counts.
_CLOCK_ROUNDS = 8


def run_over(
    world: World, programs: Programs, messages: Messages, board: Board, digest: str, deadline: Deadline,
    contents: Contents | None = None, pieces: PieceRows | None = None, progress: Told = untold,
) -> None:  # fmt: skip
    """Run the trials of a board over a world, in memory of the rank's own; a plan that computes needs contents. With `pieces`
    checksums follow them. `progress` is told the share of trials as each is done.

    Raises RunError on every rank if plans differ, and where there is no memory; InputError for checksums where torch works on no
    GPU.
    """
    agree_on(world, digest, deadline)
    memory = own_memory(int(programs.arena_bytes[world.rank]))
    arena = Arena.whole(memory)
    transport = world.open(programs, messages, arena, deadline)
    followed: Following | None = None
    carries = transport
    if pieces is not None:
        if isinstance(transport, Enqueuing):
            followed = follow_on_device(world, transport, programs, pieces, deadline)
        else:
            carries = followed = follow_over(world, transport, programs, pieces, arena, deadline)
    job = None if contents is None else Attending.alone(memory, programs, contents, world.rank)
    if contents is not None and isinstance(transport, Enqueuing):
        transport.compute_by(lambda device: TorchComputing(programs, contents, world.rank, tensors_of(device)))
    run_trials(programs, board, memory, world.rank, carries, job, followed, progress)


def own_memory(n_bytes: int) -> NDArray[np.uint8]:
    """So many bytes of this rank's own. Raises RunError where the system has no room for them."""
    try:
        return np.empty(n_bytes, dtype=np.uint8)
    except MemoryError:
        raise RunError(f"there is no memory for {format_bytes(n_bytes)} of buffers and staging slots") from None


def agree_on(world: World, digest: str, deadline: Deadline) -> None:
    """Return when all ranks have the same digest, and have proved that they have SHARDROUTE_TOKEN, where any has one. Raises
    RunError on every rank when they don't, naming who differs: so a stranger who came in through a library that knows no token
    gets no byte and gives none.
    """
    token = token_of()
    nonce = secrets.token_hex(NONCE_BYTES) if token else ""
    there = world.present if isinstance(world, Gapped) else range(world.size)
    every = world.exchange(f"{digest} {nonce}".encode(), deadline)
    told = [every[rank].decode(errors="replace").partition(" ") for rank in there]
    digests = [given for given, _, _ in told]
    if len(set(digests)) > 1:
        most = max(sorted(set(digests)), key=digests.count)
        odd = [f"rank {rank} has {given[:12]}" for rank, given in zip(there, digests, strict=True) if given != most]
        raise RunError(f"the ranks have different plans: most have {most[:12]}, {', '.join(odd)}; no byte was moved")
    nonces = "".join(given for _, _, given in told).encode()
    if not nonces:
        return
    proofs = [proof(token, b"world", nonces, digest.encode(), rank.to_bytes(4, "little")) for rank in range(world.size)]
    given = world.exchange(proofs[world.rank], deadline)
    strange = [rank for rank in there if not is_same(given[rank], proofs[rank])]
    if strange or not token:
        who = f"rank {', '.join(map(str, strange))}" if token else f"this rank, {world.rank},"
        raise RunError(f"{who} couldn't prove to have the others' {VARIABLE}; set the same on all ranks; no byte was moved")


def run_launched(
    world: World, plan: Plan, programs: Programs, messages: Messages, *, n_trials: int, deadline: Deadline,
    contents: Contents | None = None, pieces: PieceRows | None = None, seen: Seen | None = None,
    progress: Told = untold,
) -> Sequence[Trial]:
    """Run the plan as this rank of a world of its size; what all ranks saw and found, on rank 0, and nothing on the others.
    `seen` is where somebody else may see how far this rank has come; `progress` is told the share of trials as each is done.

    Raises RunError with the rank and its step.
    """
    board = Board.blank(programs.n_ranks, len(programs.cells.rank), n_trials, deadline.left_s)
    if seen is not None:
        board = replace(board, at_step=seen.at_step, phase=seen.phase, share=seen.share)
    elif isinstance(world, Witnessed):
        board = replace(board, at_step=world.at_step)
    try:
        run_over(world, programs, messages, board, plan.digest, deadline, contents, pieces, progress)
        return _gather(world, programs, board, deadline)
    except LateError as error:
        peers = f", waiting for rank {', '.join(map(str, error.peers))}," if error.peers else ""
        where = describe_place(plan, int(board.at_step[world.rank]))
        late = f"when the {deadline.allowed_s:g} s that --timeout allows were over"
        words = f"rank {world.rank} {where}{peers} {late}"
        _give_up(world, words)
        raise GaveUpError(words, _silent(world, plan)) from error
    except RunError as error:
        words = f"rank {world.rank} {describe_place(plan, int(board.at_step[world.rank]))}: {error}"
        _give_up(world, str(error) if GAVE_UP in str(error) else words)
        raise GaveUpError(words, _silent(world, plan)) from error


class GaveUpError(RunError):
    """A rank failed: `words` say where and why, `others` where those were that said nothing themselves."""

    def __init__(self, words: str, others: Sequence[str]) -> None:
        super().__init__("; ".join([words, *others]))
        self.words, self.others = words, tuple(others)


def _silent(world: World, plan: Plan) -> list[str]:
    """What is known of ranks that say nothing themselves."""
    return [_last_seen(plan, rank) for rank in world.silent()] if isinstance(world, Witnessed) else []


def _last_seen(plan: Plan, rank: Silent) -> str:
    where = describe_place(plan, rank.step)
    if rank.is_gone:
        return f"rank {rank.rank} can't be heard any more and was last seen {where}"
    if rank.is_stopped:
        return f"rank {rank.rank} is stopped by a signal {where}"
    return f"rank {rank.rank} said nothing and was last seen {where}"


def _give_up(world: World, words: str) -> None:
    """Tell those that would wait for this rank why it fails; where another rank has given up before, that one's words."""
    if isinstance(world, GivingUp):
        world.give_up(words)


def _gather(world: World, programs: Programs, board: Board, deadline: Deadline) -> list[Trial]:
    """The trials as all ranks together saw them, on the clock of rank 0; on other ranks an empty list."""
    ahead_s = _ahead_of_first(world, deadline)
    mine = programs.cells.rank == world.rank
    times = np.concatenate([board.start_s[:, mine], board.end_s[:, mine], board.began_s[:, [world.rank]]], axis=1) - ahead_s
    wrong_piece = board.wrong_piece[:, [world.rank]]
    found, worst = np.concatenate([board.found[:, world.rank], wrong_piece], axis=1), board.worst[:, world.rank]
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
        Trial(float(began_s[k].min()), board.start_s[k], board.end_s[k], [Finding(*row[:-1]) for row in findings[k].tolist()],
              float(board.worst[k].max(initial=0.0)), findings[k, :, -1].tolist())
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

