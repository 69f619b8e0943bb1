"""Checksums against a plain sum over Python numbers, and pieces followed from hop to hop."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hand_plans import gathered, relay_chain, rows_to_columns
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.interpreting.checksums import _MIX, _TILE_WORDS, _of_tile, checksum
from shardroute.executors.interpreting.piece_sums import NONE, describe_wrong, first_wrong, piece_rows
from shardroute.planner.plan_files import save_plan


def as_bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@given(st.binary(max_size=200))
def test_a_checksum_is_the_sum_of_words_times_their_multipliers(data: bytes) -> None:
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]

    assert checksum(as_bytes(data)) == sum(w * int(_MIX[i]) * _of_tile(0) for i, w in enumerate(words)) % 2**64


@given(st.integers(0, 3 * _TILE_WORDS), st.lists(st.integers(0, 3 * _TILE_WORDS), max_size=4), st.integers(0, 2**32))
def test_parts_in_any_order_add_up_to_the_checksum_of_the_whole(n_words: int, cuts: list[int], seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, 8 * n_words + 3, dtype=np.uint8)
    edges = [0, *sorted(8 * min(cut, n_words) for cut in cuts), len(data)]

    parts = [checksum(data[a:b], a) for a, b in itertools.pairwise(edges)]

    assert sum(reversed(parts)) % 2**64 == checksum(data)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_change_within_a_word_changes_the_checksum(data: bytes, drawn: st.DataObject) -> None:
    at, flip = drawn.draw(st.integers(0, len(data) - 1)), drawn.draw(st.integers(1, 255))
    changed = bytearray(data)
    changed[at] ^= flip

    assert checksum(as_bytes(bytes(changed))) != checksum(as_bytes(data))


def test_words_that_change_places_change_the_checksum() -> None:
    words = np.arange(1, 2 * _TILE_WORDS, dtype=np.uint64)
    for a, b in ((0, 1), (3, _TILE_WORDS), (5, _TILE_WORDS + 5)):
        swapped = words.copy()
        swapped[[a, b]] = swapped[[b, a]]

        assert checksum(swapped.view(np.uint8)) != checksum(words.view(np.uint8))


def test_bytes_that_begin_anywhere_have_the_same_checksum() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)

    for shift in range(8):
        moved = np.concatenate([np.zeros(shift, np.uint8), memory[:901]])
        assert checksum(moved[shift:]) == checksum(memory[:901].copy())


def test_what_a_relay_reads_is_compared_with_what_it_was_sent() -> None:
    rows = piece_rows(relay_chain(4, n_chunks=2))

    assert rows.before.tolist() == [NONE, NONE, 0, 1, 2, 3]
    assert rows.rank.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("make", [rows_to_columns, gathered, lambda: relay_chain(5, n_chunks=3)])
def test_equal_checksums_accuse_nobody_and_the_first_hop_that_differs_is_named(make) -> None:
    plan = make()
    rows = piece_rows(plan)
    origin = np.arange(len(rows.step))
    for row in np.argsort(rows.step, kind="stable").tolist():
        if rows.before[row] != NONE:
            origin[row] = origin[rows.before[row]]
    sent = (origin + 1).astype(np.uint64)

    assert first_wrong(rows, sent, sent) == NONE
    for row in np.flatnonzero(rows.lands).tolist():
        kept = sent.copy()
        kept[row] ^= np.uint64(1)
        assert first_wrong(rows, sent, kept) == row
        assert f"isn't what rank {rows.rank[row]} sent" in describe_wrong(plan, rows, row)
    for row in np.flatnonzero(rows.before != NONE).tolist():
        changed = sent.copy()
        changed[row] ^= np.uint64(1)
        found = first_wrong(rows, changed, changed)
        assert rows.step[found] <= rows.step[row]
        assert first_wrong(rows, changed, changed, int(rows.rank[row])) != NONE


def test_a_run_says_what_its_checksums_found(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    save_plan(rows_to_columns(), tmp_path / "r.plan")

    code, out, _ = cli("run", str(tmp_path / "r.plan"), "--verify", "--json")

    assert code == 0
    assert json.loads(out)["corrupted"] == []


def test_checksums_of_what_is_added_up_are_bad_input(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    shape, plan = ["--shape", "8,8", "--dtype", "f32", "-m", "cpu-processes"], str(tmp_path / "s.plan")
    cli("plan", *shape, "--from-mesh", "dp=2", "--from-placements", "P", "--to-mesh", "dp=2", "--to-placements", "R", "-o", plan)

    code, out, err = cli("run", plan, "--verify")

    assert (code, out) == (2, "")
    assert "checksums follow bytes that are moved, and this plan adds up; leave --verify" in err
