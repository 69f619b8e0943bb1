"""`shardroute plan-ring` and what works on its plans: check, show, simulate, run, compare."""

import json
import zipfile
from pathlib import Path

import pytest

from shardroute.planner.check import check
from shardroute.planner.plan_files import load_plan, mapped_plan, save_plan
from shardroute.planner.ring.strategies import RING_STRATEGIES, ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention
from shardroute.topologies import build_topology, load_machine
from shardroute.topologies.errors import PlanError

CALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--cp", "2", "--machine", "cpu-processes", "--dtype", "f32"]


def test_a_call_is_planned_proved_predicted_run_and_compared(cli, tmp_path) -> None:
    plan, predicted, measured = (str(tmp_path / name) for name in ("r.plan", "p.json", "m.json"))

    code, out, _ = cli("plan-ring", *CALL, "--seq", "256", "--pass", "recompute", "-o", plan, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["predicted_s"] >= report["computed_s"] > 0
    assert report["flops"] == 14 * 16 * 4 * 256 * 257 / 2
    assert cli("check", plan)[0] == cli("show", plan)[0] == 0

    code, out, _ = cli("simulate", plan, "-o", predicted, "--json")
    simulated = json.loads(out)
    assert code == 0
    assert simulated["predicted_s"] == pytest.approx(report["predicted_s"])
    assert 0 < simulated["overlap"]["both_s"] <= simulated["overlap"]["copying_s"]

    code, out, _ = cli("run", plan, "-o", measured, "--json")
    ran = json.loads(out)
    assert code == 0
    assert ran["verified"]["mismatches"] == 0
    assert "attention on one device in float64: largest difference" in ran["verified"]["against"]
    assert ran["overlap"]["computing_s"] > 0

    code, out, _ = cli("compare", predicted, measured)
    assert code == 0
    assert "attention on one device" in out


@pytest.mark.parametrize("strategy", RING_STRATEGIES)
def test_every_strategy_plans_a_model_on_a_gpu_machine(cli, strategy) -> None:
    arguments = ["--model", "llama-3-8b", "--seq", "8192", "--cp", "8", "--machine", "gb200-nvl72"]

    code, out, _ = cli("plan-ring", *arguments, "--strategy", strategy, "--json")

    report = json.loads(out)
    assert code == 0
    assert report["strategy"] == strategy
    assert report["predicted_s"] > 0
    assert report["not_predicted"] == ""


def test_puts_start_sooner_than_sends_so_a_ring_of_small_blocks_is_faster(cli) -> None:
    arguments = ["--model", "llama-3-8b", "--seq", "8192", "--cp", "8", "--machine", "gb200-nvl72", "--json"]

    seconds = [json.loads(cli("plan-ring", *arguments, "--backend", name)[1])["predicted_s"] for name in ("nccl", "nvshmem")]

    assert seconds[1] < seconds[0]


def test_packed_documents_are_padded_one_by_one(cli) -> None:
    code, out, _ = cli("plan-ring", *CALL, "--documents", "5,17,40", "--json")

    assert code == 0
    assert "3 packed documents of 62 tokens" in json.loads(out)["attention"]


def test_a_call_without_measured_costs_is_planned_and_says_what_is_lacking(cli) -> None:
    code, out, _ = cli("plan-ring", *CALL, "--seq", "256", "--dtype", "bf16")

    assert code == 0
    assert "has no costs attend_bf16, which attention takes on CPUs" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq", "250"], "250 tokens can't be cut into 2 x 2 equal parts"),
        (["--seq", "256", "--documents", "4"], "not both"),
        ([], "give --seq"),
        (["--documents", "4,x"], "expected those of each document"),
        (["--documents", "4,8", "--batch", "2"], "packed documents with batch 2"),
        (["--seq", "256", "--model", "llama-3-8b"], "leave out --heads"),
        (["--seq", "256", "--ulysses", "2"], "a Ulysses degree is for strategy hybrid only"),
        (["--seq", "256", "--strategy", "spiral"], "--strategy 'spiral' is not known"),
        (["--seq", "256", "--calibration", "nominal"], "has no nominal rates"),
        (["--seq", "256", "--backend", "nvshmem"], "backend nvshmem doesn't run on cpu-processes"),
        (["--seq", "256", "--batch", str(2**63)], f"--batch {2**63}: expected a count from 1 to {2**31}"),
        (["--seq", str(2**63)], "--seq: '9223372036854775808' is more than can be planned for; expected at most 2^40 tokens"),
        (["--seq", "256", "--backend", "gloo"], "backend 'gloo' is not known; expected one of nccl, nccl-put, nvshmem"),
    ],
)
def test_a_mistake_ends_in_words_and_exit_code_2(cli, arguments, message) -> None:
    code, _, err = cli("plan-ring", *CALL, *arguments)

    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--cp", "4096"], ["--heads", "1000000", "--strategy", "all-gather"]])
def test_a_call_of_more_steps_than_can_be_planned_is_refused_at_once(cli, arguments) -> None:
    size = ["--machine", "gb200-nvl72", "--cp", "4", "--heads", "8", "--head-dim", "64", "--seq", "1048576"]

    code, _, err = cli("plan-ring", *size, *arguments)

    assert code == 2
    assert "blocks of attention, and a plan of one call at most 262144" in " ".join(err.split())


def test_heads_must_come_from_somewhere(cli) -> None:
    code, _, err = cli("plan-ring", "--cp", "2", "--seq", "64", "--machine", "cpu-processes")

    assert code == 2
    assert "give --model, or --heads with --head-dim" in err


class TestFiles:
    """A plan of an attention call on disk."""

    def saved(self, folder: Path) -> Path:
        topology = build_topology(load_machine("cpu-processes"), min_gpus=4)
        call = Attention((5, 17, 40), 4, 8, 2, 4, packed=True, dtype="f32")
        save_plan(ring_plan(call, topology, "ring", Pass.RECOMPUTE), folder / "r.plan")
        return folder / "r.plan"

    def test_it_comes_back_whole_with_the_same_digest(self, tmp_path) -> None:
        path = self.saved(tmp_path)

        plan = load_plan(path)

        assert plan.attention == Attention((5, 17, 40), 4, 8, 2, 4, packed=True, dtype="f32")
        assert check(plan).n_deliveries > 0
        with mapped_plan(path) as record:
            assert record.digest == plan.digest

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda head: head["attention"].update(n_kv_heads=3), "every KV head must serve equally many"),
            (lambda head: head["attention"].update(head_dim=8), r"tensor q of shape .* is none of the attention call's"),
            (lambda head: head["attention"].update(layout="striped"), "is none of the attention call's"),
            (lambda head: head["tensors"][0].update(name="x"), "tensor x of shape .* is none of the attention call's"),
            (lambda head: head.pop("attention"), "only for an attention call, and has none"),
            (lambda head: head["attention"].update(colour=1), "unknown field `colour`"),
        ],
    )
    def test_a_header_that_contradicts_the_steps_is_refused(self, tmp_path, change, message) -> None:
        path, damaged = self.saved(tmp_path), tmp_path / "damaged.plan"
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(damaged, "w") as new:
            for name in old.namelist():
                data = old.read(name)
                if name == "header.json":
                    head = json.loads(data)
                    change(head)
                    data = json.dumps(head).encode()
                new.writestr(name, data)

        with pytest.raises(PlanError, match=message):
            check(load_plan(damaged))
