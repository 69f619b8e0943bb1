"""Collectives read out of XLA's text dumps: real ones made by JAX on 8 CPU devices, and lines as GPU backends write them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.backends.channels import Traffic
from shardroute.planner.choice import parse_hlo, read_hlo
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError

DUMPS = Path(__file__).parent / "data" / "hlo"

# Run where JAX is: a ring of 4 x 2 devices (context, tensor), and one of each other collective.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("context", "tensor"))
def ring(q, kv):
    out = jnp.zeros_like(q)
    for _ in range(3):
        out = out + q @ kv.T @ kv
        kv = jax.lax.ppermute(kv, "context", [(i, (i + 1) % 4) for i in range(4)])
    return jax.lax.psum(out + q @ kv.T @ kv, "tensor")
def ring_attention(q, kv):
    spec = P("context", None)
    return jax.shard_map(ring, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)(q, kv)
x = jnp.ones((512, 64), jnp.float32)
jax.jit(ring_attention)(x, x).block_until_ready()
"""


def hlo(*lines: str, header: str = "HloModule m, num_partitions=8") -> str:
    return "\n".join([header, "", "ENTRY %main {", *(f"  {line}" for line in lines), "}"])


def only(line: str, header: str = "HloModule m, num_partitions=8"):
    (found,) = parse_hlo(hlo(line, header=header), "a test").operations
    return found


def test_a_dump_of_ring_attention_has_its_permutes_and_its_sum() -> None:
    module = read_hlo(str(DUMPS / "ring_attention.txt"))

    *permutes, total = module.operations
    assert (module.name, module.n_devices, len(permutes)) == ("jit_ring_attention", 8, 3)
    for permute in permutes:
        assert (permute.op, permute.n_bytes, permute.dtype) == (Collective.PERMUTE, 128 * 64 * 4, "f32")
        assert permute.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
        assert (permute.traffic, permute.is_partial) == (Traffic.RING, False)
    assert (total.op, total.groups[0], total.is_world) == (Collective.ALL_REDUCE, (0, 1), False)


def test_a_dump_of_every_collective_counts_bytes_as_nccl_tests_does() -> None:
    permute, gather, reduce, scatter, exchange = read_hlo(str(DUMPS / "mixed.txt")).operations

    assert permute.is_partial
    assert (gather.op, gather.n_bytes) == (Collective.ALL_GATHER, 256 * 1024 * 4)
    assert (reduce.op, reduce.n_bytes, reduce.is_world) == (Collective.ALL_REDUCE, 64 * 1024 * 4, True)
    assert (scatter.op, scatter.n_bytes, scatter.xla_bytes) == (Collective.REDUCE_SCATTER, 2 * 256 * 512 * 4, 256 * 512 * 4)
    assert (exchange.op, exchange.n_bytes) == (Collective.ALL_TO_ALL, 4 * 64 * 512 * 4)


@pytest.mark.slow
def test_a_dump_that_jax_writes_now_is_read(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    flags = f"--xla_force_host_platform_device_count=8 --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, check=True)
    (path,) = tmp_path.glob("*jit_ring_attention*after_optimizations.txt")

    found = read_hlo(str(path)).operations

    assert [o.op for o in found].count(Collective.PERMUTE) == 3
    assert all(len(o.groups) in (2, 4) for o in found)


def test_started_operations_count_their_results_only() -> None:
    permute = only(
        "%p = (bf16[4,64]{1,0}, bf16[4,64]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"
    )
    gather = only("%g = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}")
    reduce = only("%r = f32[16]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add")

    assert permute.n_bytes == 4 * 64 * 2
    assert gather.n_bytes == 32 * 4
    assert (reduce.n_bytes, reduce.groups) == (64, (tuple(range(8)),))


def test_several_results_are_added_and_the_ends_of_started_ones_left_out() -> None:
    text = hlo(
        "%r = (f32[8]{0}, /*index=1*/bf16[4,2]{1,0:T(8,128)}) all-reduce(%a, %b), replica_groups={{0,1},{2,3}}, to_apply=%add",
        "%d = f32[16]{0} all-reduce-done(%r)",
        "%t = f32[8]{0} get-tuple-element(%r), index=0",
        '%f = f32[8]{0} fusion(%t), kind=kLoop, calls=%c, metadata={op_name="all-reduce(x)"}',
    )

    (found,) = parse_hlo(text, "a test").operations

    assert found.n_bytes == 8 * 4 + 8 * 2


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.permutations([0, 1, 2]))
def test_groups_written_as_a_turned_grid_are_those_of_an_array(a: int, b: int, c: int, order: list[int]) -> None:
    n = a * b * c
    ranks = np.arange(n).reshape(a, b, c).transpose(order).reshape(-1, n // a)
    line = f"%g = f32[{n}] all-reduce(%x), replica_groups=[{a},{n // a}]<=[{a},{b},{c}]T({','.join(map(str, order))})"

    found = only(line, header=f"HloModule m, num_partitions={n}")

    assert found.groups == tuple(tuple(row) for row in ranks.tolist())


def test_replicas_and_partitions_make_the_devices() -> None:
    assert parse_hlo(hlo(header="HloModule m, replica_count=2, num_partitions=4"), "a test").n_devices == 8


@pytest.mark.parametrize("name", ["mixed.txt", "ring_attention.txt"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_dump_that_is_cut_short_is_refused(name: str, share: float) -> None:
    text = (DUMPS / name).read_text()

    with pytest.raises(InputError, match="cut short"):
        parse_hlo(text[: int(len(text.rstrip()) * share)], "a test")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("digraph G {}", "begins with HloModule"),
        (hlo("%r = f32[8] all-reduce(%x), replica_groups=mesh"), "line 4: r: these replica_groups can't be read"),
        (hlo("%p = f32[8] collective-permute(%x), channel_id=1"), "source_target_pairs"),
        (hlo("%r = f4e2m1[8] all-reduce(%x)"), "dtype 'f4e2m1' is unknown"),
        (hlo("%r = token[] all-reduce(%x)"), "dtype 'token'"),
        (hlo("%r = f32[8] all-reduce(%x), replica_groups=[3,2]<=[8]"), "don't fit"),
        (hlo("%r = f32[8] all-reduce(%x), replica_groups={{0,99999999999}}"), "at most 1048576 devices"),
        (hlo("%r = f32[8] all-reduce(%x)", header="HloModule m, num_partitions=999999999"), "at most 1048576 devices"),
        (hlo("%r = f32[8] all-reduce(%x), replica_groups=[0,0]<=[0]"), "don't fit"),
        (hlo("%r = f32[4294967296,2147483648] all-reduce(%x)"), "less than 2.63"),
        (hlo("%r = (f32[8 all-reduce(%x)"), "line 4: the brackets of a shape don't close"),
        (hlo("%p = f32[8] collective-permute(%x), source_target_pairs={{0,1},{0,2}}"), "once as a source"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse_hlo(text, "a test")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "module.pb"
    path.write_bytes(b"\xff\xfe\x00HloModule")

    with pytest.raises(InputError, match="expected the text of an HLO module"):
        read_hlo(str(path))
