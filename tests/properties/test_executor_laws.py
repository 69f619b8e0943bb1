import math

import numpy as np
from executor_oracles import in_arenas, random_memory, run_plan_by_elements, run_programs
from hand_plans import gathered, lane_ordered, relay_chain, rows_to_columns
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.executors.interpreting.blocks import LINEAR
from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.memories import Part
from shardroute.executors.interpreting.strides import coalesce
from shardroute.executors.run import run_plan
from shardroute.planner.plans import Backend, Plan
from shardroute.planner.routing import gather_broadcast
from shardroute.planner.routing.strategies import make_plan, pieces_of
from shardroute.planner.testing import fused_problems, tensor_problems
from shardroute.topologies import build_topology, load_machine

STRATEGIES = ("direct", "domain-relay", "gather-broadcast")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of every strategy, over small NVLink domains so that relays appear, with bundles and buckets as small as pieces."""
    problem = draw(st.one_of(tensor_problems(n_ranks=12), fused_problems(n_ranks=12)))
    topology = build_topology(load_machine("dgx-h100"), n_units=2)
    strategy = draw(st.sampled_from(STRATEGIES))
    if strategy == "gather-broadcast":
        return gather_broadcast.plan(problem, pieces_of(problem), topology, Backend.PROCESSES, draw(st.integers(1, 64)))
    return make_plan(problem, topology, strategy, message_bytes=draw(st.integers(1, 256)))


@settings(max_examples=80)
@given(plans(), st.data())
def test_programs_in_any_legal_order_leave_what_running_the_plan_element_by_element_leaves(
    plan: Plan, data: st.DataObject
) -> None:
    programs, buffers = compile_plan(plan)
    memory = random_memory(buffers, data.draw(st.integers(0, 2**32)))
    arenas = in_arenas(memory, buffers)
    randomly = data.draw(st.randoms(use_true_random=False))

    run_programs(programs, arenas, lambda n: randomly.randrange(n))

    run_plan_by_elements(plan, memory)
    expected = in_arenas(memory, buffers)
    for rank in range(plan.problem.n_ranks):
        end = int(buffers.slots_at[rank])
        np.testing.assert_array_equal(arenas[rank][:end], expected[rank][:end])


@given(
    st.sampled_from([rows_to_columns(), relay_chain(5, 10, 3), gathered(4), lane_ordered()]), st.randoms(use_true_random=False)
)
def test_hand_made_plans_end_alike_in_any_legal_order(plan: Plan, randomly: "st.random_module") -> None:
    programs, buffers = compile_plan(plan)
    memory = random_memory(buffers, 0)
    arenas = in_arenas(memory, buffers)

    run_programs(programs, arenas, lambda n: randomly.randrange(n))  # type: ignore[attr-defined]

    run_plan_by_elements(plan, memory)
    target = buffers.part == Part.TARGET
    for arena, expected, rank in zip(arenas, in_arenas(memory, buffers), range(plan.problem.n_ranks), strict=True):
        for at, n in zip(
            buffers.offset[target & (buffers.rank == rank)], buffers.n_bytes[target & (buffers.rank == rank)], strict=True
        ):
            np.testing.assert_array_equal(arena[at : at + n], expected[at : at + n])


@given(st.data())
def test_coalescing_names_the_same_pairs_of_elements(data: st.DataObject) -> None:
    n_dims = data.draw(st.integers(1, 4))
    numbers = st.lists(st.integers(-6, 6), min_size=n_dims, max_size=n_dims)
    extent = np.array([data.draw(st.lists(st.integers(1, 4), min_size=n_dims, max_size=n_dims))])
    src, dst = np.array([data.draw(numbers)]), np.array([data.draw(numbers)])

    merged = coalesce(extent, src, dst)

    def pairs(count: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[tuple[int, int]]:
        return sorted((int(a[0] @ i), int(b[0] @ i)) for i in np.ndindex(*count[0].tolist()))

    assert pairs(*merged) == pairs(extent, src, dst)


@settings(max_examples=12)
@given(plans())
def test_processes_deliver_every_byte_of_any_plan(plan: Plan) -> None:
    result = run_plan(plan, timeout_s=60)

    n_bytes = sum(int(cls.target.n_elements.sum()) * cls.itemsize * len(cls.members) for cls in plan.problem.classes)
    assert (result.verified.bytes, result.verified.mismatches) == (n_bytes, 0), [m.text for m in result.mismatches]


@settings(max_examples=40)
@given(plans())
def test_blocks_write_as_many_bytes_as_the_bundles_hold(plan: Plan) -> None:
    programs, _ = compile_plan(plan)
    blocks, forms = programs.blocks, programs.forms

    strided = blocks.form != LINEAR
    n_bytes = forms.run[blocks.form[strided]] * forms.count[blocks.form[strided]].prod(axis=1)

    np.testing.assert_array_equal(n_bytes, blocks.n_bytes[strided])
    assert math.prod(forms.count.shape) == 0 or (forms.count.max(axis=1) > 1).all()
