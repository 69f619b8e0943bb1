"""`study`: a row is what `plan` or `ring` predicts, a stand-in what a config with as many experts gives, a page says the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages_in_browsers import CHROMIUM, Page, in_browser

from shardroute.planner import load_model, make_plan, parse_spec, predict
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.cli.requests import Asked
from shardroute.planner.cli.study import STUDIES, repeated
from shardroute.planner.layouts import lay_out
from shardroute.planner.layouts.holdings import totals
from shardroute.planner.layouts.models import catalogue
from shardroute.planner.machine_changes import with_domains, with_nics
from shardroute.planner.reporting.charts import lines
from shardroute.planner.routing.auto import choose
from shardroute.planner.steps import Carrier, StepLayout, dense_model, load_rates, network, predict_step
from shardroute.planner.studies import (
    Case,
    RefitRow,
    count_text,
    estimate,
    ring_rows,
    split_row,
    splits_of,
    studied_model,
    study_rows,
    widened,
    with_experts,
)
from shardroute.planner.studies.sizes import OFF, parameter_count
from shardroute.planner.studies.splits import Split
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import InputError

H100, COSTS = load_machine("dgx-h100"), default_calibration("dgx-h100")
REFIT = ["--model", "qwen3-0.6b", "--scale", "256", "--from", "TP8", "--to", "TP4 x DP2"]
GPUS = ["--machine", "dgx-h100"]
ASKED = Asked(model="qwen3-0.6b", scale=256, from_spec="TP8", to_spec="TP4")


def test_other_nics_are_all_that_changes_and_carry_what_was_asked() -> None:
    changed = with_nics(load_machine("gb200-nvl72"), 123e9)

    assert changed.gpu_nic_Bps == 123e9
    assert changed.gpus_per_domain == 72


@pytest.mark.parametrize(("n_gpus", "hosts"), [(8, 1), (36, 9), (72, 9), (1, 1), (5, 5)])
def test_a_domain_of_another_size_is_of_whole_hosts_where_it_can(n_gpus: int, hosts: int) -> None:
    changed = with_domains(H100, n_gpus)

    assert (changed.gpus_per_domain, changed.hosts_per_domain) == (n_gpus, hosts)
    assert changed.gpu_nic_Bps == H100.gpu_nic_Bps


def test_a_domain_of_no_gpus_is_refused() -> None:
    with pytest.raises(InputError, match="domain of 0 GPUs: expected 1 or more"):
        with_domains(H100, 0)


def test_a_row_is_what_plan_and_predict_say() -> None:
    problem = ASKED.request().problem
    topology = build_topology(with_nics(H100, 25e9), None, problem.n_ranks)
    expected = predict(make_plan(problem, topology, "direct"), COSTS).predicted_s

    (row,) = study_rows([Case("slow", 25e9, lambda _done: (problem, topology))], ["direct"], COSTS)

    assert row.predicted_s == expected
    assert (row.name, row.value, row.strategy, row.planned_by) == ("slow", 25e9, "direct", "direct")
    assert (row.n_src_gpus, row.n_dst_gpus) == (8, 4)


def test_auto_keeps_its_name_and_says_what_it_chose() -> None:
    problem = tensor_problem("64,64", "bf16", "x=2", "S0", "y=2", "S1")
    topology = build_topology(H100, None, problem.n_ranks)
    chosen = choose(problem, topology, COSTS)

    (row,) = study_rows([Case("a", 1, lambda _done: (problem, topology))], ["auto"], COSTS)

    assert (row.strategy, row.planned_by) == ("auto", chosen.plan.strategy)
    assert row.predicted_s == chosen.prediction.predicted_s


def test_a_case_without_a_plan_says_why_and_the_others_go_on() -> None:
    problem = ASKED.request().problem
    topology = build_topology(H100, None, problem.n_ranks)

    def fail(_done):
        raise InputError("no such layout")

    rows = study_rows([Case("a", 1, fail), Case("b", 2, lambda _done: (problem, topology))], ["direct", "greedy"], COSTS)

    assert [row.why_not for row in rows] == ["no such layout", "no such layout", "", ""]
    assert [row.predicted_s is None for row in rows] == [True, True, False, False]
    with pytest.raises(InputError, match="no such layout"):
        study_rows([Case("a", 1, fail)], ["direct"], COSTS)


def test_weights_beyond_a_gpus_memory_do_not_fit() -> None:
    problem = ASKED.request().problem
    held = [totals(problem.tensors, side).n_bytes.max() for side in (problem.source, problem.target)]
    small = replace(H100, memory_bytes=int(held[1]) - 1, figures=())
    enough = replace(small, memory_bytes=int(held[1]))

    def case(machine):
        return Case("a", 1, lambda _done: (problem, build_topology(machine, None, problem.n_ranks)))

    rows = study_rows([case(small), case(enough)], ["direct"], COSTS)

    assert [(row.src_bytes_per_gpu, row.dst_bytes_per_gpu) for row in rows] == [tuple(held)] * 2
    assert held[0] < held[1]
    assert [row.fits for row in rows] == [False, True]


def test_twice_the_nics_halve_the_bound_and_leave_the_bytes(cli) -> None:
    _, out, _ = cli("study", "refit-vs-nic", *REFIT, *GPUS, "-s", "domain-relay", "--rates", "100Gb/s,200Gb/s", "--json")

    slow, fast = json.loads(out)["rows"]
    assert slow["lower_bound_s"] == pytest.approx(2 * fast["lower_bound_s"], rel=0.01)  # but for the latency of one message
    assert slow["n_bytes_cross_domain"] == fast["n_bytes_cross_domain"]
    assert slow["predicted_s"] > fast["predicted_s"]


def test_a_domain_that_holds_all_gpus_leaves_nothing_to_cross(cli) -> None:
    _, out, _ = cli("study", "refit-vs-domain", *REFIT, *GPUS, "-s", "domain-relay", "--domains", "8,16", "--json")

    eight, sixteen = json.loads(out)["rows"]
    assert eight["n_bytes_cross_domain"] > 0
    assert sixteen["n_bytes_cross_domain"] == 0
    assert (eight["name"], sixteen["name"]) == ("NVL8", "NVL16")


def test_each_replica_in_a_domain_of_its_own_takes_the_weights_in_once(cli) -> None:
    refit = ["--model", "qwen3-0.6b", "--scale", "256", "--from", "TP8", "--to", "TP8"]
    _, out, _ = cli("study", "refit-vs-replicas", *refit, *GPUS, "-s", "domain-relay", "--replicas", "1,3", "--json")

    one, three = json.loads(out)["rows"]
    assert three["n_bytes_cross_domain"] == 3 * one["n_bytes_cross_domain"]
    assert (one["n_dst_gpus"], three["n_dst_gpus"]) == (8, 24)


def test_replicas_of_two_groups_are_those_two_again_and_again() -> None:
    asked = repeated(Asked(model="m", to_spec="TP8 + TP4", to_convention="vllm + sglang"), 2)

    assert asked.to_spec == "TP8 + TP4 + TP8 + TP4"
    assert asked.to_convention == "vllm + sglang + vllm + sglang"
    assert repeated(Asked(model="m", to_spec="TP8", to_convention="sglang"), 3).to_convention == "sglang"


EXPERT_KEYS = {
    "kimi-k2": "n_routed_experts", "qwen3-30b-a3b": "num_experts", "gpt-oss-120b": "num_local_experts",
    "mixtral-8x7b": "num_local_experts", "glm-4.5-air": "n_routed_experts",
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERT_KEYS)
def test_other_numbers_of_experts_are_what_a_config_that_says_so_gives(name: str, tmp_path) -> None:
    folder = Path(catalogue.__file__).parent / "configs" / name
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, EXPERT_KEYS[name]: 24}))
    expected = load_model(str(tmp_path))

    found = with_experts(load_model(name), 24)

    assert found.tensors == expected.tensors
    assert [p.role for p in found.parameters] == [p.role for p in expected.parameters]
    assert found.n_experts == expected.n_experts == 24


@pytest.mark.parametrize(("size", "title", "count"), [("kimi-k3", "Kimi K3", 2.8e12), ("Qwen-3.8", "Qwen 3.8", 2.4e12)])
def test_models_known_by_their_count_are_stood_in_for_and_the_note_says_by_what(size: str, title: str, count: float) -> None:
    found = studied_model(size, None, load_model, step=32)

    assert found.asked == count
    assert found.model.n_parameters == found.met == pytest.approx(count, rel=OFF)
    assert found.model.n_experts % 32 == 0
    assert title in found.name
    assert f"{title} is known here by its number of parameters alone" in found.note
    assert f"kimi-k2 with {found.model.n_experts:,} experts a layer instead of 384" in found.note


def test_a_shipped_model_is_itself_and_needs_no_note() -> None:
    found = studied_model("qwen3-30b-a3b", None, load_model)

    assert (found.name, found.note) == ("qwen3-30b-a3b", "")
    assert found.model.tensors == load_model("qwen3-30b-a3b").tensors


def test_a_count_is_of_the_whole_model_where_it_is_scaled_down() -> None:
    found = studied_model("60B", "qwen3-30b-a3b", lambda name: load_model(name, 256))

    whole = with_experts(load_model("qwen3-30b-a3b"), found.model.n_experts)
    assert whole.n_parameters == found.met == pytest.approx(60e9, rel=0.01)
    assert found.model.scale == 256


@pytest.mark.parametrize(
    ("size", "step", "name"), [("2.8T", 1, "kimi-k2"), ("60B", 1, "mixtral-8x7b"), ("60B", 8, "glm-4.5-air")]
)
def test_a_count_is_made_of_the_nearest_model_that_can_meet_it(size: str, step: int, name: str) -> None:
    found = studied_model(size, None, load_model, step)

    assert f"stands {name} with" in found.note
    assert found.met == pytest.approx(parameter_count(size), rel=OFF)


@pytest.mark.parametrize(("size", "base", "words"), [
    ("2T", "llama-3-8b", "llama-3-8b has no experts"),
    ("1B", "kimi-k2", "comes nearest with 1 experts a layer, 14"),
    ("1M", None, "no shipped model comes within 5%"),
    ("2.8X", None, "model '2.8X' is unknown"),
])  # fmt: skip
def test_a_size_that_cannot_be_met_is_refused_in_words(size: str, base: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        studied_model(size, base, load_model)


@given(st.floats(1e6, 9e15))
def test_a_count_as_text_reads_back_to_three_digits(count: float) -> None:
    assert parameter_count(count_text(count)) == pytest.approx(count, rel=0.006)


def test_two_phases_of_2_8_and_2_4_trillion_parameters_are_11_2_and_9_6_tb() -> None:
    kimi, qwen = estimate("k", 2.8e12, 2), estimate("q", 2.4e12, 2)

    assert (kimi.gather_bytes, kimi.broadcast_bytes) == (5_600_000_000_000, 5_600_000_000_000)
    assert (kimi.two_phase_bytes, kimi.reshard_bytes) == (11_200_000_000_000, 5_600_000_000_000)
    assert (qwen.two_phase_bytes, qwen.reshard_bytes) == (9_600_000_000_000, 4_800_000_000_000)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40), st.integers(2, 9))
def test_splits_use_whole_layouts_and_leave_less_than_a_replica(n_gpus: int, n_train: int, n_infer: int, most: int) -> None:
    possible = [k for k in range(1, n_gpus + 1) if k * n_train + n_infer <= n_gpus]
    if not possible:
        with pytest.raises(InputError, match=f"give {n_train + n_infer} GPUs or more"):
            splits_of(n_gpus, n_train, n_infer, most)
        return

    found = splits_of(n_gpus, n_train, n_infer, most)

    assert [split.times for split in found] == sorted({split.times for split in found})
    assert {found[0].times, found[-1].times} == {possible[0], possible[-1]}
    assert len(found) == min(len(possible), most)
    for split in found:
        assert split.n_train == split.times * n_train
        assert split.n_infer == split.replicas * n_infer
        assert split.n_train + split.n_infer + split.idle == n_gpus
        assert 0 <= split.idle < n_infer


@pytest.mark.parametrize(("convention", "spec"), [
    ("megatron", "TP2 x PP2 x EP4"), ("megatron", "TP2 x PP4 x DP2"), ("megatron", "TP4"), ("fsdp", "FSDP8"),
    ("fsdp", "HSDP2x4 x TP2"), ("megatron", "TP2 x EP4 order=tp-cp-ep-dp-pp"),
])  # fmt: skip
def test_a_wider_layout_takes_as_many_times_the_gpus(convention: str, spec: str) -> None:
    model = load_model("qwen3-30b-a3b", 256)
    parsed = parse_spec(spec)
    n_ranks = lay_out(convention, model, parsed).n_ranks

    wide = widened(parsed, n_ranks, 3)

    assert lay_out(convention, model, parse_spec(str(wide))).n_ranks == 3 * n_ranks
    assert widened(parsed, n_ranks, 1) == parsed


def test_a_step_of_learning_is_in_turn_or_overlapped() -> None:
    refit = RefitRow(name="a", value=1, strategy="direct", predicted_s=0.5)

    row = split_row(Split(16, 48, 1, 6, 0), "TP16", refit, 160.0, 96.0)

    assert (row.train_s, row.rollout_s) == (10.0, 2.0)
    assert (row.in_turn_s, row.overlapped_s) == (12.5, 10.5)
    assert split_row(Split(16, 48, 1, 6, 0), "TP16", refit, None, None).in_turn_s is None


def test_a_ring_row_is_what_ring_predicts_and_its_gain_is_over_nccl() -> None:
    machine = load_machine("gb200-nvl72")
    model, rates = dense_model(load_model("llama-3-8b")), load_rates("gb200-nvl72")
    net = network(machine, default_calibration("gb200-nvl72"), 4)
    layout = StepLayout(seq=1, cp=4)

    nccl, puts = ring_rows(model, layout, [65536], [Carrier.NCCL, Carrier.NVSHMEM], rates, net)

    expected = predict_step(model, StepLayout(seq=65536, cp=4, carrier=Carrier.NVSHMEM), rates, net)
    assert (puts.step_s, puts.tflops_per_gpu) == (expected.step_s, expected.tflops_per_gpu)
    assert nccl.gain is None
    assert puts.gain == nccl.step_s / puts.step_s - 1


def test_a_ring_that_a_carrier_cannot_span_says_so_beside_the_others() -> None:
    model, rates = dense_model(load_model("llama-3-8b")), load_rates("dgx-h100")
    net = network(H100, COSTS, 16)

    nccl, puts = ring_rows(model, StepLayout(seq=1, cp=16), [65536], [Carrier.NCCL, Carrier.NVSHMEM], rates, net)

    assert nccl.step_s is not None
    assert (puts.step_s, puts.gain) == (None, None)
    assert "one NVLink domain only" in puts.why_not
    with pytest.raises(InputError, match="isn't divisible by 2 x cp"):
        ring_rows(model, StepLayout(seq=1, cp=16), [1001], [Carrier.NCCL], rates, net)


@given(st.lists(st.floats(1e-7, 1e5), min_size=1, max_size=6))
def test_the_axis_of_times_reaches_round_every_point(times: list[float]) -> None:
    chart = lines([{"x": float(i + 1), "s": s, "series": "a"} for i, s in enumerate(times)], [(1.0, "1")], "x")

    drawn = [row["s"] for row in chart["data"]["values"]]
    low, high = chart["encoding"]["y"]["scale"]["domain"]
    assert low <= min(drawn) <= max(drawn) <= high
    assert low < high


SMALL = {
    "refit-vs-nic": [*REFIT, *GPUS, "-s", "direct"],
    "refit-vs-domain": [*REFIT, *GPUS, "-s", "domain-relay"],
    "refit-vs-replicas": [*REFIT, *GPUS, "-s", "direct", "--replicas", "1,2"],
    "refit-vs-size": [
        "--from", "TP2 x EP2", "--to", "TP2", "--scale", "256", "--sizes", "qwen3-30b-a3b,60B,llama-3-8b", *GPUS,
        "-s", "domain-relay",
    ],
    "gather-vs-reshard": ["--sizes", "kimi-k3,qwen-3.8"],
    "ring-vs-seq": ["--model", "llama-3-8b", "--cp", "4", "--seqs", "65536,131072", *GPUS],
    "split": [*REFIT, *GPUS, "-s", "direct", "--gpus", "30", "--train-gpu-s", "100", "--rollout-gpu-s", "300"],
}  # fmt: skip


def test_every_study_that_is_listed_is_tried_here(cli) -> None:
    code, out, _ = cli("study")

    assert code == 0
    assert all(name in out for name in STUDIES)
    assert set(SMALL) == set(STUDIES)


@pytest.mark.parametrize("name", SMALL)
def test_a_study_fits_80_columns_with_every_word_whole(cli, monkeypatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    code, out, err = cli("study", name, *SMALL[name])

    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    named = [word for word in ("direct", "domain-relay") if word in SMALL[name]]
    assert all(word in out for word in [*named, "Costs are" if name != "gather-vs-reshard" else "Kimi K3, 2.8T"])


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of a split with its step of learning, and its JSON beside it."""
    pytest.importorskip("vl_convert", reason="charts need the extra `report`")
    folder = tmp_path_factory.mktemp("studies")
    return folder / "study.html"


def written(cli, page: Path) -> dict:
    _, out, err = cli("study", "split", *SMALL["split"], "-o", str(page), "--json")
    assert "page written to" in err
    return json.loads(out)


def test_the_page_is_whole_loads_nothing_and_has_the_numbers_of_json(cli, page) -> None:
    study = written(cli, page)

    text = page.read_text()
    read = Page(text)
    assert read.open == []
    assert read.scripts == 0
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)
    assert "https://" not in text
    for row in study["rows"]:
        for value in (row["refit"]["predicted_s"], row["in_turn_s"], row["overlapped_s"], row["n_idle_gpus"]):
            assert f'data-value="{value!r}"' in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_opens_the_page_of_a_study_on_a_phones_width_and_in_the_dark(cli, page, tmp_path) -> None:
    written(cli, page)

    found = in_browser(str(page), tmp_path, 390, "--blink-settings=preferredColorScheme=0")

    assert len(found["svgs"]) == 2
    assert all(found["summaries"] + found["links"] + found["regions"] + found["tables"] + found["svgs"])
    assert found["widest"] <= 390
    assert found["paper"] == "rgb(20, 23, 27)"


BAD = {
    "no such study": (["refit-vs-moon"], "No such command 'refit-vs-moon'"),
    "a rate without a unit": (["refit-vs-nic", *REFIT, *GPUS, "--rates", "200"], "--rates '200'"),
    "a rate of nothing": (["refit-vs-nic", *REFIT, *GPUS, "--rates", "0Gb/s"], "expected rates above 0"),
    "a domain of nothing": (["refit-vs-domain", *REFIT, *GPUS, "--domains", "0,8"], "expected 1 to 1,048,576"),
    "a list of nothing": (["refit-vs-replicas", *REFIT, *GPUS, "--replicas", ","], "expected a list such as --replicas 1,2,4,8"),
    "a tensor for replicas": (["refit-vs-replicas", *GPUS, "--shape", "8,8"], "this study is of models"),
    "no layouts": (["refit-vs-size", *GPUS, "--sizes", "kimi-k2"], "needs both layouts"),
    "an unknown size": (["refit-vs-size", *GPUS, "--from", "EP8", "--to", "TP8", "--sizes", "kimi-4"], "'kimi-4' is unknown"),
    "layouts without a machine": (["gather-vs-reshard", "--from", "EP8", "--to", "TP8"], "--from is for plans"),
    "a sparse model": (["ring-vs-seq", "--model", "kimi-k2", "--cp", "4", *GPUS], "experts"),
    "a length that is no number": (["ring-vs-seq", "--model", "llama-3-8b", "--cp", "4", *GPUS, "--seqs", "64x"], "'64x'"),
    "too few GPUs to split": (["split", *REFIT, *GPUS, "--gpus", "9"], "give 16 GPUs or more"),
    "training without rollouts": (["split", *REFIT, *GPUS, "--gpus", "30", "--train-gpu-s", "5"], "go together"),
    "a machine of processes": (["refit-vs-nic", *REFIT, "--machine", "cpu-processes"], "has no GPUs"),
    "machines of two kinds": (["refit-vs-nic", *REFIT, "--machine", "dgx-h100 x 1 + dgx-b200"], "one kind of machine"),
    "too few machines": (["refit-vs-nic", *REFIT, "--machine", "dgx-h100 x 1"], "--machine has 8"),
    "an unknown strategy": (["refit-vs-nic", *REFIT, *GPUS, "-s", "fastest"], "strategy 'fastest' is not known"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_ends_with_2_and_says_what_is_wrong(cli, fault: str) -> None:
    arguments, words = BAD[fault]

    code, out, err = cli("study", *arguments)

    assert code == 2
    assert words in " ".join(err.split())
    assert out == ""
