"""Plans of partial tensors: proved, and every element the same sum over whatever order messages take."""

from dataclasses import replace

import numpy as np
import pytest
from executor_oracles import in_arenas, random_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_oracle import run_messages
from sum_oracle import NUMPY, elements, expected_sums, from_bits, to_bits

from shardroute.executors.interpreting.adding import CODES, add_to
from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.memories import Part
from shardroute.executors.messages import messages
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.transports import exchanges
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.check import check
from shardroute.planner.plans import Plan
from shardroute.planner.problems import SUMMED_DTYPES
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.routing.sums import SUMMING
from shardroute.topologies import build_topology, load_machine


@st.composite
def summed(draw: st.DrawFn) -> Plan:
    """Sums over one axis of a mesh, shards over the other."""
    n, m = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    shape = f"{draw(st.integers(1, 9))},{draw(st.integers(1, 7))}"
    shard = draw(st.sampled_from(["S0", "S1"]))
    target = draw(st.sampled_from(["R", "S0", "S1"]))
    if target == shard:
        target = "R"
    problem = tensor_problem(
        shape, draw(st.sampled_from(SUMMED_DTYPES)), f"a={n},b={m}", f"P,{shard}", f"a={n},b={m}", f"{target},{shard}"
    )
    topology = build_topology(load_machine("dgx-h100"), n_units=2)
    plan = make_plan(problem, topology, draw(st.sampled_from(sorted(SUMMING))), draw(st.sampled_from([None, 8, 40])))
    return replace(plan, window_bytes=draw(st.sampled_from([32, 64, 2**20])))  # less than a step brings: it goes in rounds


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "STRAIGHT_BYTES", 32)
    monkeypatch.setattr(messages, "PACKED_BYTES", 48)
    monkeypatch.setattr(exchanges, "_AHEAD", 3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(summed(), st.randoms(use_true_random=False), st.booleans(), st.integers(0, 2**32))
def test_messages_in_any_legal_order_add_up_in_the_order_of_ranks(
    small_windows: None, plan: Plan, randomly: "st.random_module", eager: bool, seed: int
) -> None:
    programs, buffers = compile_plan(plan)
    memory, dtype = random_memory(buffers, 1), plan.problem.tensors[0].dtype
    numbers, addends = np.random.default_rng(seed), {}
    for (rank, element), at in elements(plan, Part.SOURCE).items():
        addends[rank, element] = to_bits(float(numbers.normal()), dtype)
        memory[rank, Part.SOURCE, "tensor"].view(NUMPY[dtype])[at] = addends[rank, element]
    arenas = in_arenas(memory, buffers)

    run_messages(programs, lay_messages(plan, programs, buffers), arenas, randomly.randrange, eager=eager)  # type: ignore[attr-defined]

    places, start = elements(plan, Part.TARGET), {int(r): int(at) for r, at in enumerate(buffers.target_at)}
    for (rank, element), value in expected_sums(plan, addends).items():
        found = arenas[rank][start[rank] :].view(np.uint8)
        itemsize = np.dtype(NUMPY[dtype]).itemsize
        at = places[rank, element] * itemsize
        assert found[at : at + itemsize].tobytes() == np.array(value, NUMPY[dtype]).tobytes()


@given(summed())
def test_every_planned_sum_is_proved(plan: Plan) -> None:
    proof = check(plan)

    cls = plan.problem.classes[0]
    assert proof.n_bytes == int(cls.target.n_elements.sum()) * cls.itemsize


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)), min_size=1, max_size=20))
def test_bf16_is_added_to_the_nearest_number(pairs: list[tuple[int, int]]) -> None:
    finite = [(a, b) for a, b in pairs if (a & 0x7F80) < 0x7F00 > (b & 0x7F80)]  # whose sums are finite, too
    into, part = (np.array([pair[k] for pair in finite], np.uint16) for k in (0, 1))
    exact = [from_bits(a, "bf16") + from_bits(b, "bf16") for a, b in finite]

    add_to(into, part, CODES["bf16"])

    # Once to float32, which the hardware's adders round to as well, then to bf16.
    assert [from_bits(x, "bf16") for x in into] == [from_bits(to_bits(float(np.float32(x)), "bf16"), "bf16") for x in exact]
