"""An error about the value of an option names the option as it was typed, with what was found and what is expected."""

import json
from pathlib import Path

import pytest
from test_cli import TENSOR

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.cli.options import about, check_output
from shardroute.planner.plan_files import save_plan
from shardroute.planner.plans import Plan
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.timelines import save_timeline
from shardroute.topologies import default_calibration
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

XML = str(Path(__file__).parent / "data" / "clusters" / "dgx-h100.xml")
MODEL = ["--model", "qwen3-0.6b", "--from", "TP2", "--to", "TP4", "-m", "dgx-h100"]
PLAN = ["plan", *TENSOR, "-m", "dgx-h100"]
RING = ["plan-ring", "--cp", "2", "--heads", "2", "--head-dim", "4", "--seq", "64", "-m", "dgx-h100"]
STEP = ["ring", "--model", "llama-3-8b", "--seq", "1K", "--gpus", "8", "-m", "dgx-h100"]
CHOOSE = ["choose", "--op", "all-reduce", "--bytes", "1MiB", "-m", "gb200-nvl72"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of GPUs and its timeline."""
    place = tmp_path_factory.mktemp("options")
    planned = planned_tensor()
    save_plan(planned, place / "g.plan")
    save_timeline(predict(planned, default_calibration("dgx-h100")).timeline, place / "g.json")
    return place


def planned_tensor() -> Plan:
    problem = tensor_problem("8,8", "f32", "x=2", "S0", "y=4", "S1")
    return make_plan(problem, build_topology(load_machine("dgx-h100"), 1), "direct")


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*PLAN, "-m", "dgx"], "--machine: unknown machine 'dgx'"),
        ([*PLAN, "-m", "dgx-h100 + gb200-nvl72"], "--machine 'dgx-h100 + gb200-nvl72': 'dgx-h100' needs a count"),
        ([*PLAN, "--calibration", "mine"], "--calibration: unknown calibration 'mine'"),
        ([*PLAN, "--message-size", "1 MX"], "--message-size: '1 MX' is not a number of bytes (unit 'MX' is unknown)"),
        ([*PLAN, "--message-size", "0"], "--message-size: expected 1 byte or more, found 0"),
        ([*PLAN, "--max-staging", "x"], "--max-staging: 'x' is not a number of bytes"),
        ([*PLAN, "--nic", "1=fast"], "--nic: 'fast' is not a bandwidth"),
        ([*PLAN, "--nic", "1=1e30Gb/s"], "--nic: '1e30Gb/s' is no rate of a link; expected 1 B/s to 1.00 PB/s"),
        ([*PLAN, "-s", "best"], "--strategy 'best' is not known; expected one of direct,"),
        ([*PLAN, "--backends", "nccl,ucx"], "--backends 'ucx' is not known; expected one of nccl,"),
        ([*PLAN, "--cache", ""], "--cache '': expected the name of a folder"),
        ([*PLAN, "-o", "nowhere/a.plan"], "--output: can't write the plan to nowhere/a.plan"),
        (["plan", *MODEL, "--model", "abc"], "--model: model 'abc' is unknown"),
        (["plan", *MODEL, "--from", "XX2"], "--from: layout 'XX2'"),
        (["plan", *MODEL, "--scale", "3"], "--scale: scale 3 doesn't fit qwen3-0.6b"),
        (["plan", *MODEL, "--precision", "fp7"], "--precision: precision 'fp7' is unknown"),
        (["plan", *MODEL, "--to-convention", ""], "--to-convention '' is not known; expected one of fsdp,"),
        (["plan", *MODEL, "--to-first-rank", "-1"], "--to-first-rank -1: expected 0 or more"),
        (["plan", "--from-json", "a.json", "--to-json", "b.json", "-m", "dgx-h100"], "--from-json: a.json: can't be read"),
        (["show", "g.plan", "--rank", "99"], "--rank 99: the plan has ranks 0 to"),
        (["explain", "g.plan", "-s", "best"], "--strategy: strategy 'best' can't do what this plan does"),
        (["simulate", "g.plan", "--tolerance", "0.999"], "--tolerance 0.999: expected a share from 0 (exact) to below 0.5"),
        ([*RING, "--cp", "0"], "--cp 0: expected a count from 1 to 2147483648"),
        ([*RING, "--seq", "1e30"], "--seq: '1e30' is more than can be planned for; expected at most 2^40 tokens"),
        ([*RING, "--dtype", "f9"], "--dtype: dtype 'f9' is not known"),
        ([*RING, "-s", "spiral"], "--strategy 'spiral' is not known"),
        ([*CHOOSE, "--ranks", "16", "--devices", "8"], "--ranks 16: the whole program has --devices 8; give"),
        ([*CHOOSE, "--ranks", "4", "--dtype", "f9"], "--dtype 'f9' is not known; expected one of pred,"),
        ([*CHOOSE, "--ranks", "4", "--rules", "xla"], "--rules: rules 'xla'"),
        ([*CHOOSE, "--ranks", "4", "--library-version", "nccl=x"], "--library-version: version 'x'"),
        (["run", "g.plan", "--repeats", "0"], "--repeats: expected 1 to 10000, found 0"),
        (["run", "g.plan", "--timeout", "-1"], "--timeout: expected seconds above 0, up to 1e+09, found -1"),
        (["run", "g.plan", "-t", "tcp"], "--transport: "),
        ([*STEP, "--batch", "-1"], "--batch -1: expected sequences a GPU, above 0"),
        ([*STEP, "--batch", "1e20"], "--batch 1e+20: of 1,024 tokens each, and a GPU has at most 2^40"),
        ([*STEP, "--rates", "x"], "--rates 'x' is not known; expected one of dgx-b200,"),
        (["study", "refit-vs-nic", *MODEL, "--rates", "1e30Gb/s"], "--rates '1e30Gb/s': '1e30Gb/s' isn't an item of it"),
        (["study", "refit-vs-size", *MODEL[2:], "--sizes", "abc"], "--sizes: model 'abc' is unknown; expected one of"),
        (["study", "split", *MODEL, "--gpus", "999999999999"], "'--gpus': 999999999999 is too large; expected 1048576 or"),
        (["machines", "import", "--ibstat", "none.txt"], "--ibstat: none.txt: can't be read"),
        (["machines", "import", XML, "--domain-hosts", "99999999"], "--domain-hosts: expected at most 1048576, found 99999999"),
        (["import", "--train", "@none.sh"], "--train: none.sh: can't be read"),
        (["import", "--serve", "vllm serve m", "--serve-framework", "x"], "--serve"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)  # fmt: skip
def test_the_option_is_named_with_what_was_found_and_expected(cli, here, arguments: list[str], words: str) -> None:
    code, out, err = cli(*arguments)

    assert (code, out) == (2, "")
    assert words in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "g.plan", "-s", "direct", "--alone"], "--strategy direct and --alone don't go together"),
        (["report", "g.plan", "-s", "direct", "--alone", "-o", "r.html"], "--strategy direct and --alone don't go together"),
        (["report", "g.plan", "-o", "r.txt"], "--output r.txt: a report goes to a file that ends in .html or .htm"),
        (["study", "gather-vs-reshard", "-o", "s.txt"], "--output s.txt: a study goes to a file that ends in .html"),
        (["study", "gather-vs-reshard", "--to-first-rank", "0"], "--to-first-rank is for plans, which need --machine"),
        (["study", "gather-vs-reshard", "--shape", "4,4"], "--shape: this study is of models"),
        (["diff", "g.json", "g.json", "--calibration", "dgx-h100"], "--calibration is for plans, which are predicted anew"),
        ([*CHOOSE, "--ranks", "8", "--calibration", "nominal"],
         "has no table [collectives]; leave --calibration out, which takes the measured costs of gb200-nvl72"),
    ],
)  # fmt: skip
def test_what_contradicts_or_would_be_ignored_is_refused_with_the_way_out(cli, here, arguments: list[str], words: str) -> None:
    code, out, err = cli(*arguments)

    assert (code, out) == (2, "")
    assert words in err
    assert {path.name for path in here.iterdir()} == {"g.plan", "g.json"}


def test_an_error_is_led_by_its_option_once() -> None:
    with pytest.raises(InputError, match=r"^--seq: 'x' is no number$"), about("--seq"):
        raise InputError("'x' is no number")
    with pytest.raises(InputError, match=r"^--from XX2: no axis$"), about("--from"):
        raise InputError("--from XX2: no axis")
    with pytest.raises(InputError, match=r"^--from: give --from-json$"), about("--from"):
        raise InputError("give --from-json")
    with pytest.raises(InfeasibleError, match=r"^--max-staging: too little$"), about("--max-staging"):
        raise InfeasibleError("max staging: too little")


def test_an_output_is_tried_for_its_folder_and_its_suffix(tmp_path: Path) -> None:
    check_output(None, "a page", suffixes=(".html",))
    check_output(str(tmp_path / "A.HTML"), "a page", suffixes=(".html",))

    with pytest.raises(InputError, match=r"^--output .*a\.txt: a page goes to a file that ends in \.html$"):
        check_output(str(tmp_path / "a.txt"), "a page", suffixes=(".html",))
    with pytest.raises(InputError, match=r"^--trace: can't write the trace to "):
        check_output(str(tmp_path / "none" / "a.json"), "the trace", "--trace")


def test_costs_of_ones_own_are_named_by_their_file(cli, tmp_path, monkeypatch, repo: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pod.toml").write_text((repo / "topologies" / "machines" / "dgx-h100.toml").read_text())
    costs = (repo / "topologies" / "calibrations" / "dgx-h100.toml").read_text()
    (tmp_path / "mine.toml").write_text(costs.replace('machine = "dgx-h100"', 'machine = "pod"'))

    own = json.loads(cli("plan", *TENSOR, "-m", "./pod.toml", "--calibration", "mine.toml", "-s", "direct", "--json")[1])
    shipped = json.loads(cli(*PLAN, "-s", "direct", "--json")[1])

    assert own["calibration"] == "NCCL send/recv on pod (mine.toml)"
    assert shipped["calibration"] == "NCCL send/recv on dgx-h100 (`shardroute machines show dgx-h100`)"
