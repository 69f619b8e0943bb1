"""Who may see which version of the weights; what spare memory and buckets come to; plans after ranks have gone or come."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hand_plans import column_shards, gathered
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.memories import ALIGNMENT, Part
from shardroute.executors.launching.hubs import meet
from shardroute.executors.resharding.changes import plan_after, present_after
from shardroute.executors.resharding.inventory_parts import cut_into_buckets
from shardroute.executors.resharding.numbered import numbered
from shardroute.executors.resharding.spares import Spares
from shardroute.executors.resharding.versions import Versions
from shardroute.executors.resharding.votes import agree_on_version
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.planner.check import check
from shardroute.planner.exchange import Inventory, problem_between
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, Replicate, Shard, place
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.plans import Plan
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies import build_topology, load_machine
from shardroute.topologies.errors import InfeasibleError, InputError, RunError


def test_a_writer_waits_for_readers_and_readers_wait_for_it() -> None:
    versions, order = Versions(3, "w"), []
    inside = threading.Event()

    def read() -> None:
        with versions.reading() as version:
            inside.set()
            time.sleep(0.1)
            order.append(f"read {version}")

    first = threading.Thread(target=read)
    first.start()
    inside.wait()
    versions.claim(Deadline.after(10.0))
    order.append("claimed")
    second = threading.Thread(target=read)
    second.start()
    time.sleep(0.05)
    order.append("written")
    versions.mark("w", 4)
    versions.release()
    second.join()

    assert order == ["read 3", "claimed", "written", "read 4"]
    assert versions.current == 4


def test_a_writer_gives_up_on_a_reader_at_its_deadline() -> None:
    versions = Versions(0, "w")

    with versions.reading(), pytest.raises(RunError, match="its weights were still read, by 1 blocks of `reading`"):
        versions.claim(Deadline.after(0.05))
    with versions.reading() as version:
        assert version == 0


def test_weights_of_two_versions_are_read_by_nobody_until_they_are_written_again() -> None:
    versions = Versions(1, ["a", "b", "c"])
    versions.claim(Deadline.after(1.0))
    versions.mark("a", None)
    versions.release()

    with pytest.raises(RunError, match="hold parts of two versions"), versions.reading():
        pass
    versions.claim(Deadline.after(1.0))
    versions.mark("a", 2)
    versions.release()
    told = r"hold parts of two versions \(b and 1 more hold version 1; a holds version 2\): .*; transfer again"
    with pytest.raises(RunError, match=told), versions.reading():
        pass
    assert (versions.current, versions.of_tensors, versions.next) == (None, {"a": 2, "b": 1, "c": 1}, 3)
    versions.claim(Deadline.after(1.0))
    versions.mark("bc", 2)
    versions.release()
    with versions.reading() as version:
        assert version == 2
    assert versions.next == 3


def test_versions_that_another_resharder_left_are_taken_up_by_name() -> None:
    left = Versions({"a": 2, "b": 1, "other": 7}, "abc")

    assert left.of_tensors == {"a": 2, "b": 1, "c": None}
    assert left.hold("a", 2)
    assert not left.hold("ab", 2)
    assert Versions(None, "ab").next == 1


@pytest.mark.parametrize(
    ("has", "there"),
    [
        ([[True, False], [True, False]], [True, False]),
        ([[True, True], [True, False]], [True, False]),  # one rank was about to say that it has all
        ([[False, False], [True, False]], [False, False]),
        ([[True, True], [True, True]], [False, False]),  # nothing is missing: then it is a transfer like any other
    ],
)
def test_buckets_that_every_rank_has_are_not_moved_again_unless_they_are_all(has, there, tmp_path: Path) -> None:
    rendezvous = f"file://{tmp_path}/r"

    def agree(rank: int) -> list[bool]:
        with closing(meet(Place(rank, len(has), rendezvous), Deadline.after(10.0))) as hub:
            return agree_on_version(hub, "plan", 2, has[rank], Deadline.after(10.0))

    with ThreadPoolExecutor(len(has)) as pool:
        assert list(pool.map(agree, range(len(has)))) == [there] * len(has)


@st.composite
def laid(draw: st.DrawFn):
    """A 2-D box somewhere in a buffer with gaps, perhaps turned."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    gap, offset, end = (draw(st.integers(0, 3)) for _ in range(3))
    strides = draw(st.sampled_from([(columns + gap, 1), (1, rows + gap)]))
    size = offset + (rows - 1) * strides[0] + (columns - 1) * strides[1] + 1 + end
    return (rows, columns), Fragments((rows, columns), [1], [[0, 0]], [[rows, columns]], [0], [offset], [strides], [size])


@given(laid())
def test_what_is_taken_over_is_the_fragments_and_no_byte_between_them(case) -> None:
    shape, target = case
    problem = one_tensor(shape, "u16", place(shape, Mesh.of({"x": 1}), [Replicate()]), target)
    plan = make_plan(problem, build_topology(load_machine("cpu-processes"), min_gpus=2), "direct")
    programs, buffers = compile_plan(plan)
    mine = np.flatnonzero(buffers.rank == 1)
    sizes = buffers.n_bytes[mine].tolist()
    spares = Spares(programs, 1, buffers.offset[mine].tolist(), sizes, (buffers.part[mine] == Part.TARGET).tolist())
    memory = np.full(spares.n_bytes, 7, np.uint8)
    old = [np.zeros(n, np.uint8) for n in sizes]

    spares.take_over(memory, old)

    (stride,), (offset,) = target.strides.tolist(), target.offset.tolist()
    covered = {offset + i * stride[0] + j * stride[1] for i in range(shape[0]) for j in range(shape[1])}
    assert [byte == 7 for byte in old[0].tolist()] == [k // 2 in covered for k in range(sizes[0])]


def inventory(*tensors: tuple[str, str, int]) -> Inventory:
    """Tensors of so many f32 elements on rank 1, each in the buffer named, which is as long as all in it."""
    sizes = {b: sum(n for _, buffer, n in tensors if buffer == b) for _, b, _ in tensors}
    at, fragments = dict.fromkeys(sizes, 0), []
    for _, buffer, n in tensors:
        fragments.append(Fragments((n,), [1], [[0]], [[n]], [0], [at[buffer]], [[1]], [sizes[buffer]]))
        at[buffer] += n
    layout = Layout(tuple(fragments), tuple((buffer,) for _, buffer, _ in tensors))
    return Inventory(tuple(Tensor(name, (n,), "f32") for name, _, n in tensors), layout)


def test_buckets_are_runs_of_tensors_that_fit_and_keep_shared_buffers_together() -> None:
    found = inventory(("q", "qkv", 10), ("up", "up", 5), ("k", "qkv", 2), ("down", "down", 4))

    names = [[t.name for t in bucket.tensors] for bucket in cut_into_buckets(found, 2 * ALIGNMENT)]

    assert names == [["q", "up", "k"], ["down"]]
    assert [len(bucket.tensors) for bucket in cut_into_buckets(found, None)] == [4]
    with pytest.raises(InputError, match=r"spare_bytes=127: q and 1 tensors that share its buffers take 128 B .* at least 128,"):
        cut_into_buckets(found, 127)


def spare_bytes(tensor: Tensor) -> int:
    return -(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT


@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(3 * ALIGNMENT, 9 * ALIGNMENT))
def test_every_bucket_fits_and_all_tensors_are_in_one(sizes: list[int], limit: int) -> None:
    found = inventory(*((f"t{k}", f"t{k}", n) for k, n in enumerate(sizes)))

    buckets = cut_into_buckets(found, limit)

    assert [t.name for bucket in buckets for t in bucket.tensors] == [t.name for t in found.tensors]
    assert all(sum(map(spare_bytes, bucket.tensors)) <= limit for bucket in buckets)
    for bucket, after in itertools.pairwise(buckets):
        assert sum(map(spare_bytes, bucket.tensors)) + spare_bytes(after.tensors[0]) > limit
    assert all(problem_between(bucket, bucket).tensors == bucket.tensors for bucket in buckets)


def two_replicas() -> Plan:
    """Ranks 0 and 1 hold rows, ranks 2 and 3 the same rows; 4 and 5 need columns."""
    shape = (8, 12)
    source = place(shape, Mesh.of({"dp": 2, "tp": 2}, range(4)), [Replicate(), Shard(0)])
    problem = one_tensor(shape, "bf16", source, column_shards(shape, [4, 5]), n_ranks=6)
    return make_plan(problem, build_topology(load_machine("dgx-h100"), min_gpus=6), "greedy")


def test_what_a_rank_held_that_is_gone_comes_from_the_other_holder() -> None:
    plan = two_replicas()

    after = plan_after(plan, gone=[0]).plan

    check(after)
    assert 0 not in {*after.steps.src.tolist(), *after.steps.dst.tolist()}
    assert present_after(plan, [0], None) == [1, 2, 3, 4, 5]


def test_a_rank_that_comes_gets_what_the_one_it_is_like_gets() -> None:
    plan = two_replicas()

    after = plan_after(plan, new={6: 4}).plan

    check(after)
    assert 6 in after.steps.dst.tolist()
    assert present_after(plan, [5], {6: 4}) == [0, 1, 2, 3, 4, 6]


def test_bytes_that_nobody_holds_any_more_are_named() -> None:
    with pytest.raises(InfeasibleError, match=r"tensor tensor: rank 4 needs \[0:4, 0:6\]"):
        plan_after(two_replicas(), gone=[0, 2])


def test_changes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="rank 4 is both gone and new"):
        plan_after(two_replicas(), gone=[4], new={4: 5})
    with pytest.raises(InputError, match="rank 9 holds and needs nothing in this plan"):
        plan_after(two_replicas(), gone=[9])
    with pytest.raises(InputError, match="has collectives; plan the changed problem anew"):
        plan_after(gathered(), gone=[1])


def test_ranks_of_a_world_need_one_number_each() -> None:
    class Four:
        rank, size, key = 0, 4, 0

    with pytest.raises(InputError, match=r"ranks \[0, 0, 1, 2\]: expected one number for each of the 4 ranks"):
        numbered(Four(), [0, 0, 1, 2], 4)
    with pytest.raises(InputError, match="Four: its library numbers ranks itself"):
        numbered(Four(), [0, 1, 2, 4], 5)


@pytest.mark.parametrize("given", ["x", 1.5, True, {"a": "x"}])
def test_a_version_is_a_whole_number(given) -> None:
    with pytest.raises(InputError, match="expected a whole number"):
        Versions(given, ["a"])
