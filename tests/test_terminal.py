"""How much commands say, where they say it, and that what they print fits a terminal."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from shardroute.executors.cli import main
from shardroute.planner.check import check
from shardroute.planner.cli import app, output
from shardroute.planner.cli.output import Speech, progress, say, speak, tell
from shardroute.planner.cli.program import let_speak
from shardroute.planner.plan_files import load_plan
from shardroute.planner.reporting.contest_pictures import what_ifs
from shardroute.planner.reporting.rivals import rivals_of
from shardroute.planner.routing.auto import choose
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.replans import replan
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.shares import part
from shardroute.planner.step_tables import write_steps
from shardroute.planner.studies import Case, study_rows
from shardroute.topologies import default_calibration

DATA = Path(__file__).parent / "data"
GPUS = ["--machine", "dgx-h100"]
REFIT = ["--model", "qwen3-0.6b", "--scale", "256", "--from", "TP2", "--to", "TP4"]
RING = ["plan-ring", "--seq", "64", "--heads", "2", "--head-dim", "8", "--cp", "2", "--dtype", "f32"]
# Commands whose results are tables; those that only write files or take seconds are left out.
TABLES = [
    ["plan", *REFIT, *GPUS, "-s", "direct"],
    [*RING, "--machine", "cpu-processes"],
    ["bound", *REFIT, *GPUS],
    ["strategies", *REFIT, *GPUS, "-s", "direct", "-s", "domain-relay"],
    ["show", "a.plan"],
    ["show", "a.plan", "--rank", "1"],
    ["check", "a.plan"],
    ["simulate", "a.plan"],
    ["diff", "a.plan", "b.plan"],
    ["diff", "a.json", "b.json"],
    ["compare", "a.json", "a.json"],
    ["explain", "a.plan", "--alone"],
    ["replan", "a.plan", "--nic", "1=25GB/s"],
    ["choose", "--plan", "a.plan", *GPUS],
    ["choose", "--hlo", str(DATA / "hlo" / "mixed.txt"), *GPUS],
    ["ring", "--model", "llama-3-8b", "--seq", "65536", "--gpus", "8", "--cp", "4", "--tp", "1", *GPUS],
    ["layout", "--model", "qwen3-0.6b", "--spec", "TP2", "--scale", "256"],
    ["layout", "--model", "qwen3-0.6b", "--spec", "TP2", "--scale", "256", "--rank", "0"],
    ["machines"],
    ["machines", "show", "gb200-nvl72"],
    ["models"],
    ["models", "show", "llama-3-8b"],
    ["schema"],
    ["calibrate", str(DATA / "logs" / "perftest.txt"), "--machine", "dgx-h100"],
]
# Figures of a table: a number that isn't part of a name or a path.
FIGURE = re.compile(r"(?<![\w./-])[+-]?\d[\d,]*(?:\.\d+)?%?(?![\w/.-])")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with two plans and their timelines."""
    place = tmp_path_factory.mktemp("terminal")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, strategy in (("a", "direct"), ("b", "greedy")):
            for command in (
                ["plan", *REFIT, *GPUS, "-s", strategy, "-o", f"{name}.plan"],
                ["simulate", f"{name}.plan", "-o", f"{name}.json"],
            ):
                patch.setattr(sys, "argv", ["shardroute", *command])
                with pytest.raises(SystemExit):
                    main()
    return place


@pytest.fixture
def here(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("command", TABLES, ids=" ".join)
def test_what_is_printed_fits_80_columns_and_loses_no_figure(cli, here, monkeypatch, command: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, narrow, _ = cli(*command)
    monkeypatch.setenv("COLUMNS", "400")
    _, wide, _ = cli(*command)

    assert code == 0
    # Flags are one line, to be copied.
    assert [line for line in narrow.splitlines() if len(line) > 80 and "--xla_gpu" not in line] == []
    assert "…" not in narrow
    assert set(FIGURE.findall("\n".join(_without_times(wide)))) <= set(FIGURE.findall(narrow))


@pytest.mark.parametrize("command", [TABLES[3], TABLES[13], TABLES[15], TABLES[18]], ids=" ".join)
def test_a_table_that_does_not_fit_60_columns_becomes_lists_with_every_figure(cli, here, monkeypatch, command) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, narrow, _ = cli(*command)
    monkeypatch.setenv("COLUMNS", "400")
    _, wide, _ = cli(*command)

    assert code == 0
    assert [line for line in narrow.splitlines() if len(line) > 60 and "--xla_gpu" not in line] == []
    assert "…" not in narrow
    assert set(FIGURE.findall("\n".join(_without_times(wide)))) <= set(FIGURE.findall(narrow))


def _without_times(text: str) -> list[str]:
    """The lines but those that say how long something took just now, which no two runs say alike."""
    return [line.rstrip() for line in text.splitlines() if "planned in" not in line]


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "a.plan", "--calibration", "nominal"],
        ["plan", *REFIT, *GPUS, "-s", "direct", "-o", "c.plan"],
        ["steps", "a.plan", "-o", "a.csv"],
        ["trace", "a.plan", "a.json", "-o", "t.json"],
        ["machines", "import", str(DATA / "clusters" / "dgx-h100.xml")],
        ["import", "--serve", "vllm serve m -dp 4"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_quiet_leaves_the_results_and_nothing_on_standard_error(cli, here, command: list[str]) -> None:
    _, plain, notes = cli(*command)
    code, out, err = cli(*command, "--quiet")

    assert (code, err) == (0, "")
    assert _without_times(out) == _without_times(plain)
    assert notes != ""


def test_quiet_and_verbose_stand_before_the_command_or_behind_it(cli, here) -> None:
    _, _, before = cli("--verbose", "check", "a.plan")
    _, _, behind = cli("check", "a.plan", "-v")
    _, _, quiet = cli("-q", "simulate", "a.plan", "--calibration", "nominal")
    _, _, nested = cli("machines", "show", "dgx-h100", "-v")

    assert "read a.plan" in before
    assert "read a.plan" in behind
    assert quiet == ""
    assert "dgx-h100.toml" in nested


def test_verbose_says_what_was_read_and_chosen_and_how_long_each_part_took(cli, here) -> None:
    _, plain, _ = cli("plan", *REFIT, *GPUS)
    code, out, err = cli("plan", *REFIT, *GPUS, "-v")

    assert code == 0
    assert _without_times(out) == _without_times(plain)
    for words in ("read ", "machine: dgx-h100 x 1, for 6 ranks", "costs: NCCL", "chosen: ", "planning (auto): ", "in all: "):
        assert words in err


def test_a_command_said_nothing_more_is_as_loud_as_ever(cli, here) -> None:
    cli("check", "a.plan", "-q")

    _, _, err = cli("simulate", "a.plan", "--calibration", "nominal")

    assert "nominal rates" in err


def test_quiet_hides_no_error(cli, here) -> None:
    code, _, err = cli("check", "missing.plan", "--quiet")

    assert code == 2
    assert "missing.plan" in err


def test_quiet_and_verbose_together_are_refused(cli, here) -> None:
    code, _, err = cli("check", "a.plan", "-q", "-v")

    assert code == 2
    assert "--quiet and --verbose don't go together" in err


def test_every_command_takes_both_flags() -> None:
    let_speak(app)
    apps = [app, *(group.typer_instance for group in app.registered_groups)]

    callbacks = [info.callback for each in apps for info in each.registered_commands]

    assert len(callbacks) > 20
    for callback in callbacks:
        assert {"quiet", "verbose"} <= set(callback.__annotations__), callback.__name__


def on_a_terminal(command: list[str], folder: Path, **environment: str) -> str:
    """What a command writes to standard error where that is a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    ran = [sys.executable, "-m", "shardroute.executors", *command]
    with subprocess.Popen(
        ran, cwd=folder, stdout=subprocess.DEVNULL, stderr=theirs, env=kept | {"TERM": "xterm-256color"} | environment
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                chunk = os.read(ours, 2**16)
            except OSError:  # Linux's way to say that the other side has closed
                break
            if not chunk:
                break
            said += chunk
        assert process.wait() == 0
    os.close(ours)
    return said.decode()


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d)(?:;\d+)*m")


def test_a_terminal_shows_a_bar_in_colour_and_the_time_left(folder) -> None:
    said = on_a_terminal(["simulate", "a.plan"], folder)

    assert "simulating" in said
    assert COLOUR.search(said)
    assert re.search(r"0:00:00.*0:00:00", said)  # passed, and left


def test_no_color_is_honoured_on_a_terminal(folder) -> None:
    said = on_a_terminal(["simulate", "a.plan", "--calibration", "nominal"], folder, NO_COLOR="1")

    assert "nominal rates" in said
    assert COLOUR.search(said) is None


def test_no_color_leaves_bold_and_a_dumb_terminal_takes_no_escape(monkeypatch) -> None:
    said = {}
    for name, settings in (("NO_COLOR", {"NO_COLOR": "1", "TERM": "xterm"}), ("TERM", {"TERM": "dumb"})):
        monkeypatch.delenv("NO_COLOR", raising=False)
        for key, value in settings.items():
            monkeypatch.setenv(key, value)
        text = io.StringIO()
        monkeypatch.setattr(text, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stderr", text)
        say("careful", style="bold red")
        said[name] = text.getvalue()

    assert said == {"NO_COLOR": "\x1b[1mcareful\x1b[0m\n", "TERM": "careful\n"}


def test_without_a_terminal_there_is_neither_a_bar_nor_an_escape(cli, here, monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")

    _, out, err = cli("simulate", "a.plan", "--calibration", "nominal")

    assert "\x1b" not in out + err
    assert "simulating" not in err


def test_what_takes_long_tells_a_share_that_only_grows(folder) -> None:
    made, costs = load_plan(folder / "a.plan"), default_calibration("dgx-h100")
    told: dict[str, list[float]] = {"choose": [], "check": [], "rivals": [], "what-ifs": [], "steps": [], "replan": []}

    choose(made.problem, made.topology, costs, progress=told["choose"].append)
    check(made, progress=told["check"].append)
    rivals_of(made, 1.0, costs, ["greedy", "direct", "domain-relay"], progress=told["rivals"].append)
    what_ifs(made, costs, progress=told["what-ifs"].append)
    write_steps(made, None, io.BytesIO(), told["steps"].append)
    replan(made, made.problem, made.topology, Options(told=told["replan"].append))

    for name, shares in told.items():
        assert shares, name
        assert shares == sorted(shares), name
        assert 0 <= shares[0] <= shares[-1] <= 1, name


def test_a_part_of_a_whole_tells_its_share_of_it() -> None:
    told: list[float] = []

    second = part(told.append, 0.25, 0.75)
    second(0.0)
    second(0.5)
    second(1.0)

    assert told == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_tells_a_share_of_planning_that_only_grows(folder, strategy: str) -> None:
    made = load_plan(folder / "a.plan")
    told: list[float] = []

    make_plan(made.problem, made.topology, strategy, options=Options(told=told.append))

    assert told == sorted(told)
    assert 0 <= told[0] <= told[-1] <= 1


def test_rows_of_a_study_tell_a_share_that_only_grows(folder) -> None:
    made, told = load_plan(folder / "a.plan"), list[float]()
    cases = [Case(name, 1.0, lambda _done: (made.problem, made.topology)) for name in ("one", "two")]

    study_rows(cases, ["direct", "m2n-pack", "auto"], default_calibration("dgx-h100"), progress=told.append)

    assert len(told) > 2 * len(cases) * 3
    assert told == sorted(told)
    assert told[-1] == 1


def test_without_a_terminal_what_takes_long_says_its_share_and_the_time_left_in_plain_lines(capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "_LINE_S", 0.05)

    began = time.perf_counter()
    with progress("some work") as done:
        for n_done in range(1, 200):
            time.sleep(0.001)
            done(n_done / 200)
    took_s = time.perf_counter() - began

    out, err = capsys.readouterr()
    assert out == ""
    assert 1 <= len(err.splitlines()) <= took_s / 0.05
    for line in err.splitlines():
        assert re.fullmatch(r"some work: \d+% after \d+ s(, some \d+ s left)?", line)
    assert "left" in err


def test_the_time_left_is_known_from_the_first_share_on(capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "_LINE_S", 0.05)

    with progress("some work") as done:
        time.sleep(0.2)
        done(0.25)

    assert re.fullmatch(r"some work: 25% after 0 s, some 1 s left\n", capsys.readouterr().err)


def test_quiet_leaves_lines_of_progress_out(capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "_LINE_S", 0.0)
    speak(Speech.QUIET)
    try:
        with progress("some work") as done:
            done(0.5)
    finally:
        speak(Speech.PLAIN)

    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "said"), [(9.6, "10 s"), (59.7, "1 min 0 s"), (96.0, "1 min 36 s")])
def test_time_left_is_in_whole_seconds_and_minutes(seconds: float, said: str) -> None:
    assert output._clock_text(seconds) == said


@pytest.mark.parametrize(
    ("speech", "said"), [(Speech.QUIET, ""), (Speech.PLAIN, "note\n"), (Speech.VERBOSE, "note\ndetail\nwork: ")]
)
def test_notes_and_details_go_to_standard_error_by_how_much_is_asked_for(capsys, speech: Speech, said: str) -> None:
    speak(speech)
    try:
        say("note")
        tell("detail")
        with progress("work"):
            pass
    finally:
        speak(Speech.PLAIN)

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said) if speech is Speech.VERBOSE else err == said


def test_with_standard_error_closed_results_are_printed_as_ever() -> None:
    problem = "--machine dgx-h100 --shape 8,8 --from-mesh x=2 --from-placements S0 --to-mesh x=2 --to-placements S1"

    shown = subprocess.run(
        f"{sys.executable} -m shardroute.executors plan {problem} 2>&-", shell=True, check=False, capture_output=True, text=True
    )

    assert shown.returncode == 0
    assert shown.stdout.startswith("tensor 8,8: x=2 S0 -> x=2 S1")
