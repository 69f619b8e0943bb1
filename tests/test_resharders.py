"""Resharding in a loop, over gloo: four ranks play scenes once (resharder_ranks.py), and each test looks at one of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.resharding.drop_ins import read_mesh, read_placement
from shardroute.executors.resharding.tensors import local_bytes
from shardroute.planner.layouts.placements import Partial, Replicate, Shard
from shardroute.topologies.errors import InputError

pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")

N_RANKS = 4
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What each rank saw in each scene."""
    folder = tmp_path_factory.mktemp("resharders")
    command = [sys.executable, str(HERE / "resharder_ranks.py"), str(folder)]
    done = subprocess.run(
        command, check=False, timeout=120, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(HERE)}
    )
    files = [folder / f"{rank}.json" for rank in range(N_RANKS)]
    assert all(file.exists() for file in files), done.stderr[-2000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("scene", ["dtensors", "tensors_of_many_dtypes", "as_nccl_m2n", "as_nemo_rl"])
def test_every_rank_ends_with_the_part_of_the_tensor_that_it_needs(scenes: list[dict[str, object]], scene: str) -> None:
    assert [rank[scene] for rank in scenes] == [True] * N_RANKS


def test_a_second_transfer_over_the_same_ranks_is_refused_while_the_first_goes_on(scenes: list[dict[str, object]]) -> None:
    found = [rank["one_at_a_time"] for rank in scenes]

    assert all("goes on over these ranks; wait for it first" in seen["error"] for seen in found[:3])
    assert all(seen["done"] and seen["good"] for seen in found)


def test_memory_is_the_declared_staging_and_the_stated_window(scenes: list[dict[str, object]]) -> None:
    found = [rank["one_at_a_time"] for rank in scenes]

    assert [seen["staging"] for seen in found] == [0] * N_RANKS
    # Both sources pack rows into windows of 16 MiB; columns of whole rows lie in order at the destination.
    assert [seen["window"] for seen in found] == [16 * 2**20] * 2 + [0] * 2


def test_what_ranks_disagree_on_is_refused_on_every_rank(scenes: list[dict[str, object]]) -> None:
    for rank in scenes:
        described, lacking, digests, ranks, *_ = rank["errors"]
        assert described.startswith("InputError: tensor w of the source: rank 0 says f32 (4, 4) as S0")
        assert lacking.startswith("InputError: no rank describes the destination")
        assert "the ranks have different plans" in digests
        assert digests.endswith("no byte was moved")
        assert ranks == "InputError: the plan is for 6 ranks, and the transport has 4"


def test_a_tensor_that_cannot_be_the_part_is_refused_by_name(scenes: list[dict[str, object]]) -> None:
    for number, rank in enumerate(scenes):
        missing, size, order, kind = rank["errors"][4:]
        side = "source" if number < 2 else "destination"
        assert missing == f"InputError: rank {number} holds a part of {side} tensor w, which was not given"
        assert size == "InputError: tensor w: this rank's part has 48 bytes, and the layout gives it 32"
        assert "expected a contiguous tensor" in order
        assert "found str" in kind


def test_spare_memory_is_what_was_allowed_and_the_version_what_was_moved_last(scenes: list[dict[str, object]]) -> None:
    parts, in_place = ["agree", "move", "take over", "vote"], ["move"]
    made = ["agree", "describe", "get ready", "meet", "plan"]
    for number, rank in enumerate(scenes):
        one = 128 if number >= 2 else 0  # 96 bytes, in whole cache lines
        assert rank["bucket_by_bucket"] == {
            "256": [2, 2 * one, 5, 6, True, parts, made],
            "None": [1, 3 * one, 5, 6, True, parts, made],
            "0": [1, 0, 5, 6, True, in_place, made],
        }


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "rank 1 is lost|the rank's own code failed"),
        ("corrupt", "of w1 in its destination weights isn't what rank 1 sent"),
    ],
)
def test_after_a_failure_between_buckets_each_tensor_has_one_version_and_the_next_transfer_moves_what_is_missing(
    scenes: list[dict[str, object]], fault: str, words: str
) -> None:
    for number, rank in enumerate(scenes):
        n_plans, version, versions, holds, error, read, after, finally_holds = rank["fails_between_buckets"][fault]
        assert (n_plans, version, versions) == (2, None, {"w0": 2, "w1": 1})
        assert re.search(words, error)
        assert "hold parts of two versions (w1 holds version 1; w0 holds version 2)" in read
        assert after == 2
        if number >= 2:
            assert holds == {"w0": [2.0], "w1": [1.0]}
            assert finally_holds == {"w0": [2.0], "w1": [2.0]}


def test_a_rank_that_stays_away_ends_the_others_transfer_at_its_deadline(scenes: list[dict[str, object]]) -> None:
    for number in (2, 3):  # which need what rank 0 holds
        first, second = scenes[number]["a_rank_that_stays_away"]
        assert f"rank {number} " in first
        assert "waiting for rank 0" in first
        assert "the 1.5 s that it may take were over" in first
        assert "make a new resharder" in second


def test_meshes_and_placements_of_other_libraries_are_read_by_their_attributes() -> None:
    lists, dims = read_mesh([[0, 1], [2, 3]]), read_mesh(SimpleNamespace(dims=(2, 2), start_rank=4))

    assert (lists.sizes, lists.ranks) == ((2, 2), (0, 1, 2, 3))
    assert dims.ranks == (4, 5, 6, 7)
    assert read_placement("S1") == Shard(1)
    assert read_placement(type("Replicate", (), {})()) == Replicate()
    assert read_placement(type("Shard", (), {"dim": 2})()) == Shard(2)
    assert read_placement("P(sum)") == Partial("sum")
    with pytest.raises(InputError, match="expected a mesh as nested lists of ranks"):
        read_mesh("rows")


def test_arrays_of_numpy_are_taken_as_they_lie_or_refused() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)

    view = local_bytes("w", array, 12)
    view[0] = 7

    assert array[0, 0] == 7
    with pytest.raises(InputError, match="expected a contiguous, writable array"):
        local_bytes("w", array.T, 12)
    array.setflags(write=False)
    with pytest.raises(InputError, match="expected a contiguous, writable array"):
        local_bytes("w", array, 12)


def test_an_arena_of_several_buffers_finds_each_by_its_address() -> None:
    first, second = np.arange(8, dtype=np.uint8), np.arange(100, 108, dtype=np.uint8)
    arena = Arena([0, 128], [first, second])

    assert arena.bytes(4, 4).tolist() == [4, 5, 6, 7]
    assert arena.bytes(130, 2).tolist() == [102, 103]
    assert arena.strided(134, "u1", (3,), (-2,)).tolist() == [106, 104, 102]
    arena.bind([second, first])
    assert arena.bytes(128, 1).tolist() == [0]
