"""Checksums of pieces taken on devices: they are the host's, and over doubles of the libraries they name what was corrupted."""

import json
from pathlib import Path

import numpy as np
import pytest
from gpu_doubles import need, need_asked, run_over_doubles
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.executors.gpus import device_sums
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.blocks import LINEAR, Forms
from shardroute.executors.interpreting.checksums import _TILE_WORDS, checksum
from shardroute.executors.interpreting.piece_sums import PieceRows, PieceSums
from shardroute.topologies.errors import InputError

MAIN = Path(__file__).parent / "doubles" / "checksums_main.py"
N_RANKS = 3
NEEDS = {"nccl": ("cuda", "nccl"), "nccl-put": ("cuda", "nccl"), "nvshmem": ("cuda", "nvshmem"), "torch-cpu": ("torch",)}


@pytest.mark.faults
@pytest.mark.parametrize("transport", NEEDS)
def test_a_piece_corrupted_on_its_way_between_gpus_is_named_and_the_old_weights_stay(
    transport: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_asked(request, transport in ("nccl", "nvshmem"))
    need("torch", *NEEDS[transport])
    receives = transport in ("nccl", "torch-cpu")  # it is who receives that corrupts there, else who puts
    hurt = ",2:6,2:14," if receives else ",1:6,1:14,"  # the second piece of the second trial, and of the second transfer

    done = run_over_doubles(
        str(MAIN), str(tmp_path), transport, str(N_RANKS),
        FAKENCCL_CORRUPT=hurt, FAKENVSHMEM_CORRUPT=hurt, CORRUPT=hurt, FAKENVSHMEM_DOMAIN="1", FAKECUDA_JITTER_US="200",
    )  # fmt: skip

    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    assert all(isinstance(found, dict) for found in told), (told, done.stderr[-2000:])
    wrong = "(copy of 1 piece, 32 B, rank 1 -> rank 2): piece [1:2, 0:16] of t0 in its destination weights isn't what rank 1 sent"
    first, second = told[0]["accused"]
    assert first == []
    assert len(second) == 1
    assert second[0].startswith("rank 2 at step ")
    assert wrong in second[0]
    for rank, found in enumerate(told):
        assert found["errors"][0] == ""
        assert f"rank {rank} after its last step" in found["errors"][1]
        assert wrong in found["errors"][1]
        assert (found["holds"], found["version"]) == ([1] if rank else [0], 1)


class OneMemory:
    """The Tensors of one array."""

    is_host = True

    def __init__(self, memory: np.ndarray) -> None:
        import torch

        self.bytes = torch.from_numpy(memory)

    def view(self, pointer: int, n_bytes: int):
        return self.bytes[pointer : pointer + n_bytes]

    def on(self, stream: int):
        import contextlib

        return contextlib.nullcontext()


class Identity:
    """A Memory whose addresses are pointers."""

    def at(self, address: int) -> int:
        return address


def one_row(n_bytes: int, at: int, form: int) -> PieceRows:
    """A piece that rank 0 sends to itself, where it lies."""
    zero = np.zeros(1, np.int64)
    return PieceRows(
        np.array([0, 1]), zero, zero, zero, np.array([at]), np.array([at]), np.array([n_bytes]), np.array([form], np.int32),
        np.ones(1, bool), zero - 1,
    )  # fmt: skip


NO_FORMS = Forms(np.zeros(0, np.int64), *(np.zeros((0, 1), np.int64) for _ in range(3)))


def taken(rows: PieceRows, forms: Forms, memory: np.ndarray) -> tuple[int, int, int, int]:
    """What a device takes of a row as it is sent and as it is kept; the same on the host."""
    sums = device_sums.DeviceSums(rows, forms, 0, OneMemory(memory))
    sums.put_sent(0, Identity(), 0)
    sums.put_kept(Identity(), 0)
    sums.collect()
    host = PieceSums(rows, forms, Arena.whole(memory), 0, np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    host.take_sent(0)
    host.take_kept()
    return int(sums.sent[0]), int(sums.kept[0]), int(host.sent[0]), int(host.kept[0])


@settings(max_examples=40)
@given(
    st.integers(1, 3 * 8 * _TILE_WORDS), st.integers(0, 9), st.sampled_from([30_001, 8 * _TILE_WORDS, 2**19]), st.integers(0, 9)
)
def test_runs_of_bytes_have_the_checksums_of_the_host_whatever_the_chunks(n_bytes: int, at: int, chunk: int, seed: int) -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")
    memory = np.random.default_rng(seed).integers(0, 256, at + n_bytes, dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sums, "_CHUNK_BYTES", chunk)

        found = taken(one_row(n_bytes, at, LINEAR), NO_FORMS, memory)

    assert set(found) == {checksum(memory[at:])}


@st.composite
def strided(draw: st.DrawFn):
    """A box of bytes with a run and dims in any order, some of them backwards; where it begins, and how much memory it needs."""
    run = draw(st.sampled_from([1, 2, 3, 8, 24, 130]))
    count = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    stride, reach = [0] * len(count), run
    for dim in draw(st.permutations(range(len(count)))):
        gap = draw(st.integers(0, 2)) * run
        stride[dim] = (reach + gap) * draw(st.sampled_from([1, 1, -1]))
        reach = (count[dim] - 1) * abs(stride[dim]) + reach
    before = sum((n - 1) * -s for n, s in zip(count, stride, strict=True) if s < 0)
    shift = draw(st.integers(0, 8))
    return run, count, stride, before + shift, reach + shift


@given(strided(), st.sampled_from([16, 40, 2**20]), st.integers(0, 99))
def test_boxes_whose_runs_lie_apart_have_the_checksums_of_the_host(case, chunk: int, seed: int) -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")
    run, count, stride, at, n_memory = case
    memory = np.random.default_rng(seed).integers(0, 256, n_memory, dtype=np.uint8)
    forms = Forms(np.array([run]), np.array([count]), np.array([stride]), np.array([stride]))
    n_bytes = run * int(np.prod(count))
    dense = np.ndarray((*count, run), np.uint8, memory.data, at, (*stride, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sums, "_CHUNK_BYTES", chunk)

        found = taken(one_row(n_bytes, at, 0), forms, memory)

    assert set(found) == {checksum(np.ascontiguousarray(dense).reshape(-1))}


def test_what_is_summed_at_a_time_is_bounded() -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")
    memory = np.zeros(2**20, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sums, "_CHUNK_BYTES", 2**16)
        sizes: list[int] = []
        shares = device_sums._Tables.shares
        patch.setattr(device_sums._Tables, "shares", lambda self, c, at: sizes.append(c.numel()) or shares(self, c, at))
        apart = Forms(np.array([2**14]), np.array([[32]]), np.array([[2**15]]), np.array([[2**15]]))

        taken(one_row(2**20, 0, LINEAR), NO_FORMS, memory)
        taken(one_row(2**19, 0, 0), apart, memory)

    assert max(sizes) == 2**16
    assert sum(sizes) == 2 * (2**20 + 2**19)


def test_a_build_of_torch_without_cuda_takes_no_checksums_on_gpus() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")

    with pytest.raises(InputError, match=r"checksums on GPUs are taken by torch, and torch .* was built without CUDA; leave"):
        device_sums.check_sums_on(object())
