"""The command line as a user meets it: the issue's commands, JSON that stays, and clear words for every mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardroute.planner.cli.output import message_text
from shardroute.topologies.errors import InputError, RunError

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


def completion_script(shell: str) -> str:
    """What a shell loads; `--show-completion` guesses the shell from the processes above, of which a test may have none."""
    asking = os.environ | {"_SHARDROUTE_COMPLETE": f"source_{shell}"}
    command = [str(Path(sys.executable).with_name("shardroute"))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=asking)
    return ran.stdout


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


def test_compare_refuses_a_measurement_in_the_place_of_the_prediction(cli, tensor_plan, tmp_path) -> None:
    predicted, measured = str(tmp_path / "p.json"), str(tmp_path / "m.json")
    cli("simulate", str(tensor_plan), "--machine", "cpu-processes", "-o", predicted)
    cli("run", str(tensor_plan), "--transport", "processes", "-o", measured)

    code, out, err = cli("compare", measured, predicted)

    assert (code, out) == (2, "")
    assert f"{measured} is measured and {predicted} is predicted" in err
    assert f"compare {predicted} {measured}" in err


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
    assert "_SHARDROUTE_COMPLETE" in completion_script("bash")


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


@pytest.fixture
def prediction(cli, tensor_plan, tmp_path) -> dict[str, object]:
    """A timeline of the small plan, as its file has it."""
    cli("simulate", str(tensor_plan), "-o", str(tmp_path / "a.json"))
    found: dict[str, object] = json.loads((tmp_path / "a.json").read_text())
    return found


@pytest.mark.parametrize(
    ("source", "shown"),
    [("[/b]", "[/b]"), ("[red]x", "[red]x"), (":smile:", ":smile:"), ("\x1b[31mred\x07", "?[31mred?"), ("a\u202eb", "a?b")],
)
def test_names_from_files_are_shown_as_they_are_and_cannot_steer_the_terminal(cli, prediction, tmp_path, source, shown) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps(prediction | {"source": source}))

    code, out, _ = cli("compare", str(tmp_path / "a.json"), str(path))

    assert code == 0
    assert shown in out
    assert "\x1b" not in out


@pytest.mark.parametrize("verified", [{"bytes": -1, "mismatches": 0}, {"bytes": 1, "mismatches": -5}])
def test_a_timeline_that_verified_less_than_nothing_is_refused(cli, prediction, tmp_path, verified) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps(prediction | {"verified": verified}))

    code, _, err = cli("compare", str(tmp_path / "a.json"), str(path))

    assert (code, "not a shardroute timeline" in err) == (2, True)


def test_a_timeline_is_read_from_regular_files_only(cli, prediction, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for name in ("pipe", ".", "n" * 400, "a\0b"):
        code, _, err = cli("compare", str(tmp_path / "a.json"), str(tmp_path / name))
        words = "is a folder, and a timeline is wanted" if name == "." else "no timeline file"
        assert (code, words in err) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", "qwen3-0.6b", "--from", "TP2 " * 5000, "--to", "TP2", "--machine", "dgx-h100"],
        ["plan", "--model", "qwen3-0.6b", "--from", "TP" + "9" * 5000, "--to", "TP2", "--machine", "dgx-h100"],
        ["plan", "--model", "x" * 5000, "--from", "TP2", "--to", "TP2", "--machine", "dgx-h100"],
        ["simulate", "x" * 5000],
    ],
    ids=["axes", "digits", "model", "file"],
)
def test_a_very_long_value_makes_no_very_long_message(cli, arguments) -> None:
    code, _, err = cli(*arguments)

    assert code == 2
    assert len(err) < 2100


def test_a_calibration_that_could_not_be_written_is_not_measured(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shardroute.executors.commands.calibrate_here", lambda: pytest.fail("was measured"))

    for name in ("nowhere/here.toml", "here.txt", "n" * 400 + ".toml", "a\0.toml"):
        code, _, err = cli("calibrate", "--here", "-o", str(tmp_path / name))
        assert (code, "error: " in err) == (2, True)


def test_a_timeline_that_could_not_be_written_is_not_measured(cli, tensor_plan, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shardroute.executors.commands.run_plan", lambda *_, **__: pytest.fail("was run"))

    code, _, err = cli("run", str(tensor_plan), "-o", str(tmp_path / "nowhere" / "t.json"))

    assert (code, "can't write the timeline" in err) == (2, True)


def test_an_interrupt_while_the_program_loads_ends_in_one_line() -> None:
    program = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "numpy":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from shardroute.executors.cli import main
main()
"""

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (found.returncode, found.stdout, found.stderr) == (130, "", "Aborted.\n")


def test_only_long_values_are_shortened_in_a_message() -> None:
    words = "rank 3 can't read " + "what it waits for, " * 15 + "and doesn't go on"

    assert message_text(RunError(words)) == words
    assert message_text(InputError(f"machine {'x' * 500!r} isn't known")).startswith(f"machine '{'x' * 99} ... xxx")
