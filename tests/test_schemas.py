"""`shardroute schema` against what the commands print: every field is there, of its type, and none is missing from the schema."""

import json
import re
import sys
from pathlib import Path

import pytest

from shardroute.executors.cli import main
from shardroute.planner.cli.schemas import DOCUMENTS, schema_of
from shardroute.topologies.errors import InputError

DATA = Path(__file__).parent / "data"
TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list, "object": dict,
}  # fmt: skip
# Documents whose commands take too long here, or need what a test machine may lack.
ELSEWHERE = {"calibrate", "demo", "emulate", "validate", "validate-emulated", "validate-ring"}


def faults(value: object, schema: dict[str, object], root: dict[str, object], at: str = "$") -> list[str]:
    """What of the value the schema doesn't allow; a field that the schema doesn't name is a fault too."""
    if "$ref" in schema:
        schema = root["$defs"][str(schema["$ref"]).rpartition("/")[2]]
    if "anyOf" in schema:
        found = [faults(value, option, root, at) for option in schema["anyOf"]]
        return [] if [] in found else found[0]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is none of {schema['enum']}"]
    if "const" in schema and value != schema["const"]:
        return [f"{at}: {value!r} isn't {schema['const']!r}"]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, TYPES[kind]) and (kind == "boolean") == isinstance(value, bool) for kind in kinds):
        return [f"{at}: {value!r} isn't of type {kinds}"]
    if isinstance(value, list):
        items = schema.get("items", False)
        return [fault for i, item in enumerate(value) if items for fault in faults(item, items, root, f"{at}[{i}]")]
    if isinstance(value, dict):
        named = schema.get("properties", {})
        others = schema.get("additionalProperties", {} if "properties" not in schema else None)
        found = [f"{at}: {key} is missing" for key in schema.get("required", []) if key not in value]
        for key, inner in value.items():
            if key in named or others is not None:
                found += faults(inner, named.get(key, others), root, f"{at}.{key}")
            else:
                found.append(f"{at}: {key} isn't in the schema")
        return found
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a plan of each kind, timelines, an HLO module and layout files."""
    return tmp_path_factory.mktemp("documents")


@pytest.fixture
def cli(monkeypatch, capsys, folder):
    """Run a command in the folder; its standard output."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["shardroute", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert not stop.value.code, err
        return out

    return run


REFIT = ["--model", "qwen3-0.6b", "--scale", "256", "--from", "TP2", "--to", "TP4"]
GPUS = ["--machine", "dgx-h100"]
TENSOR = ["--shape", "8,8", "--from-mesh", "x=2", "--from-placements", "S0", "--to-mesh", "y=2", "--to-placements", "S1"]
RING = ["plan-ring", "--seq", "64", "--heads", "2", "--head-dim", "8",
        "--cp", "2", "--dtype", "f32", "--machine", "cpu-processes"]
LAYOUT = ["layout", "--model", "qwen3-0.6b", "--spec", "TP2", "--scale", "256"]
CHOOSE = ["choose", "--op", "all-gather", "--bytes", "1MB", "--ranks", "8", "--machine", "dgx-h100"]
COMMANDS = {
    "plan": [["plan", *REFIT, *GPUS, "-o", "a.plan"], ["plan", *TENSOR, "--machine", "cpu-processes", "-o", "b.plan"]],
    "plan-ring": [[*RING, "-o", "r.plan"]],
    "bound": [["bound", *REFIT, *GPUS]],
    "strategies": [["strategies", *TENSOR, *GPUS]],
    "strategies-list": [["strategies"]],
    "show": [["show", "a.plan"]],
    "show-part": [["show", "a.plan", "--rank", "1"]],
    "show-ring": [["show", "r.plan"]],
    "check": [["check", "a.plan"]],
    "simulate": [["simulate", "a.plan", "-o", "p.json"], ["simulate", "b.plan", "-o", "q.json"], ["simulate", "r.plan"]],
    "run": [["run", "b.plan", "-o", "m.json"], ["run", "r.plan"]],
    "compare": [["compare", "q.json", "m.json"]],
    "diff": [["diff", "a.plan", "b.plan"]],
    "diff-timelines": [["diff", "q.json", "m.json"]],
    "explain": [["explain", "a.plan", "--alone"]],
    "replan": [["replan", "a.plan", "--nic", "1=25GB/s"]],
    "choose": [CHOOSE],
    "choose-module": [["choose", "--hlo", str(DATA / "hlo" / "mixed.txt"), *GPUS]],
    "choose-steps": [["choose", "--plan", "a.plan", *GPUS]],
    "layout": [LAYOUT],
    "ring": [["ring", "--model", "llama-3-8b", "--seq", "65536", "--gpus", "8", "--cp", "4", "--tp", "1", *GPUS]],
    "layout-rank": [[*LAYOUT, "--rank", "0"]],
    "check-layouts": [["check", "--from-json", "l.json", "--to-json", "l.json"]],
    "study-refit": [["study", "refit-vs-nic", *REFIT, *GPUS, "-s", "direct", "--rates", "400Gb/s"]],
    "study-load": [["study", "gather-vs-reshard"]],
    "study-ring": [["study", "ring-vs-seq", "--model", "llama-3-8b", "--cp", "4", "--seqs", "65536", *GPUS]],
    "study-split": [["study", "split", *REFIT, *GPUS, "-s", "direct", "--gpus", "8"]],
    "machines": [["machines"]],
    "machines-show": [["machines", "show", "dgx-h100"], ["machines", "show", "cpu-processes"]],
    "machines-import": [["machines", "import", str(DATA / "clusters" / "dgx-h100.xml")]],
    "models": [["models"]],
    "models-show": [["models", "show", "llama-3-8b"]],
    "import": [["import", str(DATA / "recipes" / "base.yaml")], ["import", "--serve", "vllm serve m"]],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_schema_says(cli, name: str) -> None:
    if name == "check-layouts":
        cli(*LAYOUT, "-o", "l.json")
    schema = schema_of(name)

    for command in COMMANDS[name]:
        printed = json.loads(cli(*command, "--json"))

        assert faults(printed, schema, schema) == []


def test_a_layout_file_is_what_its_schema_says(cli, folder) -> None:
    cli(*LAYOUT, "-o", "l.json")
    schema = schema_of("layout-file")

    assert faults(json.loads((folder / "l.json").read_text()), schema, schema) == []


def test_every_document_is_held_against_a_command() -> None:
    assert set(DOCUMENTS) - set(COMMANDS) - ELSEWHERE == {"layout-file"}


def test_the_walker_finds_faults() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    assert faults({"a": "x", "b": 1}, schema, schema) == ["$.a: 'x' isn't of type ['integer']", "$: b isn't in the schema"]
    assert faults({}, schema, schema) == ["$: a is missing"]
    assert faults({"a": True}, schema, schema) == ["$.a: True isn't of type ['integer']"]


def test_schema_prints_a_schema_and_lists_the_documents(cli) -> None:
    assert json.loads(cli("schema", "plan"))["$schema"].startswith("https://json-schema.org/")
    listed = cli("schema")
    assert all(re.search(rf"^{name}\s", listed, re.MULTILINE) for name in DOCUMENTS)


def test_an_unknown_document_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match="unknown document 'plans'; known are bound, calibrate"):
        schema_of("plans")
