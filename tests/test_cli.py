"""The command line as a user meets it: the issue's commands, JSON that stays, and clear words for every mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardroute.executors.cli import main

LAYOUTS = ["--from", "TP4 x PP8 x EP16", "--to", "TP8 x DP16", "--machine", "dgx-h100"]
TENSOR = [
    "--shape",
    "8,8",
    "--dtype",
    "f32",
    "--from-mesh",
    "x=2",
    "--from-placements",
    "S0",
    "--to-mesh",
    "y=4",
    "--to-placements",
    "S1",
]
PLAN_KEYS = {
    "strategy", "n_steps", "n_bytes_moved", "n_bytes_cross_domain", "lower_bound_s", "predicted_s", "ratio_to_bound", "busiest",
    "n_src_gpus", "n_dst_gpus", "peak_staging_bytes", "plan_s", "digest",
}  # fmt: skip


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run a command in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardroute", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def tensor_plan(tmp_path_factory) -> Path:
    """A small plan on disk."""
    path = tmp_path_factory.mktemp("plans") / "t.plan"
    arguments = [sys.executable, "-m", "shardroute.executors", "plan", *TENSOR, "--machine", "dgx-h100", "-o", str(path)]
    subprocess.run(arguments, check=True, capture_output=True)
    return path


def test_a_model_is_planned_with_all_of_the_promised_numbers(cli, tmp_path) -> None:
    code, out, _ = cli(
        "plan", "--model", "qwen3-235b-a22b", *LAYOUTS, "--strategy", "domain-relay", "-o", str(tmp_path / "q.plan"), "--json"
    )

    found = json.loads(out)
    assert code == 0
    assert found.keys() >= PLAN_KEYS
    assert (found["n_src_gpus"], found["n_dst_gpus"]) == (128, 128)
    assert found["n_tensor_bytes"] == 2 * 235_093_634_560
    # Each of the 16 destination domains needs every parameter once, and none holds any.
    assert found["n_bytes_cross_domain"] == 16 * 2 * 235_093_634_560
    assert 1 < found["ratio_to_bound"] < 2
    assert found["busiest"].keys() == {"resource", "n_bytes", "seconds"}
    assert cli("check", str(tmp_path / "q.plan"))[0] == 0


def test_a_bare_tensor_is_planned_over_the_ranks_that_are_named(cli) -> None:
    code, out, _ = cli("plan", *TENSOR, "--machine", "dgx-h100 x 3", "--from-ranks", "0,9", "--to-ranks", "16-19", "--json")

    found = json.loads(out)
    assert code == 0
    assert (found["n_src_gpus"], found["n_dst_gpus"], found["n_bytes_moved"]) == (2, 4, 256)


def test_show_simulate_and_check_speak_json(cli, tensor_plan) -> None:
    shown, simulated, checked = (json.loads(cli(c, str(tensor_plan), "--json")[1]) for c in ("show", "simulate", "check"))

    assert shown["digest"] == simulated["digest"] == checked["digest"]
    assert shown["predicted_s"] == simulated["predicted_s"]
    assert {"resource", "n_bytes", "busy_s"} <= simulated["resources"][0].keys()
    assert checked["ok"] is True


def test_tables_fit_80_columns(cli, tensor_plan, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    outputs = [
        cli(*arguments)[1]
        for arguments in (
            ["show", str(tensor_plan)],
            ["simulate", str(tensor_plan)],
            ["machines"],
            ["machines", "show", "dgx-h100"],
            ["models"],
        )
    ]

    assert [line for out in outputs for line in out.splitlines() if len(line) > 80] == []


def test_a_plan_is_run_measured_and_compared(cli, tensor_plan, tmp_path) -> None:
    predicted, measured = str(tmp_path / "p.json"), str(tmp_path / "m.json")

    cli("simulate", str(tensor_plan), "--machine", "cpu-processes", "-o", predicted)
    code, out, _ = cli("run", str(tensor_plan), "--transport", "processes", "-o", measured, "--json")
    compared = json.loads(cli("compare", predicted, measured, "--json")[1])

    run = json.loads(out)
    assert code == 0
    assert run["measured_s"] > 0
    assert run["verified"] == {"bytes": 256, "mismatches": 0}
    assert compared["rows"][0]["first_s"] > 0
    assert compared["rows"][0]["second_s"] == pytest.approx(run["measured_s"])


def test_compare_exits_with_1_outside_of_the_tolerance(cli, tensor_plan, tmp_path) -> None:
    fast, slow = str(tmp_path / "fast.json"), str(tmp_path / "slow.json")
    cli("simulate", str(tensor_plan), "-o", fast, "--calibration", "nominal")
    cli("simulate", str(tensor_plan), "-o", slow)

    assert cli("compare", slow, slow, "--tolerance", "0")[0] == 0
    assert cli("compare", fast, slow, "--tolerance", "0.2")[0] == 1


def test_machines_and_models_are_listed_and_explained(cli) -> None:
    names = {m["name"] for m in json.loads(cli("machines", "--json")[1])}
    shown = json.loads(cli("machines", "show", "gb200-nvl72", "--json")[1])
    model = json.loads(cli("models", "show", "llama-3-8b", "--json")[1])

    assert names >= {"dgx-h100", "hgx-h200", "dgx-b200", "gb200-nvl72", "cpu-processes"}
    assert all(figure["source"] for figure in shown["figures"])
    assert model["n_parameters"] == model["published"] == 8_030_261_248
    assert {"name", "shape", "dtype", "n_elements"} <= model["parameters"][0].keys()


def test_completion_and_version_are_there(cli) -> None:
    assert cli("--version")[1].startswith("shardroute ")
    assert "_SHARDROUTE_COMPLETE" in cli("--show-completion", "bash")[1] or "complete" in cli("--show-completion")[1]


MODEL = ["plan", "--model", "qwen3-30b-a3b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--machine", "dgx-h100"], ["nothing to move", "--model", "--shape"]),
        ([*MODEL, "--machine", "dgx-h100"], ["--from", "--to"]),
        ([*MODEL, "--from", "EP8 x PP2", "--to", "TP8", "--machine", "dgx-h200"], ["dgx-h200", "dgx-h100"]),
        ([*MODEL, "--from", "EP8 x PP2", "--to", "TP8", "--machine", "dgx-h100 x 1"], ["24", "dgx-h100 x 3"]),
        ([*MODEL, "--from", "EP7", "--to", "TP8", "--machine", "dgx-h100"], ["EP7", "128"]),
        ([*MODEL, "--from", "EP8 x XP2", "--to", "TP8", "--machine", "dgx-h100"], ["XP2"]),
        ([*MODEL, "--from", "EP8", "--to", "TP8", "--machine", "dgx-h100", "--strategy", "magic"], ["magic", "domain-relay"]),
        ([*MODEL, "--from", "EP8", "--to", "TP8", "--machine", "dgx-h100", "--scale", "7"], ["7", "256"]),
        ([*MODEL, *LAYOUTS, "--shape", "8,8"], ["--model and --shape"]),
        (["plan", "--model", "qwen9", *LAYOUTS], ["qwen9", "qwen3-30b-a3b", "config.json"]),
        (["plan", *TENSOR, "--machine", "dgx-h100", "--to-ranks", "2,3"], ["4 places, but 2 ranks"]),
        (["plan", *TENSOR[:-1], "S7", "--machine", "dgx-h100"], ["S7", "dims 0 to 1"]),
        (["plan", *TENSOR, "--machine", "dgx-h100", "--calibration", "none.toml"], ["none.toml"]),
        (["check", "no.plan"], ["no.plan", "shardroute plan"]),
        (["run", "no.plan"], ["no.plan"]),
        (["simulate", __file__], ["not a shardroute plan"]),
        (["compare", __file__, __file__], ["not a shardroute timeline"]),
        (["machines", "show", "dgx-h101"], ["dgx-h101", "dgx-h100"]),
        (["models", "show", "nothing"], ["nothing", "llama-3-8b"]),
        (["calibrate"], ["--here"]),
        (["plan", "--bogus"], ["--bogus"]),
    ],
    ids=lambda value: " ".join(Path(str(v)).name for v in value) if isinstance(value, list) else None,
)
def test_a_mistake_ends_with_2_and_words_that_name_it(cli, arguments, words) -> None:
    code, out, err = cli(*arguments)

    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in " ".join(err.split())


def test_timelines_of_different_plans_are_not_compared(cli, tensor_plan, tmp_path) -> None:
    other = tmp_path / "other.plan"
    cli("plan", *TENSOR, "--machine", "dgx-h100 x 2", "-o", str(other))
    cli("simulate", str(tensor_plan), "-o", str(tmp_path / "a.json"))
    cli("simulate", str(other), "-o", str(tmp_path / "b.json"))

    code, _, err = cli("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))

    assert code == 2
    assert "different plans" in err


def test_the_module_starts_the_same_program() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "shardroute.executors", "--version"], check=True, capture_output=True, text=True
    )

    assert found.stdout.startswith("shardroute ")
