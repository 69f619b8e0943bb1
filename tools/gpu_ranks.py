"""One rank of tools/gpu_check.py: it joins the others over a transport, and runs all parts of the check in turn.

`gpu_ranks.py FOLDER TRANSPORT RANK SIZE MACHINE DEADLINE_S full|quick`: rank 0 appends one JSON object a finished part to
FOLDER/found.jsonl, and each rank leaves what it died of in FOLDER/RANK.error.
"""

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "conformance")]

import conformance_plans  # type: ignore[import-not-found]  # noqa: E402  # needs the path, which mypy hasn't
from hand_plans import HandPlan, row_shards  # type: ignore[import-not-found]  # noqa: E402

from shardroute.executors.attention.contents import Contents, contents_of  # noqa: E402
from shardroute.executors.attention.on_streams import why_no_attention  # noqa: E402
from shardroute.executors.attention.seam import Arithmetic  # noqa: E402
from shardroute.executors.gpus.device_sums import DeviceSums, why_no_sums  # noqa: E402
from shardroute.executors.gpus.devices import Memory  # noqa: E402
from shardroute.executors.gpus.tensors import tensors_of  # noqa: E402
from shardroute.executors.interpreting.arenas import Arena  # noqa: E402
from shardroute.executors.interpreting.blocks import LINEAR, Forms  # noqa: E402
from shardroute.executors.interpreting.checksums import checksum  # noqa: E402
from shardroute.executors.interpreting.interpret import compile_plan  # noqa: E402
from shardroute.executors.interpreting.patterns import arm, fill_sources, verify  # noqa: E402
from shardroute.executors.interpreting.piece_sums import NONE, PieceRows, describe_wrong, piece_rows  # noqa: E402
from shardroute.executors.launching.launched import run_launched  # noqa: E402
from shardroute.executors.messages.messages import lay_messages  # noqa: E402
from shardroute.executors.messages.separate import compile_separate  # noqa: E402
from shardroute.executors.resharding.resharders import Resharder  # noqa: E402
from shardroute.executors.transports.grouped import GroupedTransport  # noqa: E402
from shardroute.executors.transports.libraries import load_library  # noqa: E402
from shardroute.executors.transports.seam import Changing, Deadline, Place, Trial, World  # noqa: E402
from shardroute.planner.layouts.fragments import Fragments  # noqa: E402
from shardroute.planner.layouts.meshes import Mesh, place  # noqa: E402
from shardroute.planner.layouts.placements import Replicate, Shard  # noqa: E402
from shardroute.planner.layouts.tensors import Layout, Tensor  # noqa: E402
from shardroute.planner.plans import TARGET, Lane, Plan  # noqa: E402
from shardroute.planner.problems import Problem, one_tensor  # noqa: E402
from shardroute.planner.ring.strategies import ring_plan  # noqa: E402
from shardroute.planner.ring.tensors import Pass  # noqa: E402
from shardroute.planner.ring.workloads import Attention  # noqa: E402
from shardroute.planner.routing.strategies import make_plan  # noqa: E402
from shardroute.planner.simulator.refit import predict  # noqa: E402
from shardroute.topologies.calibrations import (  # noqa: E402
    Calibration,
    calibration_figure,
    calibration_from_figures,
    default_calibration,
    load_calibration,
    save_calibration,
)
from shardroute.topologies.errors import RunError  # noqa: E402
from shardroute.topologies.machines import load_machine  # noqa: E402
from shardroute.topologies.topologies import Topology, build_topology  # noqa: E402
from shardroute.topologies.units import format_bytes, format_seconds  # noqa: E402

PING_REPEATS = 5
REPEATS = 5

Found = dict[str, object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much moves. Host memory is filled and verified at some 1 GB/s a rank (elements of 8 bytes), which is most of the
    time."""

    ping_bytes: tuple[int, ...]
    refit_tensors: int
    refit_shape: tuple[int, int]
    kv_shape: tuple[int, int]
    tokens: int  # of a rank, in attention


# Messages from where their start is all that they take to where bandwidth is; a refit of 16 matrices of 32 MiB; keys and values
# of 8192 positions a rank, 8 KV heads of 128, bf16: 32 MiB a hop.
FULL = Sizes(tuple(2**k for k in range(16, 28, 2)), 16, (2048, 2048), (8192, 2 * 8 * 128), 4096)
# To try the program itself.
QUICK = Sizes(tuple(2**k for k in range(12, 25, 4)), 4, (64, 64), (64, 128), 256)


@dataclass(frozen=True, slots=True)
class Check:
    """What the parts share."""

    world: World
    transport: str
    machine: str
    folder: Path
    deadline: Deadline
    sizes: Sizes

    @property
    def topology(self) -> Topology:
        """The machine to plan for, with as many GPUs as there are ranks."""
        return build_topology(load_machine(self.machine), min_gpus=self.world.size)

    def run(self, plan: Plan, n_trials: int, pieces: PieceRows | None = None) -> Sequence[Trial]:
        """Run a plan, with `pieces` followed by checksums; the trials on rank 0, nothing elsewhere."""
        programs, buffers = compile_plan(plan)
        messages = lay_messages(plan, programs, buffers, library_sums=True)
        return run_launched(
            self.world, plan, programs, messages, n_trials=n_trials, deadline=self.deadline, pieces=pieces
        )

    def compute(self, plan: Plan, contents: Contents, n_trials: int) -> Sequence[Trial]:
        """Run a plan that computes; the trials on rank 0, nothing elsewhere."""
        found = compile_separate(plan)
        return run_launched(
            self.world, found.plan, found.programs, found.messages, n_trials=n_trials, deadline=self.deadline, contents=contents
        )


def ping_pongs(check: Check) -> Iterator[Found]:
    """Messages of all sizes from rank 0 to rank 1, and a calibration of them."""
    if check.world.size < 2:
        yield {"part": "ping-pong", "skipped": "one GPU has nobody to send to"}
        return
    times: dict[int, float] = {}
    for n_bytes in check.sizes.ping_bytes:
        shape = (1, n_bytes // 8)
        problem = one_tensor(shape, "f64", row_shards(shape, [0]), row_shards(shape, [1]), n_ranks=check.world.size)
        trials = check.run(make_plan(problem, check.topology, "direct", n_bytes), PING_REPEATS)
        if trials:
            times[n_bytes] = statistics.median(_total_s(trial) for trial in trials[1:])  # the first connects
            _raise_wrong(trials)
    if times:
        told: Found = {"part": "ping-pong", "us": {str(n): 1e6 * s for n, s in times.items()}}
        try:
            calibration = calibration_of(check, times)
        except RunError as error:  # then nothing is predicted
            yield told | {"ok": False, "text": str(error)}
            return
        path = check.folder.parent / f"{check.transport}.toml"
        save_calibration(calibration, path)
        largest = max(times)
        text = f"{1e6 * times[min(times)]:.1f} us for {format_bytes(min(times))}, {largest / times[largest] / 1e9:.1f} GB/s"
        yield told | {"ok": True, "calibration": str(path), "text": text}


def calibration_of(check: Check, times: Mapping[int, float]) -> Calibration:
    """Start and bandwidth of one message by least squares of relative errors; what a ping-pong can't tell is kept from the
    machine's shipped calibration, and says so.
    """
    n_bytes, seconds = np.array(list(times), float), np.array(list(times.values()))
    model = np.stack([1 / seconds, n_bytes / seconds], axis=1)
    (start_s, byte_s), *_ = np.linalg.lstsq(model, np.ones(len(seconds)), rcond=None)
    if byte_s <= 0:
        raise RunError(f"the times of messages don't grow with their size: {[f'{s:.3g} s' for s in times.values()]}")
    error = np.abs(start_s + n_bytes * byte_s - seconds) / seconds
    machine, base = load_machine(check.machine), default_calibration(check.machine)
    source = (
        f"tools/gpu_check.py, {check.transport}: {len(times)} {format_bytes(min(times))} to {format_bytes(max(times))}, "
        f"fit with a median error of {100 * float(np.median(error)):.1f} %, worst {100 * float(error.max()):.1f} %"
    )
    kept = "kept from the machine's shipped calibration, as a ping-pong in one domain doesn't tell: "
    old = {figure.key: figure for figure in base.figures}
    latency_s = max(float(start_s) - base.launch_s, 0.0)
    efficiency = 1 / float(byte_s) / machine.nvlink_Bps
    if efficiency > 1:
        raise RunError(f"messages reach {efficiency:.2f} of {machine.name}'s NVLink; say which machine this is with --machine")
    figures = [
        calibration_figure("nvlink.latency", float(f"{latency_s:.3g}"), f"start less step.launch; {source}"),
        calibration_figure("nvlink.efficiency", float(f"{efficiency:.3g}"), source),
        *(replace(old[key], source=kept + old[key].source) for key in ("nic.latency", "nic.efficiency", "step.launch",
        "step.piece")),
    ]
    return calibration_from_figures(check.machine, check.transport, "by tools/gpu_check.py", "see its report", figures)


def conformance(check: Check) -> Iterator[Found]:
    """The conformance cases that need no more ranks than there are, and one of a single rank."""
    n_ranks = check.world.size
    for name, plan in conformance_cases(n_ranks).items():
        trials = check.run(plan, 3)
        if trials:
            wrong = sum(f.n_wrong + f.n_stray for trial in trials for f in trial.findings)
            yield {"part": "conformance", "case": name, "ok": wrong == 0, "text": "" if not wrong else f"{wrong} bytes are wrong"}


def conformance_cases(n_ranks: int) -> dict[str, Plan]:
    """Name and plan of each case that runs on n_ranks."""
    topology = build_topology(load_machine("cpu-processes"), min_gpus=n_ranks)
    cases = {"within a rank": _within_a_rank()}
    if n_ranks > 1:
        cases["all to all"] = conformance_plans.all_to_all(n_ranks)
        for way, dtype in (("one-shot", "f32"), ("two-shot", "bf16")):
            summed = conformance_plans.summed(f"dp={n_ranks}", "P", "R", way, dtype, 8 * n_ranks)
            cases[f"all-reduce of every rank, {way}"] = summed
    for name, make in conformance_plans.CASES.items():
        plan = make()
        used = max([int(c.rank.max(initial=-1)) for k in plan.problem.classes for c in (k.source, k.target)], default=-1)
        used = max(used, int(plan.steps.src.max(initial=-1)), int(plan.steps.dst.max(initial=-1)))
        if max(used, int(plan.group_ranks.max(initial=-1))) < n_ranks:
            cases[name] = plan
    return {
        name: replace(plan, problem=replace(plan.problem, n_ranks=n_ranks), topology=topology) for name, plan in cases.items()
    }


def _within_a_rank() -> Plan:
    """A matrix that is transposed on one rank, by strided copies."""
    shape = (64, 96)
    nought, size = np.zeros(1, np.int64), np.array([64 * 96])
    rank, buffer = nought.astype(np.int32), nought.astype(np.int32)
    source, target = (
        Fragments(shape, rank, np.zeros((1, 2), np.int64), np.array([shape]), buffer, nought, np.array([strides]), size)
        for strides in ((96, 1), (1, 64))
    )
    problem = one_tensor(shape, "bf16", source, target)
    return make_plan(problem, build_topology(load_machine("cpu-processes"), min_gpus=1), "direct")


def refit(check: Check) -> Iterator[Found]:
    """Weights from one half of the ranks, split by columns, to the other half, split by rows; predicted and measured."""
    if check.world.size < 2:
        yield {"part": "refit", "skipped": "one GPU has nobody to send to"}
        return
    problem = _refit_problem(check)
    for strategy in ("direct", "greedy"):
        plan = make_plan(problem, check.topology, strategy)
        yield from _measured(check, "refit", strategy, plan)
        yield from _graph(check, strategy, plan)


def checksums(check: Check) -> Iterator[Found]:
    """That a GPU's checksum is the host's; then the refit once more, followed by checksums: nobody may be accused. What that
    takes is the difference to the same refit without.
    """
    reason = why_no_sums()
    if reason is not None:
        yield {"part": "checksums", "skipped": reason}
        return
    alike = [told == b"\1" for told in check.world.exchange(bytes([_sums_as_the_host(check)]), check.deadline)]
    if check.world.rank == 0:
        text = f"of {format_bytes(_SUMMED_BYTES)}" if all(alike) else f"rank {alike.index(False)} takes another one"
        yield {"part": "checksums", "case": "the host's", "ok": all(alike), "text": text}
    if check.world.size < 2:
        yield {"part": "checksums", "case": "refit, greedy", "skipped": "one GPU has nobody to send to"}
        return
    plan = make_plan(_refit_problem(check), check.topology, "greedy")
    rows = piece_rows(plan)
    bare, followed = check.run(plan, REPEATS), check.run(plan, REPEATS, rows)
    if followed:
        accused = [describe_wrong(plan, rows, row) for trial in followed for row in trial.wrong_pieces if row != NONE]
        wrong = sum(f.n_wrong + f.n_stray for trial in followed for f in trial.findings)
        # The first trial of those makes torch load its kernels.
        seconds = [statistics.median(_total_s(trial) for trial in trials[1:]) for trials in (bare, followed)]
        text = f"{format_seconds(seconds[0])} without them"
        yield {
            "part": "checksums", "case": "refit, greedy", "ok": not accused and not wrong, "measured_s": seconds[1],
            "bare_s": seconds[0], "text": accused[0] if accused else f"{wrong} bytes are wrong" if wrong else text,
        }  # fmt: skip


# Of a piece that begins and ends within words, in several chunks.
_SUMMED_BYTES = 2**26 + 3


def _sums_as_the_host(check: Check) -> bool:
    """Whether this rank's GPU takes the checksum that the host does, of random bytes at an odd address."""
    device = check.world.device  # type: ignore[attr-defined]  # of every world on GPUs
    data, nought = np.random.default_rng(check.world.rank).integers(0, 256, _SUMMED_BYTES, dtype=np.uint8), np.zeros(1, np.int64)
    pointer, stream, done = device.allocate(_SUMMED_BYTES + 1), device.stream(), device.event()
    device.upload(pointer + 1, data, stream)
    no_forms = Forms(np.zeros(0, np.int64), *(np.zeros((0, 1), np.int64) for _ in range(3)))
    linear, size = np.full(1, LINEAR, np.int32), np.full(1, _SUMMED_BYTES)
    rows = PieceRows(np.array([0, 1]), nought, nought, nought, nought, nought, size, linear, np.ones(1, np.bool_), nought - 1)
    sums = DeviceSums(rows, no_forms, 0, tensors_of(device))
    sums.put_sent(0, Memory([0], [pointer + 1]), stream)
    sums.put_kept(Memory([0], [pointer + 1]), stream)
    device.record(done, stream)
    while not device.is_done(done):
        time.sleep(1e-3)
    sums.collect()
    device.free(pointer)
    return int(sums.sent[0]) == int(sums.kept[0]) == checksum(data)


def _refit_problem(check: Check) -> Problem:
    half, shape = check.world.size // 2, check.sizes.refit_shape
    given, taken = Mesh.of({"t": half}, range(half)), Mesh.of({"t": half}, range(half, 2 * half))
    source, target = place(shape, given, [Shard(1)]), place(shape, taken, [Shard(0)])
    tensors = tuple(Tensor(f"w{k}", shape, "f64") for k in range(check.sizes.refit_tensors))
    names = tuple((tensor.name,) for tensor in tensors)
    before, after = (Layout((fragments,) * len(tensors), names) for fragments in (source, target))
    return Problem(tensors, before, after, check.world.size)


def ring(check: Check) -> Iterator[Found]:
    """Keys and values once around the ring, as ring attention sends them: each rank passes on what it got last."""
    n = check.world.size
    if n < 2:
        yield {"part": "ring", "skipped": "one GPU is no ring"}
        return
    rows, columns = check.sizes.kv_shape
    shape = (n * rows, columns)
    hand = HandPlan()
    kv = hand.tensor(shape, row_shards(shape, range(n)), place(shape, Mesh.of({"r": n}, range(n)), [Replicate()]))
    blocks = [hand.bundle((kv, [(r * rows, (r + 1) * rows), (0, columns)])) for r in range(n)]
    for rank in range(n):
        hand.copy(blocks[rank], rank, rank, lane=Lane.LOCAL)
    came: list[int] = []
    for hop in range(1, n):
        sent = [
            hand.copy(blocks[(r - hop + 1) % n], r, (r + 1) % n) if hop == 1 else
            hand.copy(blocks[(r - hop + 1) % n], r, (r + 1) % n, [came[r]], src_at=TARGET, lane=Lane.HAND_OVER)
            for r in range(n)
        ]  # fmt: skip
        came = [sent[(r - 1) % n] for r in range(n)]
    plan = hand.build(n)
    yield from _measured(check, "ring", f"{n - 1} hops of {format_bytes(rows * columns * 2)}", replace(plan,
    topology=check.topology))


def attention(check: Check) -> Iterator[Found]:
    """Attention forward and backward on the transport's streams: small calls in every dtype against one device in float64, on the
    host; then a call of Llama-3-8B's heads, predicted and measured.
    """
    reason = why_no_attention()
    if reason is not None:
        yield {"part": "attention", "skipped": reason}
        return
    n = check.world.size
    small = Attention((256 * n,), n, 8, 4, 64, dtype="f32")
    strategies = ["ring", *(["all-gather", "ulysses", "pass-q"] if n in (2, 4, 8) else [])]
    for strategy, dtype in [("ring", "f64"), ("ring", "f32"), *((strategy, "bf16") for strategy in strategies)]:
        plan = ring_plan(replace(small, dtype=dtype, grad_dtype=""), check.topology, strategy, Pass.RECOMPUTE)
        contents = contents_of(plan, Arithmetic.TORCH)
        trials = check.compute(plan, contents, 3)
        if trials:
            wrong, worst = sum(f.n_wrong + f.n_stray for t in trials for f in t.findings), max(t.worst for t in trials)
            text = f"largest difference {worst:.1e}, at most {contents.tolerance:.1e} allowed, {wrong} bytes wrong"
            yield {"part": "attention", "case": f"{strategy} {dtype}", "ok": wrong == 0, "text": text}
    tokens = check.sizes.tokens
    plan = ring_plan(Attention((tokens * n,), n, 32, 8, 128), check.topology, "ring", Pass.RECOMPUTE)
    trials = check.compute(plan, contents_of(plan, Arithmetic.TORCH, compare=False), REPEATS)
    if trials:
        assert plan.attention is not None
        measured_s = statistics.median(_total_s(trial) for trial in trials[1:])  # the first makes torch load its kernels
        flops = sum(plan.attention.flops(backward=backward) for backward in (False, True))
        yield {
            "part": "attention", "case": f"{tokens} tokens a GPU, bf16", "ok": True, "measured_s": measured_s,
            "predicted_s": predict(plan, default_calibration(check.machine)).timeline.total_s,
            "trials_s": [_total_s(trial) for trial in trials],
            "text": f"{flops / n / measured_s / 1e12:.1f} TFLOP/s a GPU; the recomputed forward isn't counted",
        }  # fmt: skip


def changes(check: Check) -> Iterator[Found]:
    """The last rank goes, and comes back: how long those that are there take to meet and to get a communicator, and that weights
    arrive by the changed plan. The last part: the world that the others ran in is left.
    """
    n, world = check.world.size, check.world
    reason = "NVSHMEM is started once a process" if check.transport == "nvshmem" else "one GPU can't go from others"
    if check.transport == "nvshmem" or n < 2:
        yield {"part": "changes", "skipped": reason}
        return
    shape, last = (check.sizes.refit_shape[0], n), n - 1
    everywhere = place(shape, Mesh.of({"r": n}, range(n)), [Replicate()])
    plan = make_plan(one_tensor(shape, "f64", row_shards(shape, [0]), everywhere, n_ranks=n), check.topology, "direct")
    whole = np.arange(shape[0] * shape[1], dtype=np.float64).reshape(shape)
    rank = world.rank
    for stage, gone in (("went", [last]), ("came back", [])):
        at = Place(rank, n - len(gone), f"file://{check.folder}/rendezvous-{len(gone)}-gone")
        began_s = time.monotonic()
        if rank in gone:
            _leave(world)
            continue
        world = _met_again(check, world, at, comes=not gone and rank == last)
        met_s = time.monotonic() - began_s
        resharder = Resharder.of_change(plan, gone=gone, transport=world, timeout_s=check.deadline.left_s)
        into = np.zeros(shape)
        transfer = resharder.run({"tensor": whole} if rank == 0 else {}, {"tensor": into})
        transfer.wait()
        right = world.exchange(bytes([bool((into == whole).all())]), check.deadline)
        made = world.parts_s if isinstance(world, Changing) else {}
        parts = {"meet": met_s, **made, "plan": resharder.parts_s["plan"], "get ready": resharder.parts_s["get ready"]}
        text = ", ".join(f"{part} {format_seconds(s)}" for part, s in {**parts, "move": transfer.parts_s["move"]}.items())
        case, ok = f"1 of {n} ranks {stage}", all(told == b"\1" for told in right)
        yield {"part": "changes", "case": case, "ok": ok, "measured_s": met_s, "text": text, "parts_s": parts}
    world.close()


def _leave(world: World) -> None:
    if isinstance(world, Changing):
        world.leave()
    else:
        world.close()


def _met_again(check: Check, world: World, at: Place, *, comes: bool) -> World:
    """The world of those that are there, by what this rank has of its last one."""
    if isinstance(world, Changing) and not comes:
        return world.again(at, check.deadline)
    if not isinstance(world, Changing) and not comes:  # torch.distributed is left before it is initialised again
        world.close()
    return load_library(check.transport).connect(at, check.deadline)


def _measured(check: Check, part: str, case: str, plan: Plan) -> Iterator[Found]:
    trials = check.run(plan, REPEATS)
    if not trials:
        return
    measured_s = statistics.median(_total_s(trial) for trial in trials)
    path = check.folder.parent / f"{check.transport}.toml"
    predicted_s = predict(plan, load_calibration(str(path))).timeline.total_s if path.exists() else None
    wrong = sum(f.n_wrong + f.n_stray for trial in trials for f in trial.findings)
    yield {
        "part": part, "case": case, "ok": wrong == 0, "measured_s": measured_s, "predicted_s": predicted_s,
        "n_bytes": int(plan.step_bytes.sum()), "n_compared": sum(f.n_bytes for f in trials[0].findings),
        "trials_s": [_total_s(trial) for trial in trials],
        "text": f"{wrong} bytes are wrong" if wrong else f"{int(plan.step_bytes.sum()) / measured_s / 1e9:.1f} GB/s in all",
    }  # fmt: skip


def _graph(check: Check, case: str, plan: Plan) -> Iterator[Found]:
    """The same plan captured as a CUDA graph, replayed and verified."""
    world, rank = check.world, check.world.rank
    programs, buffers = compile_plan(plan)
    memory = np.empty(int(programs.arena_bytes[rank]), dtype=np.uint8)
    messages = lay_messages(plan, programs, buffers, library_sums=True)
    transport = world.open(programs, messages, Arena.whole(memory), check.deadline)
    reason = None if isinstance(transport, GroupedTransport) else getattr(transport, "why_not_capturable", lambda: "")()
    replay_s, wrong = 0.0, 0
    if isinstance(transport, GroupedTransport):
        fill_sources(memory, programs.holdings, rank)
        times = np.zeros((2, len(programs.cells.rank)))
        for replays in (False, True):
            transport.begin(int(replays))
            arm(memory, int(programs.target_at[rank]))
            transport.barrier()
            if replays:
                reason = transport.why_not_capturable()
                if reason is None:
                    transport.capture()
                    replay_s = transport.replay()
            if not replays or reason is not None:
                transport.run(times[0], times[1], np.zeros(1, np.int64))
            transport.barrier()
        found = verify(memory, programs.holdings, rank, int(programs.target_at[rank]), int(programs.slots_at[rank]))
        wrong = found.n_wrong + found.n_stray
    told = [json.loads(text) for text in world.exchange(json.dumps([replay_s, wrong]).encode(), check.deadline)]
    if rank == 0 and reason is not None:
        yield {"part": "graph", "case": case, "skipped": reason}
    elif rank == 0:
        n_wrong = sum(w for _, w in told)
        text = f"{n_wrong} bytes are wrong" if n_wrong else "captured and replayed"
        yield {"part": "graph", "case": case, "ok": n_wrong == 0, "measured_s": max(s for s, _ in told), "text": text}


def _total_s(trial: Trial) -> float:
    return float(trial.end_s.max(initial=trial.began_s)) - trial.began_s


def _raise_wrong(trials: Sequence[Trial]) -> None:
    if any(f.n_wrong or f.n_stray for trial in trials for f in trial.findings):
        raise AssertionError("bytes of a ping-pong are wrong")


PARTS: tuple[Callable[[Check], Iterator[Found]], ...] = (
    ping_pongs, conformance, refit, checksums, ring, attention, changes,
)  # fmt: skip


def main() -> int:
    """Run all parts as one rank."""
    folder, transport, machine = Path(sys.argv[1]), sys.argv[2], sys.argv[5]
    place_ = Place(int(sys.argv[3]), int(sys.argv[4]), f"file://{folder}/rendezvous")
    deadline = Deadline.after(float(sys.argv[6]))
    try:
        world = load_library(transport).connect(place_, deadline)
        check = Check(world, transport, machine, folder, deadline, QUICK if sys.argv[7] == "quick" else FULL)
        with (folder / ("found.jsonl" if place_.rank == 0 else f"{place_.rank}.jsonl")).open("a") as file:
            for part in PARTS:
                for found in part(check):
                    if place_.rank == 0:
                        file.write(json.dumps(found) + "\n")
                        file.flush()
        world.close()
    except BaseException:
        (folder / f"{place_.rank}.error").write_text(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
