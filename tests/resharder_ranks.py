"""Four ranks that reshard over gloo, forked by this script; each leaves what it saw in FOLDER/RANK.json, for test_resharders."""

import os
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from fault_cases import Case
from fault_ranks import HurtWorld
from forked_ranks import fork_ranks
from hand_plans import relay_chain, rows_to_columns
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardroute.executors import Resharder, reshard, xferdtensor
from shardroute.executors.transports.gloo import GlooWorld
from shardroute.planner.exchange import Sharding
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import parse_placement
from shardroute.planner.layouts.tensors import Tensor
from shardroute.topologies.errors import RunError

N_RANKS = 4


def whole(shape, step=0, dtype=torch.float32):
    """The tensor that all ranks agree on."""
    n = int(np.prod(shape))
    return (torch.arange(n, dtype=torch.float64) + 1000 * step).reshape(shape).to(dtype)


def side(tensor, placements, ranks, sizes):
    """A described tensor: (Tensor, Sharding)."""
    mesh = Mesh(tuple(f"m{i}" for i in range(len(sizes))), tuple(sizes), tuple(ranks))
    return tensor, Sharding(mesh, tuple(parse_placement(p) for p in placements))


def part(full, described, rank):
    """The rank's part of a tensor, by the library's own fragments: dense boxes, one a rank."""
    tensor, sharding = described
    fragments = sharding.fragments(tensor.shape)
    rows = np.flatnonzero(fragments.rank == rank)
    if not len(rows):
        return None
    (row,) = rows.tolist()
    box = tuple(slice(a, b) for a, b in zip(fragments.lo[row].tolist(), fragments.hi[row].tolist(), strict=True))
    return full[box].contiguous()


def dtensors(rank):
    """DTensors on two meshes, three steps: trainers hold rows, generators need columns; each rank describes its own side."""
    trainers, generators = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    shape = (6, 8)
    held = needed = None
    if rank < 2:
        held = {
            "w": DTensor.from_local(torch.zeros(3, 8), trainers, [Shard(0)]),
            "b": DTensor.from_local(torch.zeros(5), trainers, [Replicate()]),
        }
    else:
        needed = {
            "w": DTensor.from_local(torch.zeros(6, 4), generators, [Shard(1)]),
            "b": DTensor.from_local(torch.zeros(5), generators, [Replicate()]),
        }
    resharder = Resharder(held, needed)
    good = True
    for step in range(3):
        w, b = whole(shape, step), whole((5,), step)
        if rank < 2:
            held["w"]._local_tensor.copy_(w[3 * rank : 3 * rank + 3])
            held["b"]._local_tensor.copy_(b)
        resharder.run(held, needed).wait()
        if rank >= 2:
            good &= torch.equal(needed["w"]._local_tensor, w[:, 4 * (rank - 2) : 4 * (rank - 1)])
            good &= torch.equal(needed["b"]._local_tensor, b)
    resharder.close()
    return good


def tensors_of_many_dtypes(rank):
    """Plain tensors, uneven shards, two axes on one dim, a scalar, and ranks that are on both sides."""
    cases = {
        "uneven": side(Tensor("uneven", (7, 5), "bf16"), ["S0"], [0, 1, 2, 3], [4]),
        "grid": side(Tensor("grid", (8, 6), "i64"), ["S0", "S0"], [0, 1, 2, 3], [2, 2]),
        "scalar": side(Tensor("scalar", (), "f32"), ["R"], [0, 1], [2]),
    }
    to = {
        "uneven": side(Tensor("uneven", (7, 5), "bf16"), ["S1"], [1, 2, 3], [3]),
        "grid": side(Tensor("grid", (8, 6), "i64"), ["R", "S1"], [0, 1, 2, 3], [2, 2]),
        "scalar": side(Tensor("scalar", (), "f32"), ["R"], [2, 3], [2]),
    }
    dtypes = {"uneven": torch.bfloat16, "grid": torch.int64, "scalar": torch.float32}
    full = {name: whole(tensor.shape, dtype=dtypes[name]) for name, (tensor, _) in cases.items()}
    given = {n: p for n, d in cases.items() if (p := part(full[n], d, rank)) is not None}
    wanted = {n: p for n, d in to.items() if (p := part(full[n], d, rank)) is not None}
    got = {n: torch.zeros_like(p) for n, p in wanted.items()}
    resharder = Resharder(cases, to)
    resharder.run(given, got).wait()
    resharder.close()
    return all(torch.equal(got[n], wanted[n]) for n in wanted)


def one_at_a_time(rank):
    """A second transfer over the same group is refused on every rank while the first goes on, and works after it."""
    group = dist.new_group(backend="gloo")
    big = Tensor("t", (4096, 2048), "f32")
    src, dst = {"t": side(big, ["S0"], [0, 1], [2])}, {"t": side(big, ["S1"], [2, 3], [2])}
    first, second = Resharder(src, dst, group=group), Resharder(src, dst, group=group)
    given = {} if rank > 1 else {"t": torch.full((2048, 2048), float(rank))}
    got = {} if rank < 2 else {"t": torch.empty(4096, 1024)}
    if rank == 3:
        dist.barrier()  # so that the others' transfer can't end before they have tried a second one
        transfer, error = first.run(given, got), ""
    else:
        transfer, error = first.run(given, got), ""
        try:
            second.run(given, got)
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        dist.barrier()
    transfer.wait()
    done = transfer.done
    second.run(given, got).wait()
    good = rank < 2 or (bool((got["t"][:2048] == 0).all()) and bool((got["t"][2048:] == 1).all()))
    return {"error": error, "done": done, "good": good, "window": first.window_bytes, "staging": first.staging_bytes}


def errors(rank):
    """What is refused, and how."""
    found = []

    def attempt(call):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("")

    tensor = Tensor("w", (4, 4), "f32")
    src, dst = {"w": side(tensor, ["S0"], [0, 1], [2])}, {"w": side(tensor, ["S1"], [2, 3], [2])}
    other = {"w": side(tensor, ["S1"], [0, 1], [2])}
    attempt(lambda: Resharder(src if rank != 1 else other, dst))
    attempt(lambda: Resharder(src, None))
    attempt(lambda: Resharder.of_plan(relay_chain(4) if rank else relay_chain(3)))
    attempt(lambda: Resharder.of_plan(rows_to_columns()))
    resharder = Resharder(src, dst)
    attempt(lambda: resharder.run({}, {}))
    attempt(lambda: resharder.run({"w": torch.zeros(3, 4)}, {"w": torch.zeros(4, 3)}))
    attempt(lambda: resharder.run({"w": torch.zeros(4, 2).t()}, {"w": torch.zeros(2, 4).t()}))
    attempt(lambda: resharder.run({"w": "text"}, {"w": "text"}))
    return found


def a_rank_that_stays_away(rank):
    """Three ranks run, one doesn't: they end at the deadline and say for whom they waited, and then run no more."""
    tensor = Tensor("w", (4, 4), "f32")
    resharder = Resharder({"w": side(tensor, ["S0"], [0, 1], [2])}, {"w": side(tensor, ["S1"], [2, 3], [2])})
    if rank == 0:
        time.sleep(4)
        return ["", ""]
    found = []
    for _ in range(2):
        try:
            resharder.run({"w": torch.zeros(2, 4)}, {"w": torch.zeros(4, 2)}, timeout_s=1.5).wait()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def as_nccl_m2n(rank):
    """reshard with meshes as lists, as a tensor and as dims with a start rank."""
    w = whole((8, 12))
    good = True
    for src_mesh in ([[0], [1]], torch.tensor([[0], [1]]), SimpleNamespace(dims=(2, 1), start_rank=0)):
        for _ in range(2):
            src = w[4 * rank : 4 * rank + 4].contiguous() if rank < 2 else None
            dst = torch.zeros(8, 6) if rank >= 2 else None
            to = {"dst_mesh": [[2, 3]], "dst_placements": [Replicate(), Shard(1)]}
            reshard(src, dst, None, None, src_mesh=src_mesh, src_placements=[Shard(0), Replicate()], **to)
            good &= rank < 2 or torch.equal(dst, w[:, 6 * (rank - 2) : 6 * (rank - 1)])
    return good


def as_nemo_rl(rank):
    """xferdtensor with references that hold a whole shape and a local tensor; shards are uneven."""
    w = whole((5, 4), dtype=torch.bfloat16)
    mesh = lambda ranks: SimpleNamespace(mesh=torch.tensor(ranks))  # noqa: E731
    ref = lambda local: SimpleNamespace(shape=torch.Size((5, 4)), dtype=torch.bfloat16, _local_tensor=local)  # noqa: E731
    src = ref(w[3 * rank : 3 * rank + 3].contiguous()) if rank < 2 else None
    dst = ref(torch.zeros(5, 2, dtype=torch.bfloat16)) if rank >= 2 else None
    xferdtensor(src, mesh([0, 1]), [Shard(0)], dst, mesh([2, 3]), [Shard(1)], None)
    return rank < 2 or torch.equal(dst._local_tensor, w[:, 2 * (rank - 2) : 2 * (rank - 1)])


def bucket_by_bucket(rank):
    """Three tensors through spare memory for one; then written in place; versions are counted, and read, on the way."""
    tensors = {f"w{k}": Tensor(f"w{k}", (8, 6), "f32") for k in range(3)}
    src = {name: side(tensor, ["S0"], [0, 1], [2]) for name, tensor in tensors.items()}
    dst = {name: side(tensor, ["S1"], [2, 3], [2]) for name, tensor in tensors.items()}
    full = {name: whole((8, 6), k) for k, name in enumerate(tensors)}
    given = {n: part(full[n], d, rank) for n, d in src.items() if rank < 2}
    wanted = {n: part(full[n], d, rank) for n, d in dst.items() if rank >= 2}
    found = {}
    for spare in (256, None, 0):
        got = {n: torch.zeros_like(p) for n, p in wanted.items()}
        resharder = Resharder(src, dst, spare_bytes=spare, verify=spare != 0)
        transfer = resharder.run(given, got, version=5)
        transfer.wait()
        with resharder.reading() as version:
            right = all(torch.equal(got[n], wanted[n]) for n in wanted)
        resharder.run(given, got).wait()
        told = [len(resharder.plans), resharder.spare_bytes, version, resharder.version, right, sorted(transfer.parts_s)]
        found[str(spare)] = [*told, sorted(resharder.parts_s)]
        resharder.close()
    return found


def fails_between_buckets(rank):
    """The second of two transfers of two buckets fails in its second bucket; a new resharder moves that one only. What each rank
    saw, of a rank that raises and of a link that corrupts.
    """
    tensors = {f"w{k}": Tensor(f"w{k}", (8, 6), "f32") for k in range(2)}
    src = {name: side(tensor, ["S0"], [0, 1], [2]) for name, tensor in tensors.items()}
    dst = {name: side(tensor, ["S0"], [2, 3], [2]) for name, tensor in tensors.items()}
    full = lambda number: dict.fromkeys(tensors, torch.full((4, 6), float(number)))  # noqa: E731
    found = {}
    for case in (Case(1, "raise", at=SECOND_VOTE), Case(1, "corrupt")):
        got = full(0) if rank >= 2 else {}
        got = {name: tensor.clone() for name, tensor in got.items()}
        world = HurtWorld(GlooWorld(dist.new_group(backend="gloo"), owned=True), case if rank == case.rank else None)
        resharder = Resharder(src, dst, transport=world, spare_bytes=128, verify=True)
        resharder.run(full(1) if rank < 2 else {}, got).wait()
        world.arm()
        error = read = ""
        try:
            resharder.run(full(2) if rank < 2 else {}, got).wait()
        except (RunError, RuntimeError) as failure:
            error = str(failure)
        try:
            with resharder.reading():
                read = "read"
        except RunError as failure:
            read = str(failure)
        saw = [len(resharder.plans), resharder.version, dict(resharder.versions), held_of(got), error, read]
        left = resharder.versions
        resharder.close()
        again = Resharder(src, dst, spare_bytes=128, version=left)
        given = full(2) | {"w0": torch.full((4, 6), 9.0)} if rank < 2 else {}  # w0 isn't moved again
        again.run(given, got, version=2).wait()
        found[case.does] = [*saw, again.version, held_of(got)]
        again.close()
    return found


# In which order ranks tell each other of `fails_between_buckets`: what they hold, plans, readiness; version and two votes; then
# version and one vote of the second transfer.
SECOND_VOTE = 8


def held_of(tensors):
    return {name: sorted(set(tensor.flatten().tolist())) for name, tensor in tensors.items()}


SCENES = (
    dtensors, tensors_of_many_dtypes, one_at_a_time, errors, as_nccl_m2n, as_nemo_rl, bucket_by_bucket, fails_between_buckets,
    a_rank_that_stays_away,
)  # fmt: skip


def main() -> None:
    """Fork the ranks; each plays all scenes in turn."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def play(rank: int) -> dict[str, object]:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=N_RANKS)
        found: dict[str, object] = {}
        for scene in SCENES:
            try:
                found[scene.__name__] = scene(rank)
            except Exception:
                found[scene.__name__] = traceback.format_exc()
                break
        return found

    fork_ranks(N_RANKS, folder, play)


if __name__ == "__main__":
    main()
