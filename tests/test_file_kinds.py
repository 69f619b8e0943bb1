"""A file of another kind than the one wanted is named, with what takes it and how to get what is wanted."""

import os
from pathlib import Path

import pytest
from hand_plans import rows_to_columns

from shardroute.planner.file_kinds import kind_of, mistaken
from shardroute.planner.plan_files import save_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.timelines import save_timeline
from shardroute.topologies import default_calibration

WANT_PLANS = (["show"], ["check"], ["explain"], ["simulate"], ["choose", "--machine", "dgx-h100", "--plan"])


@pytest.fixture
def files(tmp_path: Path, repo: Path) -> Path:
    """A folder with a file of each kind."""
    planned = rows_to_columns()
    save_plan(planned, tmp_path / "a.plan")
    save_timeline(predict(planned, default_calibration(planned.topology.machine.name)).timeline, tmp_path / "t.json")
    (tmp_path / "dump.txt").write_text("HloModule ring, num_partitions=4\n\nENTRY main {\n}\n")
    (tmp_path / "layout.json").write_text('{"version": 1, "format": "shardroute-layout", "tensors": []}')
    (tmp_path / "box.toml").write_text('name = "box"\n')
    (tmp_path / "topo.xml").write_text('<system version="1">\n</system>\n')
    (tmp_path / "r.html").write_text("<!doctype html><title>x</title>")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    tomls = {"machine": "topologies/machines", "costs": "topologies/calibrations", "rates": "planner/backends/rates"}
    for kind, folder in tomls.items():
        (tmp_path / f"{kind}.toml").write_bytes((repo / folder / "dgx-h100.toml").read_bytes())
    (tmp_path / "notes.md").write_text("# Notes\n")
    (tmp_path / "cut.plan").write_bytes((tmp_path / "a.plan").read_bytes()[:200])
    return tmp_path


def test_each_kind_is_known_by_its_first_bytes(files: Path) -> None:
    found = {path.name: kind_of(path) for path in files.iterdir()}

    assert found == {
        "a.plan": "a plan", "t.json": "a timeline", "dump.txt": "the text of an HLO module", "layout.json": "a layout file",
        "box.toml": "a machine, calibration or rates file", "machine.toml": "a machine file", "costs.toml": "a calibration",
        "rates.toml": "a file of rates", "config.json": "a model's config.json",
        "topo.xml": "XML", "r.html": "a page", "notes.md": "", "cut.plan": "",
    }  # fmt: skip


def test_a_file_of_the_wanted_kind_or_of_none_is_not_mistaken(files: Path) -> None:
    assert mistaken(files / "a.plan", "a plan") == ""
    assert mistaken(files / "t.json", "a timeline") == ""
    assert mistaken(files / "notes.md", "a plan") == ""
    assert mistaken(files / "missing", "a plan") == ""
    assert "HLO module, and a plan is wanted" in mistaken(files / "dump.txt", "a plan")


def test_commands_of_plans_say_what_a_timeline_and_a_folder_are(files: Path, cli) -> None:
    for command in (*WANT_PLANS, ["report", "-o", str(files / "x.html")]):
        code, out, err = cli(*command, str(files / "t.json"))

        assert (code, out) == (2, "")
        assert "t.json is a timeline, and a plan is wanted: `shardroute plan ... -o FILE` writes one" in err
        assert "a timeline is for `compare`" in err

    code, _, err = cli("check", str(files))
    assert (code, f"{files} is a folder, and a plan is wanted" in err) == (2, True)


def test_commands_of_timelines_say_what_a_plan_and_a_folder_are(files: Path, cli) -> None:
    plan, timeline = str(files / "a.plan"), str(files / "t.json")
    for command in (["compare", plan, timeline], ["compare", timeline, plan], ["trace", plan, plan, "-o", str(files / "x.json")]):
        code, _, err = cli(*command)

        assert code == 2
        assert "a.plan is a plan, and a timeline is wanted: `shardroute simulate PLAN -o FILE`" in err
        assert "a plan is for `show`" in err

    code, _, err = cli("compare", str(files), timeline)
    assert (code, f"{files} is a folder, and a timeline is wanted" in err) == (2, True)
    code, _, err = cli("diff", str(files), timeline)
    assert (code, f"{files} is a folder; give two plan files" in err) == (2, True)


def test_a_pipe_is_not_opened(files: Path, cli) -> None:
    os.mkfifo(files / "pipe")

    codes = [
        cli(*command)[0]
        for command in (["show", str(files / "pipe")], ["compare", *[str(files / "pipe")] * 2],
                        ["machines", "import", str(files / "pipe")])
    ]  # fmt: skip

    assert kind_of(files / "pipe") == mistaken(files / "pipe", "a plan") == ""
    assert codes == [2, 2, 2]


def test_a_plan_that_is_cut_short_is_still_called_that(files: Path, cli) -> None:
    code, _, err = cli("show", str(files / "cut.plan"))

    assert code == 2
    assert "not a shardroute plan, or cut short" in err


GPUS = ["-m", "dgx-h100"]
STEP = ["ring", "--model", "llama-3-8b", "--seq", "1K", "--gpus", "8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "a.plan", "--machine", "costs.toml"], "--machine: costs.toml is a calibration, and a machine file is"),
        (["simulate", "a.plan", "-m", "./costs.toml x 4"], "--machine: ./costs.toml is a calibration, and a machine file is"),
        (["simulate", "a.plan", "--calibration", "machine.toml"], "--calibration: machine.toml is a machine file, and"),
        ([*STEP, *GPUS, "--rates", "costs.toml"], "--rates: costs.toml is a calibration, and a file of rates is wanted"),
        (["machines", "show", "costs.toml"], "costs.toml is a calibration, and a machine file is wanted"),
        (["models", "show", "a.plan"], "a.plan is a plan, and a model's config.json is wanted"),
        ([*STEP, *GPUS, "--model", "a.plan"], "--model: a.plan is a plan, and a model's config.json is wanted"),
        ([*STEP, *GPUS, "--model", "raw.bin"], "raw.bin: expected the JSON of a Hugging Face config, found bytes that"),
        (["choose", *GPUS, "--hlo", "a.plan"], "--hlo: a.plan is a plan, and the text of an HLO module is wanted"),
        (["check", "--from-json", "t.json", "--to-json", "t.json"], "--from-json: t.json is a timeline, and a layout file is"),
        (["import", "a.plan"], "a.plan is a plan, and a recipe (YAML) is wanted"),
        (["import", "--train", "@a.plan"], "--train: a.plan is a plan, and a launch script is wanted"),
        (["calibrate", "a.plan", *GPUS], "a.plan is a plan, and a log is wanted"),
        (["validate", "--ring", "--ring-rows", "a.plan"], "--ring-rows: a.plan is a plan, and a table of calls (CSV) is wanted"),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)  # fmt: skip
def test_an_option_says_what_file_it_was_given_instead(files: Path, cli, monkeypatch, arguments: list[str], words: str) -> None:
    (files / "raw.bin").write_bytes(b"\x80\x81")
    monkeypatch.chdir(files)

    code, out, err = cli(*arguments)

    assert (code, out) == (2, "")
    assert words in err
