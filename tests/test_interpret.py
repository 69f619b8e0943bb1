from dataclasses import replace

import numpy as np
import pytest
from hand_plans import HandPlan, column_shards, gathered, relay_chain, row_shards, rows_to_columns

from shardroute.executors.interpreting.blocks import LINEAR, _check_reach
from shardroute.executors.interpreting.interpret import Programs, compile_plan, from_columns, to_columns
from shardroute.executors.interpreting.memories import ALIGNMENT, Part
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, Replicate, place
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.plans import TARGET
from shardroute.planner.problems import Problem
from shardroute.topologies.errors import InputError, PlanError


def test_rows_to_columns_become_one_strided_block_a_copy() -> None:
    programs, _ = compile_plan(rows_to_columns())

    # Rows of 8 bf16 elements on the source, of 2 on the destination: runs of 4 bytes, four of them.
    assert programs.forms.run.tolist() == [4]
    assert programs.forms.count[0].tolist() == [4, 1]
    assert programs.forms.src_stride[0, 0] == 16
    assert programs.forms.dst_stride[0, 0] == 4
    assert programs.blocks.form.tolist() == [0] * 8
    # Rank 0 drives the first four copies: columns 0, 2, 4, 6 of its rows into the upper half of ranks 2 to 5.
    assert programs.blocks.src[:4].tolist() == [0, 4, 8, 12]
    assert programs.blocks.dst.tolist() == [0] * 4 + [16] * 4
    assert programs.blocks.to.tolist() == [2, 3, 4, 5] * 2


def test_pieces_that_continue_each_other_on_both_sides_become_one_run() -> None:
    hand = HandPlan()
    t = hand.tensor((8, 4), row_shards((8, 4), [0]), row_shards((8, 4), [1]), "f32")
    hand.copy(hand.bundle(*((t, [(i, i + 1), (0, 4)]) for i in range(8))), 0, 1)

    programs, _ = compile_plan(hand.build(2))

    assert programs.blocks.n_bytes.tolist() == [128]
    assert programs.blocks.form.tolist() == [LINEAR]


def test_a_bundle_relayed_from_slot_to_slot_is_one_run() -> None:
    hand = HandPlan(slots=[64, 64])
    t = hand.tensor((4, 8), column_shards((4, 8), [0]), column_shards((4, 8), [2]))
    bundle = hand.bundle(*((t, [(0, 4), (2 * k, 2 * k + 2)]) for k in range(4)))
    first = hand.copy(bundle, 0, 1, dst_at=0)
    second = hand.copy(bundle, 1, 2, [first], src_at=0, dst_at=1)
    hand.copy(bundle, 2, 2, [second], src_at=1)

    programs, _ = compile_plan(hand.build(3))

    of_rank_1 = slice(*programs.actions.block_ptr[programs.actions.ptr[[1, 2]]].tolist())
    assert programs.blocks.n_bytes[of_rank_1].tolist() == [64]


def test_a_piece_lands_in_every_fragment_that_contains_it() -> None:
    # A KV head that a rank keeps twice, as when heads are fewer than its tensor-parallel share.
    twice = Fragments((2, 4), [1, 1], [[0, 0], [0, 0]], [[2, 4], [2, 4]], [0, 0], [0, 8], [[4, 1], [4, 1]], [16, 16])
    hand = HandPlan()
    t = hand.tensor((2, 4), row_shards((2, 4), [0]), twice)
    hand.copy(hand.bundle((t, [(0, 2), (0, 4)])), 0, 1)

    programs, _ = compile_plan(hand.build(2))

    assert programs.blocks.dst.tolist() == [0, 16]


def test_scalars_move() -> None:
    one = Mesh.of({"x": 1}, [0]), Mesh.of({"x": 1}, [1])
    hand = HandPlan()
    t = hand.tensor((), place((), one[0], [Replicate()]), place((), one[1], [Replicate()]), "f32")
    hand.copy(hand.bundle((t, [])), 0, 1)

    programs, _ = compile_plan(hand.build(2))

    assert programs.blocks.n_bytes.tolist() == [4]


def test_a_step_without_pieces_is_an_action_without_blocks() -> None:
    hand = HandPlan()
    t = hand.tensor((2, 2), row_shards((2, 2), [0]), row_shards((2, 2), [1]))
    hand.copy(hand.bundle(), 0, 1)
    hand.copy(hand.bundle((t, [(0, 2), (0, 2)])), 0, 1)

    programs, _ = compile_plan(hand.build(2))

    assert programs.actions.step.tolist() == [0, 1]
    assert programs.actions.block_ptr.tolist() == [0, 0, 1]


def test_a_relay_waits_for_its_input_and_the_sender_knows_whom_to_wake() -> None:
    programs, _ = compile_plan(relay_chain(4))
    actions, cells = programs.actions, programs.cells

    assert actions.ptr.tolist() == [0, 1, 2, 3, 3]
    assert [actions.wait[actions.wait_ptr[i] : actions.wait_ptr[i + 1]].tolist() for i in range(3)] == [[], [0], [1]]
    assert [cells.wake[cells.wake_ptr[i] : cells.wake_ptr[i + 1]].tolist() for i in range(3)] == [[1], [2], []]


def test_only_ranks_with_something_to_put_meet_the_others_of_a_collective() -> None:
    programs, _ = compile_plan(gathered(1))
    actions = programs.actions

    meets = {
        (int(actions.step[i]), rank): bool(actions.meets[i]) for rank in range(4) for i in range(*actions.ptr[rank : rank + 2])
    }

    assert meets == {(0, 0): True, (0, 1): True, (1, 0): True, (1, 2): False, (1, 3): False, (2, 2): False, (3, 3): False}


def test_each_piece_of_an_all_gather_is_put_once_by_its_first_holder() -> None:
    hand = HandPlan(slots=[32])
    both = place((4, 4), Mesh.of({"x": 2}, [1, 0]), [Replicate()])
    t = hand.tensor((4, 4), both, row_shards((4, 4), [0]))
    whole = hand.bundle((t, [(0, 4), (0, 4)]))
    gather = hand.gather(whole, [1, 0], 0)
    hand.copy(whole, 0, 0, [gather], src_at=0)

    programs, _ = compile_plan(hand.build(2))

    assert programs.actions.meets.tolist() == [False, False, True]  # rank 0: gather, copy; rank 1, first of the group, gathers
    assert programs.blocks.to.tolist() == [0, 0, 1]


def test_arenas_hold_source_then_target_then_slots_each_buffer_once() -> None:
    hand = HandPlan(slots=[1000])
    mesh = Mesh.of({"x": 1}, [0])
    t = hand.tensor((3, 5), place((3, 5), mesh, [Replicate()]), place((3, 5), mesh, [Replicate()]))
    whole = hand.bundle((t, [(0, 3), (0, 5)]))
    hand.copy(whole, 0, 0, [hand.copy(whole, 0, 0, dst_at=0)], src_at=0)

    _, buffers = compile_plan(hand.build(1))

    assert buffers.part.tolist() == [Part.SOURCE, Part.TARGET, Part.SLOT]
    assert buffers.n_bytes.tolist() == [30, 30, 1000]
    assert buffers.offset.tolist() == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert (buffers.target_at[0], buffers.slots_at[0]) == (ALIGNMENT, 2 * ALIGNMENT)
    assert buffers.arena_bytes[0] == 2 * ALIGNMENT + 1024
    assert buffers.describe(0, ALIGNMENT + 7) == "byte 7 of buffer t0 on rank 0"


def test_tensors_that_share_a_buffer_lie_in_it_together_and_must_agree_on_its_size() -> None:
    def half(k: int, size: int) -> Fragments:
        return Fragments((2, 4), [0], [[0, 0]], [[2, 4]], [0], [8 * k], [[4, 1]], [size])

    def problem(size: int) -> Problem:
        tensors = Tensor("q", (2, 4), "bf16"), Tensor("k", (2, 4), "bf16")
        fused = Layout((half(0, 16), half(1, size)), (("qk",), ("qk",)))
        return Problem(tensors, fused, fused, 1)

    plan = rows_to_columns()
    good = replace(plan, problem=problem(16), **no_steps(2))
    bad = replace(plan, problem=problem(24), **no_steps(2))

    assert compile_plan(good)[1].n_bytes.tolist() == [32, 32]
    with pytest.raises(InputError, match="buffer qk on rank 0: one tensor says that it has 32 bytes, another 48"):
        compile_plan(bad)


def no_steps(n_classes: int) -> dict[str, object]:
    from shardroute.planner.plans import Boxes, Bundles, Steps

    none = np.zeros(0, np.int64)
    nothing = np.zeros((0, 2), np.int64)
    return {
        "boxes": (Boxes(nothing, nothing),) * n_classes,
        "bundles": Bundles(np.zeros(1), none, none, none),
        "steps": Steps(*[none] * 9, np.zeros(1), none),
    }


@pytest.mark.parametrize(
    ("src", "dst", "columns", "message"),
    [
        (1, 2, (0, 4), r"step 0 reads piece \[0:4, 0:4\] of t0 in the source weights of rank 1, which holds no fragment"),
        (0, 2, (4, 8), r"step 0 delivers piece \[0:4, 4:8\] of t0 in the destination weights of rank 2, which needs no fragment"),
        (0, 2, (2, 6), r"rank 2, which needs no fragment that contains it"),
    ],
)
def test_a_copy_outside_of_what_its_ranks_have_is_refused(src: int, dst: int, columns: tuple[int, int], message: str) -> None:
    hand = HandPlan()
    t = hand.tensor((8, 8), row_shards((8, 8), [0, 1]), column_shards((8, 8), [2, 3]))
    hand.copy(hand.bundle((t, [(0, 4), columns])), src, dst)

    with pytest.raises(PlanError, match=message):
        compile_plan(hand.build(4))


def test_a_piece_that_leaves_its_slot_is_refused() -> None:
    hand = HandPlan(slots=[60])
    t = hand.tensor((4, 8), row_shards((4, 8), [0]), row_shards((4, 8), [1]))
    hand.copy(hand.bundle((t, [(0, 4), (0, 8)])), 0, 1, dst_at=0)

    with pytest.raises(PlanError, match=r"step 0: piece \[0:4, 0:8\] of t0 lies at bytes 0 to 64 of a slot of 60 bytes"):
        compile_plan(hand.build(2))


def test_a_piece_that_leaves_its_tensor_is_refused() -> None:
    hand = HandPlan(slots=[10**6])
    t = hand.tensor((4, 8), row_shards((4, 8), [0]), row_shards((4, 8), [1]))
    hand.copy(hand.bundle((t, [(0, 4), (0, 9)])), 0, 1, src_at=0, dst_at=0)

    with pytest.raises(PlanError, match="leaves the tensor of shape"):
        compile_plan(hand.build(2))


def test_an_all_gather_of_what_no_rank_of_its_group_holds_is_refused() -> None:
    hand = HandPlan(slots=[64])
    t = hand.tensor((4, 8), row_shards((4, 8), [0]), row_shards((4, 8), [1]))
    hand.gather(hand.bundle((t, [(0, 4), (0, 8)])), [1, 2], 0)

    with pytest.raises(PlanError, match=r"step 0: no rank of the all-gather holds piece \[0:4, 0:8\] of t0"):
        compile_plan(hand.build(3))


def test_a_read_of_target_weights_takes_one_of_several_fragments() -> None:
    twice = Fragments((2, 4), [1, 1], [[0, 0], [0, 0]], [[2, 4], [2, 4]], [0, 0], [0, 8], [[4, 1], [4, 1]], [16, 16])
    both = Fragments(
        (2, 4), [1, 1, 2], [[0, 0]] * 3, [[2, 4]] * 3, [0] * 3, [0, 8, 0], [[4, 1]] * 3, [16, 16, 8]
    )  # fmt: skip
    assert len(twice) == 2
    hand = HandPlan()
    t = hand.tensor((2, 4), row_shards((2, 4), [0]), both)
    bundle = hand.bundle((t, [(0, 2), (0, 4)]))
    hand.copy(bundle, 1, 2, [hand.copy(bundle, 0, 1)], src_at=TARGET)

    programs, _ = compile_plan(hand.build(3))

    assert programs.blocks.n_bytes.tolist() == [16, 16, 16]


def test_programs_come_back_from_their_columns() -> None:
    programs, _ = compile_plan(gathered())
    columns = to_columns(programs)

    again = to_columns(from_columns(Programs, columns))

    assert list(again) == list(columns)
    assert all(again[name] is columns[name] for name in columns)


def test_equal_plans_compile_to_equal_programs() -> None:
    first, second = (to_columns(compile_plan(gathered())[0]) for _ in range(2))

    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_a_block_that_leaves_its_arena_is_never_handed_out() -> None:
    plan = rows_to_columns()
    programs, _ = compile_plan(plan)
    actions = programs.actions
    n_blocks = np.diff(actions.block_ptr)
    rank = np.repeat(np.repeat(np.arange(programs.n_ranks), np.diff(actions.ptr)), n_blocks)
    step, blocks, forms = np.repeat(actions.step, n_blocks), programs.blocks, programs.forms

    _check_reach(step, rank, blocks, forms, programs.arena_bytes)
    with pytest.raises(PlanError, match=r"step \d+ reads bytes -\d+ to "):
        _check_reach(step, rank, replace(blocks, src=blocks.src - 2**20), forms, programs.arena_bytes)
    with pytest.raises(PlanError, match=r"step \d+ writes bytes \d+ to \d+ on rank \d+, which has \d+"):
        _check_reach(step, rank, replace(blocks, dst=blocks.dst + programs.arena_bytes[blocks.to]), forms, programs.arena_bytes)
