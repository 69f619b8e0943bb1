"""The training step: operations as MaxText counts them, tasks against closed forms, memory, search, and what is refused."""

import math
import re
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.layouts import load_model
from shardroute.planner.simulator import simulate
from shardroute.planner.steps import (
    Carrier,
    DenseModel,
    Network,
    Recompute,
    Scheme,
    StepLayout,
    StepRates,
    Wanted,
    dense_model,
    load_rates,
    network,
    predict_step,
    rates_names,
    search,
    step_flops,
    step_memory,
    why,
)
from shardroute.planner.steps.graphs import Builder, LayerWork, RingWork, StepWork
from shardroute.planner.steps.predictions import computed_s, simulated_s
from shardroute.planner.steps.searches import layouts_of
from shardroute.planner.steps.settings import check_layout
from shardroute.planner.steps.transfers import NOTHING, Flow, Link, carriers, collective, hop
from shardroute.planner.steps.works import step_work
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine

MACHINE = load_machine("gb200-nvl72")
CALIBRATION = default_calibration("gb200-nvl72")
LLAMA = dense_model(load_model("llama-3-8b"))
RATES = load_rates("gb200-nvl72")
FLAT = StepRates(132, 1e15, 1e15, 1e15, 0.0, 0.0, "a test")


def net(n_gpus: int) -> Network:
    return network(MACHINE, CALIBRATION, n_gpus)


def test_the_sizes_of_llama_3_8b_are_read_from_its_tensors() -> None:
    expected = DenseModel("llama-3-8b", 32, 4096, 14336, 3, 32, 8, 128, 128256, 8_030_261_248)

    assert dense_model(load_model("llama-3-8b")) == expected
    assert LLAMA.layer_weights == 3 * 4096 * 14336 + 2 * 4096 * 4096 + 2 * 4096 * 1024


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "deepseek-v3", "nemotron-3-nano-30b-a3b"])
def test_a_model_that_is_not_dense_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InputError, match=r"experts|latent|state-space"):
        dense_model(load_model(name))


def test_operations_are_maxtext_s_by_hand() -> None:
    # per token and layer: 6 d ff + 2 d (hq + 2 hkv) hd + 2 d hq hd = 352,321,536 + 50,331,648 + 33,554,432
    per_token = 32 * 436_207_616 + 2 * 4096 * 128256
    attention = 3 * 32 * 4 * 65536**2 * 4096 / 2

    found = step_flops(LLAMA, 65536, 1.0)

    assert found.layers + found.logits == 3 * 65536 * per_token
    assert found.attention == attention
    assert found.total / 4 == pytest.approx(1582e12, rel=1e-3)  # one sequence over 4 GPUs: 1582 TFLOP each


def test_a_fraction_of_a_sequence_a_gpu_counts_as_that_fraction() -> None:
    assert step_flops(LLAMA, 131072, 1 / 16).total == pytest.approx(step_flops(LLAMA, 131072, 1).total / 16, rel=1e-12)


def ring(n: int, block_s: float, hop_s: float, n_hops: int | None = None, last: Flow = NOTHING, n_sms: int = 0) -> RingWork:
    travels = Flow(0.0, hop_s, 1.0, Link.NVLINK, n_sms) if hop_s else NOTHING
    return RingWork(n, block_s, block_s, n - 1 if n_hops is None else n_hops, travels, last, NOTHING, NOTHING)


def ring_s(work: RingWork, overlapped: bool) -> float:
    build = Builder(n_sms=100)
    build.compute(0.0)
    build.ring(work, overlapped)
    return simulate(build.graph((10.0, 10.0))).makespan_s


@given(st.integers(2, 40), st.floats(0.1, 4), st.floats(0.1, 4))
def test_overlapped_hops_cost_what_exceeds_a_block(n: int, block_s: float, hop_s: float) -> None:
    found = ring_s(ring(n, block_s, hop_s), overlapped=True)

    # Each hop runs beside the block before the one that needs it.
    assert found == pytest.approx(block_s + (n - 1) * max(block_s, hop_s), rel=1e-9)


@given(st.integers(2, 40), st.floats(0.1, 4), st.floats(0.1, 4))
def test_hops_that_do_not_overlap_are_added(n: int, block_s: float, hop_s: float) -> None:
    assert ring_s(ring(n, block_s, hop_s), overlapped=False) == pytest.approx(n * block_s + (n - 1) * hop_s, rel=1e-9)


@given(st.integers(2, 40), st.floats(0.1, 4), st.floats(0.1, 4), st.integers(1, 99))
def test_a_hop_takes_its_sms_from_the_block_beside_it(n: int, block_s: float, hop_s: float, n_sms: int) -> None:
    found = ring_s(ring(n, block_s, hop_s, n_sms=n_sms), overlapped=True)

    # Of 100 SMs. A block beside a hop computes at the rate of those left, until the hop ends.
    left = 1 - n_sms / 100
    beside_s = block_s / left if block_s / left < hop_s else block_s + (1 - left) * hop_s
    assert found == pytest.approx(block_s + (n - 1) * max(beside_s, hop_s), rel=1e-9)


def test_a_hop_that_nothing_runs_beside_takes_no_sms_from_anyone() -> None:
    assert ring_s(ring(5, 2.0, 1.0, n_sms=50), overlapped=False) == ring_s(ring(5, 2.0, 1.0), overlapped=False)


def test_a_ring_of_one_has_no_hops() -> None:
    assert ring_s(ring(1, 2.0, 1.0), overlapped=True) == 2.0


@pytest.mark.parametrize("weights_s", [0.0, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("overlapped", [True, False])
def test_layers_that_are_not_simulated_take_as_long_as_those_that_settled(weights_s: float, overlapped: bool) -> None:
    gathered = Flow(0.0, 4 * weights_s, 4.0, Link.NVLINK) if weights_s else NOTHING
    forward = LayerWork(1.0, ring(4, 1.0, 0.3), 2.0, NOTHING, NOTHING)
    backward = LayerWork(2.0, ring(4, 2.5, 0.6, 4), 4.0, NOTHING, NOTHING)
    work = StepWork(forward, forward, backward, gathered, gathered, 1.0, 0.1, overlapped, 100)

    assert simulated_s(work, 24, (5.0, 5.0)) == pytest.approx(simulated_s(work, 24, (5.0, 5.0), n_simulated=24), rel=1e-12)


def test_a_step_without_communication_takes_what_it_computes() -> None:
    layout = StepLayout(seq=8192, cp=1)
    flops = step_flops(LLAMA, 8192, 1.0)
    optimizer_s = LLAMA.n_parameters * 28 / MACHINE.hbm_Bps

    found = predict_step(LLAMA, replace(layout, recompute=Recompute.NONE), FLAT, net(1))

    # FLAT's rates are all 10^15; attention's backward pass has 5 products where the count has 4.
    more = flops.attention / 3 * 0.5
    assert found.step_s == pytest.approx((flops.total + more) / 1e15 + optimizer_s, rel=1e-9)
    assert found.exposed_s == pytest.approx(0, abs=1e-9)


def test_full_recomputation_adds_one_forward_pass_of_the_layers() -> None:
    once = predict_step(LLAMA, StepLayout(seq=8192, cp=1, recompute=Recompute.NONE), FLAT, net(1)).step_s
    again = predict_step(LLAMA, StepLayout(seq=8192, cp=1), FLAT, net(1)).step_s
    flops = step_flops(LLAMA, 8192, 1.0)

    assert again - once == pytest.approx((flops.layers + flops.attention) / 3 / 1e15, rel=1e-9)


def test_exposed_hops_of_a_ring_are_those_of_its_three_passes() -> None:
    layout = StepLayout(seq=65536, cp=4, carrier=Carrier.NVSHMEM)
    kv = 4 * 65536 / 4 * 2 * 8 * 128 * 2
    one, two = hop(net(4), layout, FLAT, kv).alone_s, hop(net(4), layout, FLAT, 2 * kv).alone_s
    work = step_work(LLAMA, layout, FLAT, net(4))

    found = simulated_s(replace(work, weights=NOTHING, gradients=NOTHING), 32, (MACHINE.nvlink_Bps, MACHINE.gpu_nic_Bps))

    # forward and again: 3 hops; backward: 4 of twice the bytes and one home
    assert found - computed_s(work, 32) == pytest.approx(32 * (2 * 3 * one + 4 * two + one), rel=1e-9)


def test_an_all_gather_by_heads_takes_as_many_gathers_and_less_memory() -> None:
    whole = StepLayout(seq=65536, cp=4, scheme=Scheme.ALL_GATHER)
    by_two = replace(whole, head_stride=2)
    kv = 4 * 65536 / 4 * 2 * 8 * 128 * 2
    here, group = net(4), net(4).group(4)
    ops = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    gather, reduce = (collective(here, op, 4 * kv / 4, group).alone_s for op in ops)
    work = step_work(LLAMA, by_two, FLAT, here)

    found = simulated_s(replace(work, weights=NOTHING, gradients=NOTHING), 32, (MACHINE.nvlink_Bps, MACHINE.gpu_nic_Bps))

    # forward, again and backward 4 gathers of 2 heads, backward 4 reductions
    assert found - computed_s(work, 32) == pytest.approx(32 * (3 * 4 * gather + 4 * reduce), rel=1e-9)
    assert computed_s(work, 32) == pytest.approx(computed_s(step_work(LLAMA, whole, FLAT, here), 32), rel=1e-12)
    memories = [step_memory(LLAMA, layout, MACHINE).kv for layout in (whole, by_two)]
    assert memories == [2 * 4 * kv, 2 * 2 * 4 * kv / 4]  # all, and two buffers of a quarter; each with gradients


def test_gathers_of_heads_run_beside_attention_where_hops_do() -> None:
    layout = StepLayout(seq=65536, cp=4, scheme=Scheme.ALL_GATHER, overlapped=True)

    whole, by_one = (predict_step(LLAMA, replace(layout, head_stride=stride), RATES, net(4)) for stride in (None, 1))

    assert by_one.exposed_s < 0.5 * whole.exposed_s


def test_pass_q_sends_queries_round_and_outputs_home() -> None:
    layout = StepLayout(seq=65536, cp=4, scheme=Scheme.PASS_Q, carrier=Carrier.NVSHMEM)
    q = 4 * 65536 / 4 * 32 * 128 * 2
    lse = q / 2 / 128 * 4
    here, group = net(4), net(4).group(4)
    out, back = (hop(here, layout, FLAT, n).alone_s for n in (q, 3 * q + lse))
    home, slopes = (collective(here, Collective.ALL_TO_ALL, 4 * n, group).alone_s for n in (q + lse, q))
    work = step_work(LLAMA, layout, FLAT, here)

    found = simulated_s(replace(work, weights=NOTHING, gradients=NOTHING), 32, (MACHINE.nvlink_Bps, MACHINE.gpu_nic_Bps))

    assert found - computed_s(work, 32) == pytest.approx(32 * (2 * (3 * out + home) + 3 * back + slopes), rel=1e-9)


def test_a_search_tries_pass_q_and_head_strides() -> None:
    found = list(layouts_of(LLAMA, StepLayout(seq=65536, cp=1), Wanted(cp=8, tp=1), net(8)))

    assert {layout.scheme for layout in found} == set(Scheme)
    assert {layout.head_stride for layout in found if layout.scheme is Scheme.ALL_GATHER} == {None, 1, 2, 4}
    assert {layout.carrier for layout in found if layout.scheme is Scheme.PASS_Q} == set(Carrier)


def test_a_hop_is_slower_by_nccl_than_by_puts_and_takes_sms() -> None:
    layout = StepLayout(seq=131072, cp=16)
    by_nccl = hop(net(16), layout, RATES, 2.0**25)
    by_put = hop(net(16), replace(layout, carrier=Carrier.NCCL_PUT), RATES, 2.0**25)

    assert by_nccl.alone_s > 5 * by_put.alone_s
    assert (by_nccl.n_sms > 0, by_put.n_sms) == (True, 0)


def test_puts_do_not_leave_an_nvlink_domain() -> None:
    wide = StepLayout(seq=2**20, cp=128)

    assert carriers(net(128), wide) == [Carrier.NCCL]
    with pytest.raises(InputError, match="one NVLink domain"):
        hop(net(128), replace(wide, carrier=Carrier.NVSHMEM), RATES, 1e6)


def test_overlap_hides_hops_of_copy_engines() -> None:
    layout = StepLayout(seq=131072, cp=16, carrier=Carrier.NVSHMEM)

    exposed = predict_step(LLAMA, layout, RATES, net(16))
    hidden = predict_step(LLAMA, replace(layout, overlapped=True), RATES, net(16))

    assert hidden.exposed_s < 0.1 * exposed.exposed_s
    assert hidden.compute_s == exposed.compute_s


def test_hidden_hops_of_nccl_slow_attention_by_the_sms_that_they_hold() -> None:
    layout = StepLayout(seq=131072, cp=16, overlapped=True)

    both = (Carrier.NCCL, Carrier.NVSHMEM)
    by_nccl, by_puts = (predict_step(LLAMA, replace(layout, carrier=each), RATES, net(16)) for each in both)
    hops_s = 32 * 46 * by_nccl.hop_s  # 15 hops forward, again, and 16 backward of twice the bytes: at least 46 hops a layer

    assert by_nccl.step_s - by_puts.step_s > 0.9 * 32 / 152 * hops_s


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seq": 65537}, "isn't divisible by 2 x cp"),
        ({"tp": 3}, "doesn't divide the 32 heads"),
        ({"tp": 16}, "8 KV heads"),
        ({"scheme": Scheme.ULYSSES, "ulysses": 16, "cp": 16}, "doesn't divide the 8 KV heads"),
        ({"scheme": Scheme.HYBRID, "ulysses": 1}, "doesn't go with ulysses"),
        ({"scheme": Scheme.ALL_GATHER, "carrier": Carrier.NVSHMEM}, "hops of a ring"),
        ({"head_stride": 2}, "scheme all-gather only; ring has none"),
        ({"scheme": Scheme.ALL_GATHER, "head_stride": 3}, "head stride 3 doesn't divide the 8 KV heads"),
        ({"batch": 0.01}, "share 0.08 sequences"),
        ({"batch": 0.3}, "share 2.4 sequences"),
        ({"seq": 2**63}, "at most 2.40 tokens"),
        ({"batch": 1e300}, "at most 2.40 tokens"),
        ({"batch": math.inf}, "above 0"),
        ({"cp": 0}, "from 1"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_layout(LLAMA, replace(StepLayout(seq=65536, cp=8), **change))


def test_memory_adds_up_by_hand() -> None:
    # 16 GPUs, one sequence of 128K on each: 131,072 tokens a GPU
    found = step_memory(LLAMA, StepLayout(seq=131072, cp=16), MACHINE)
    kept = 32 * 131072 * 4096 * 2
    layer = 131072 * (4 * 4096 + 2 * 4096 + 2048 + 3 * 14336) * 2

    assert found.optimizer == 8 * LLAMA.n_parameters / 16
    assert found.activations == kept + max(2 * layer, 131072 * 128256 * 6 / 8)
    assert found.kv == 4 * 131072 * 2048 * 2
    assert found.fits == (found.total <= 0.9 * 186e9)


def test_a_gathered_sequence_takes_more_memory_for_keys_and_values_than_a_ring() -> None:
    layout = StepLayout(seq=131072, cp=16)

    gathered = step_memory(LLAMA, replace(layout, scheme=Scheme.ALL_GATHER), MACHINE)

    assert gathered.kv == 8 * step_memory(LLAMA, layout, MACHINE).kv


def test_a_search_finds_what_predicting_every_layout_finds() -> None:
    asked = StepLayout(seq=65536, cp=1, batch=0.25)
    every = [predict_step(LLAMA, layout, RATES, net(16)) for layout in layouts_of(LLAMA, asked, Wanted(), net(16))]
    expected = sorted(p.step_s for p in every if p.memory.fits)

    found = search(LLAMA, asked, Wanted(), RATES, net(16), n_best=5)

    assert [p.step_s for p in found if p.memory.fits][:5] == expected[:5]
    assert len(found) < len(every)


def test_a_search_keeps_what_is_asked_for() -> None:
    wanted = Wanted(cp=8, tp=2, scheme=Scheme.RING, carrier=Carrier.NVSHMEM)

    (only,) = search(LLAMA, StepLayout(seq=65536, cp=1), wanted, RATES, net(32))

    assert (only.layout.cp, only.layout.tp, only.layout.fsdp) == (8, 2, 2)
    assert only.layout.carrier is Carrier.NVSHMEM


def test_what_does_not_fit_comes_after_what_does() -> None:
    found = search(LLAMA, StepLayout(seq=2**20, cp=1, batch=0.25), Wanted(), RATES, net(64))
    fits = [p.memory.fits for p in found]

    assert fits == sorted(fits, reverse=True)
    assert {True, False} <= set(fits)


def test_the_reason_names_what_the_best_beats() -> None:
    best, *others = search(LLAMA, StepLayout(seq=65536, cp=1, batch=0.25), Wanted(), RATES, net(16))

    assert re.search(r"% faster( .less than the model can tell apart.)? than cp", why(best, others))


@pytest.mark.parametrize(("wanted", "reason"), [
    (Wanted(cp=3), "must be 16"),
    (Wanted(cp=16, scheme=Scheme.ULYSSES), "KV heads"),
    (Wanted(cp=16, scheme=Scheme.RING, ulysses=4), "strategy ring, ulysses 4, which needs"),
    (Wanted(cp=1, ulysses=2), "and ulysses 2, which needs"),
    (Wanted(cp=8, tp=1, scheme=Scheme.ULYSSES, carrier=Carrier.NVSHMEM), "strategy ulysses has none"),
])
def test_a_search_without_a_layout_says_why(wanted: Wanted, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        search(LLAMA, StepLayout(seq=65536, cp=1), wanted, RATES, net(16))


def test_every_machine_with_rates_predicts_a_step() -> None:
    for name in rates_names():
        machine = load_machine(name)
        here = network(machine, default_calibration(name), 8)

        found = predict_step(LLAMA, StepLayout(seq=32768, cp=8), load_rates(name), here)

        assert 50 < found.tflops_per_gpu < load_rates(name).linear_Fps / 1e12


def test_rates_that_do_not_fit_are_refused_with_the_key(tmp_path) -> None:
    text = (
        'machine = "m"\nlibrary = "l"\nsms = { value = 132, source = "s" }\nlinear = { value = "fast", source = "s" }\n'
        '[attention]\n'
        'forward = { value = "1 TFLOP/s", source = "s" }\nbackward = { value = "1 TFLOP/s", source = "s" }\n'
        '[ring]\nforward_bytes = { value = 1.0, source = "s" }\nbackward_bytes = { value = 1.0, source = "s" }\n'
    )
    (tmp_path / "mine.toml").write_text(text)

    with pytest.raises(InputError, match=r"mine.toml: linear: .*'fast'"):
        load_rates(str(tmp_path / "mine.toml"))
    with pytest.raises(InputError, match="no rates of computation ship for machine 'cpu-processes'"):
        load_rates("cpu-processes")


def test_a_start_of_channels_that_is_no_time_is_refused_with_the_file_and_the_key(tmp_path) -> None:
    shipped = (files("shardroute.planner.backends") / "rates" / "gb200-nvl72.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(shipped.replace('"6.3 us"', '"soon"'))

    with pytest.raises(InputError, match=r"mine.toml: ring.channel_start: 'soon'"):
        load_rates(str(path))


def test_a_rate_without_a_source_is_refused(tmp_path) -> None:
    shipped = (files("shardroute.planner.backends") / "rates" / "dgx-b200.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(shipped.replace('"the same charts"', '""'))

    with pytest.raises(InputError, match=r"mine.toml: attention.backward: source is empty"):
        load_rates(str(path))


def test_a_sequence_that_one_rank_has_to_itself_is_not_called_a_ring() -> None:
    assert StepLayout(seq=1024, cp=1).scheme_text == "alone"
    assert StepLayout(seq=1024, cp=2).scheme_text == "ring"
