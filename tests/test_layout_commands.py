"""`shardroute layout` and `shardroute check` on layout files."""

import json

import pytest
from typer.testing import CliRunner

from shardroute.planner.cli import app
from shardroute.topologies.errors import InfeasibleError, InputError


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.fixture
def sides(tmp_path):
    """A source of rows over 2 ranks and a destination of columns over 3 others, for 4 layers."""
    for name, ranks, placement in (("src", [0, 1], "S0"), ("dst", [2, 3, 4], "S1")):
        mesh = {"axes": ["x"], "sizes": [len(ranks)], "ranks": ranks}
        layout = {"mesh": mesh, "placements": [placement]}
        tensors = [{"name": f"layers.{i}.w", "shape": [8, 6], "dtype": "bf16", "layout": layout} for i in range(4)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"format": "shardroute-layout", "version": 1, "tensors": tensors}))
    return tmp_path


def test_a_rank_is_shown_in_80_columns_with_layers_folded(sides) -> None:
    shown = run("layout", "--from-json", sides / "dst.json", "--rank", 3)

    assert "layers.{0-3}.w" in shown
    assert "[0:8, 2:4] of (8, 6), bf16" in shown
    assert max(len(line.rstrip()) for line in shown.splitlines() if str(sides) not in line) <= 80


def test_a_rank_is_told_to_programs_fragment_by_fragment(sides) -> None:
    found = json.loads(run("layout", "--from-json", sides / "dst.json", "--rank", 3, "--json"))

    assert found["n_bytes"] == 4 * 8 * 2 * 2
    assert found["holds"][2]["tensor"] == "layers.2.w"
    assert (found["holds"][2]["lo"], found["holds"][2]["hi"], found["holds"][2]["strides"]) == ([0, 2], [8, 4], [2, 1])


def test_ranks_that_hold_as_much_share_a_line(sides) -> None:
    assert "2-4" in run("layout", "--from-json", sides / "dst.json")


def test_a_rank_that_holds_nothing_is_refused(sides) -> None:
    with pytest.raises(InputError, match="rank 7 holds nothing; ranks 2-4 do"):
        run("layout", "--from-json", sides / "dst.json", "--rank", 7)


def test_a_model_is_laid_out_and_written_as_a_file_that_says_the_same(tmp_path) -> None:
    path = tmp_path / "m.json"
    model = ["--model", "qwen3-30b-a3b", "--spec", "TP4 x DP2", "--scale", 16]

    of_model = run("layout", *model, "--rank", 5, "--json", "-o", path)

    assert run("layout", "--from-json", path, "--rank", 5, "--json") == of_model


def test_layouts_that_fit_are_counted(sides) -> None:
    found = json.loads(run("check", "--from-json", sides / "src.json", "--to-json", sides / "dst.json", "--json"))

    assert found["ok"] is True
    assert found["coverage"]["n_pieces"] == 4 * 6
    assert found["coverage"]["n_bytes_needed"] == 4 * 8 * 6 * 2
    told = run("check", "--from-json", sides / "src.json", "--to-json", sides / "dst.json")
    assert "they fit" in " ".join(told.split())  # the title wraps where the folder's name is long


def test_layouts_that_do_not_fit_name_who_lacks_what(sides) -> None:
    path = sides / "src.json"
    data = json.loads(path.read_text())
    data["tensors"][1]["layout"] = {"fragments": [{"rank": 0, "lo": [0, 0], "hi": [8, 5]}]}
    path.write_text(json.dumps(data))

    with pytest.raises(InfeasibleError, match=r"no source rank holds layers.1.w\[0:8, 5:6\], which rank 4 needs"):
        run("check", "--from-json", path, "--to-json", sides / "dst.json")


@pytest.mark.parametrize("arguments", [[], ["--from-json", "a"], ["a.plan", "--from-json", "a", "--to-json", "b"]])
def test_check_takes_a_plan_or_two_layouts(arguments) -> None:
    with pytest.raises(InputError, match="give a PLAN, or two layout files"):
        run("check", *arguments)


@pytest.mark.parametrize("arguments", [[], ["--model", "qwen3-30b-a3b"], ["--from-json", "a", "--model", "b"]])
def test_layout_takes_a_file_or_a_model(arguments) -> None:
    with pytest.raises(InputError, match="--from-json"):
        run("layout", *arguments)


def test_the_schema_of_layout_files_is_printed() -> None:
    assert json.loads(run("layout", "--json-schema"))["$ref"] == "#/$defs/LayoutDocument"


def test_a_model_that_no_family_describes_is_planned_from_its_safetensors_index(tmp_path) -> None:
    for name, tensor in (("a", "x"), ("b", "y")):
        head = json.dumps({tensor: {"dtype": "BF16", "shape": [8, 6], "data_offsets": [0, 96]}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(96))
    index = {"metadata": {}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    layout = {"mesh": {"axes": ["tp"], "sizes": [2], "ranks": [2, 3]}, "placements": ["S0"]}
    tensors = [{"name": name, "shape": [8, 6], "dtype": "bf16", "layout": layout} for name in "xy"]
    served = tmp_path / "served.json"
    served.write_text(json.dumps({"format": "shardroute-layout", "version": 1, "tensors": tensors}))
    source = tmp_path / "model.safetensors.index.json"

    planned = json.loads(run("plan", "--from-json", source, "--to-json", served, "--machine", "dgx-h100", "--json"))
    shown = run("layout", "--from-json", tmp_path, "--rank", "1")

    assert (planned["n_src_gpus"], planned["n_dst_gpus"], planned["n_bytes_moved"]) == (2, 2, 192)
    assert "[0:8, 0:6] of (8, 6), bf16" in shown


@pytest.mark.parametrize("more", [["--convention", "zzz"], ["--scale", "4"], ["--mtp"], ["--precision", "fp8-block"]])
def test_options_of_a_model_do_not_go_with_a_file(sides, more) -> None:
    with pytest.raises(InputError, match=f"--from-json doesn't go with {more[0]}"):
        run("layout", "--from-json", sides / "src.json", *more)
