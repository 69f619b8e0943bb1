"""What comes before a plan, and plans of attention, tell shares of time; commands show them from their first second on."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardroute.planner.backends.computes import works_of
from shardroute.planner.choice import hlo
from shardroute.planner.cli import output
from shardroute.planner.cli.output import Speech, print_table, speak
from shardroute.planner.exchange import Inventory, checkpoint_metadata, save_layout
from shardroute.planner.exchange.read import read_inventory, reading_us
from shardroute.planner.layouts import CONVENTIONS, lay_out, load_model, parse_spec
from shardroute.planner.plan_files import save_plan
from shardroute.planner.refits import groups_problem, refit_problem
from shardroute.planner.ring.reports import ring_report
from shardroute.planner.ring.strategies import RING_STRATEGIES, ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.routing.strategies import effort
from shardroute.planner.shares import Told
from shardroute.planner.simulator.refit import predict
from shardroute.planner.studies import Case, study_rows
from shardroute.topologies import build_topology, default_calibration, load_machine

DATA = Path(__file__).parent / "data"
COSTS = default_calibration("dgx-h100")
GPUS = build_topology(load_machine("dgx-h100"), min_gpus=16)
CALL = Attention((1024,), 8, 16, 8, 32)
REFIT = ("--model", "qwen3-0.6b", "--scale", "256", "--from", "TP2", "--to", "TP4", "--machine", "dgx-h100")


def shares_of(work: Callable[[Told], object], least: int) -> list[float]:
    """What the work tells: shares that never fall and end at 1, at least so many of them between."""
    told: list[float] = []

    work(told.append)

    assert told == sorted(told)
    assert 0 <= told[0] <= told[-1] == pytest.approx(1.0)
    assert len({share for share in told if 0 < share < 1}) >= least
    return told


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_laying_out_tells_its_share_of_fragments(convention: str) -> None:
    spec = {"fsdp": "FSDP4", "huggingface": "PP2 x DP2"}.get(convention, "TP2 x DP2")
    model = load_model("qwen3-30b-a3b", 64)

    shares_of(lambda done: lay_out(convention, model, parse_spec(spec), progress=done), least=8)


def test_groups_of_one_size_take_equal_shares_of_laying_out() -> None:
    model, one = load_model("qwen3-0.6b", 256), parse_spec("TP4")

    told = shares_of(lambda done: groups_problem(model, one, [one] * 3, progress=done), least=30)

    laid_out = told[next(i for i, share in enumerate(told) if share == told[i + 1])]  # the source ends, and says so once more
    assert laid_out == pytest.approx(max(told[:-1]) / 4, rel=0.35)
    assert refit_problem(model, one, one)[0].n_ranks == 8


@pytest.mark.parametrize("what", Pass)
@pytest.mark.parametrize("strategy", RING_STRATEGIES)
def test_every_strategy_of_attention_tells_a_share_of_planning(strategy: str, what: Pass) -> None:
    shares_of(lambda done: ring_plan(CALL, GPUS, strategy, what, progress=done), least=8)


def test_rings_tell_the_share_of_blocks_after_every_round() -> None:
    told: list[float] = []

    ring_plan(Attention((4096,), 16, 16, 8, 32), GPUS, "ring", progress=told.append)

    # 16 shares of what is needed, then those of 16 rounds of 16 blocks, which in a zigzag are all needed.
    rounds = told[15:32]
    assert np.diff(rounds) == pytest.approx(np.full(16, rounds[1] - rounds[0]))
    assert rounds[1] > rounds[0]


def test_what_attention_takes_is_told_while_it_is_worked_out() -> None:
    plan = ring_plan(Attention((4096,), 16, 16, 8, 32), GPUS, "ring", Pass.RECOMPUTE)

    told: list[float] = []
    works_of(plan, told.append)

    assert len(plan.computes) > 500
    assert len(told) >= len(plan.computes) // 100
    assert told == sorted(told)
    shares_of(lambda done: predict(plan, COSTS, progress=done), least=8)
    shares_of(lambda done: ring_report(plan, COSTS, progress=done), least=12)


def test_reading_and_writing_a_layout_file_tell_shares(tmp_path) -> None:
    model = load_model("qwen3-0.6b", 256)
    inventory = Inventory(model.tensors, lay_out("vllm", model, parse_spec("TP4")).layout)

    shares_of(lambda done: save_layout(inventory, tmp_path / "a.json", done), least=5)
    shares_of(lambda done: read_inventory(tmp_path / "a.json", done), least=20)

    assert read_inventory(tmp_path / "a.json") == inventory
    assert (reading_us(tmp_path / "a.json") or 0.0) > 0.0
    assert reading_us(tmp_path) is reading_us(tmp_path / "missing.json") is None


def test_reading_a_checkpoint_of_safetensors_tells_the_share_of_its_tensors(tmp_path) -> None:
    names = {"a": ["x"], "b": ["y", "z", "w"]}
    for file, tensors in names.items():
        entries = {name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]} for i, name in enumerate(tensors)}
        text = json.dumps(entries).encode()
        (tmp_path / f"{file}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    weight_map = {name: f"{file}.safetensors" for file, tensors in names.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    first, second, last = shares_of(lambda done: read_inventory(tmp_path, done), least=2)

    assert first == pytest.approx(second / 4)
    assert last == 1.0


class Metadata:
    """What torch's class of this name has of a checkpoint."""

    def __init__(self, n_tensors: int) -> None:
        self.state_dict_metadata = {f"w{i}": TensorStorageMetadata() for i in range(n_tensors)}
        self.storage_data = {MetadataIndex(f"w{i}"): _StorageInfo() for i in range(n_tensors)}


class TensorStorageMetadata:
    """The same of a tensor."""

    def __init__(self) -> None:
        self.properties, self.size, self.chunks = TensorProperties(), (4,), [ChunkStorageMetadata()]


class TensorProperties:
    """The same of what its elements are."""

    def __init__(self) -> None:
        self.dtype = "bf16"


class ChunkStorageMetadata:
    """The same of a box of it."""

    def __init__(self) -> None:
        self.offsets, self.sizes = (0,), (4,)


class MetadataIndex:
    """The same of the name of a box."""

    def __init__(self, fqn: str) -> None:
        self.fqn, self.offset = fqn, (0,)


class _StorageInfo:
    """The same of where it lies."""

    def __init__(self) -> None:
        self.relative_path = "__0_0.distcp"


def test_reading_the_metadata_of_a_checkpoint_tells_the_share_of_its_bytes(tmp_path, monkeypatch) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(10)))
    monkeypatch.setattr(checkpoint_metadata, "_INSTRUCTIONS", 10)

    shares_of(lambda done: read_inventory(tmp_path, done), least=20)

    assert len(read_inventory(tmp_path).tensors) == 10


def test_reading_an_hlo_text_tells_the_share_of_its_lines(monkeypatch) -> None:
    monkeypatch.setattr(hlo, "_LINES", 1)
    path = str(DATA / "hlo" / "mixed.txt")

    told = shares_of(lambda done: hlo.read_hlo(path, progress=done), least=5)

    assert len(told) == len(Path(path).read_text().splitlines())


def test_a_study_tells_the_share_of_making_a_case_and_weighs_strategies_by_what_they_take() -> None:
    problem, _ = refit_problem(load_model("qwen3-0.6b", 256), parse_spec("TP2"), parse_spec("TP4"))
    told: list[float] = []

    def make(done: Told):
        done(0.5)
        told.append(-1.0)
        return problem, GPUS

    study_rows([Case("a", 1.0, make)], ["gather-broadcast", "greedy"], COSTS, progress=told.append)

    made = told.index(-1.0)
    assert 0 < told[made - 1] < told[made + 1]  # half of what making takes, and all of it
    between = told[made + 1] + (1 - told[made + 1]) * effort("gather-broadcast") / (effort("gather-broadcast") + effort("greedy"))
    assert any(share == pytest.approx(between) for share in told)
    assert effort("gather-broadcast") < effort("greedy") < effort("auto")


def bars(err: str) -> list[str]:
    """The bars that a command showed, by what --verbose says of them."""
    return [line.rpartition(": ")[0] for line in err.splitlines() if line.rpartition(": ")[2].endswith((" s", " ms", " us"))]


def test_strategies_are_compared_under_one_bar(cli) -> None:
    code, _, err = cli("strategies", *REFIT, "--machine", "gb200-nvl72", "-s", "direct", "-s", "greedy", "-v")

    assert code == 0
    assert [bar for bar in bars(err) if bar.startswith("planning")] == ["planning by 2 strategies"]


@pytest.mark.parametrize(
    ("command", "bar"),
    [
        (("bound", *REFIT), "laying out"),
        (("layout", "--model", "qwen3-0.6b", "--spec", "TP2", "--scale", "256"), "laying out"),
        (("choose", "--hlo", str(DATA / "hlo" / "mixed.txt"), "--machine", "dgx-h100"), "choosing"),
        (("choose", "--hlo", str(DATA / "hlo" / "mixed.txt"), "--machine", "dgx-h100"), "reading mixed.txt"),
        (("machines", "import", str(DATA / "clusters" / "dgx-h100.xml")), "reading dumps"),
        (("machines", "import", "--nvidia-smi", str(DATA / "clusters" / "dgx-h100-topo.txt")), "reading dgx-h100-topo.txt"),
        (("check", "--from-json", "a.json", "--to-json", "a.json"), "reading a.json"),
        (("layout", "--from-json", "a.json", "-o", "b.json"), "writing b.json"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_command_shows_what_it_does_before_it_plans(cli, tmp_path, monkeypatch, command: tuple[str, ...], bar: str) -> None:
    monkeypatch.chdir(tmp_path)
    model = load_model("qwen3-0.6b", 256)
    save_layout(Inventory(model.tensors, lay_out("vllm", model, parse_spec("TP2")).layout), "a.json")

    code, _, err = cli(*command, "-v")

    assert code == 0
    assert bar in [shown.replace(f"{DATA}/hlo/", "").replace(f"{DATA}/clusters/", "") for shown in bars(err)]


def test_explaining_a_plan_of_attention_tells_the_share_of_planning_others(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(ring_plan(CALL, GPUS, "ring"), "r.plan")
    monkeypatch.setattr(output, "_LINE_S", 0.0)

    code, _, err = cli("explain", "r.plan", "--strategy", "pass-q")

    assert code == 0
    planned = [line for line in err.splitlines() if line.startswith("planning by other strategies")]
    assert any(0 < int(line.partition(": ")[2].partition("%")[0]) < 42 for line in planned)  # while it plans, not only predicts


def test_a_long_table_is_laid_out_under_a_bar_and_reads_as_ever(capsys, monkeypatch) -> None:
    rows = [[f"row {i}", str(i)] for i in range(40)]
    print_table(["name", "n"], rows, right=["n"], title="Rows")
    plain = capsys.readouterr().out
    monkeypatch.setattr(output, "_MANY_ROWS", 10)

    speak(Speech.VERBOSE)
    try:
        print_table(["name", "n"], rows, right=["n"], title="Rows")
    finally:
        speak(Speech.PLAIN)

    out, err = capsys.readouterr()
    assert out == plain
    assert bars(err) == ["laying out a table"]
