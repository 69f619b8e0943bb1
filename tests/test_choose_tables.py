"""What `choose`, `ring`, `plan` and `diff` print for people: flags to copy, rows in order, and how much is left out."""

import json
import re
from pathlib import Path

import pytest
from hand_plans import rows_to_columns

from shardroute.planner.plan_files import save_plan

DUMPS = Path(__file__).parent / "data" / "hlo"
PERMUTES = "HloModule many, num_partitions=4\n\nENTRY main {{\n  kv = bf16[8,8]{{1,0}} parameter(0)\n{}\n}}\n"


@pytest.fixture
def dump(tmp_path: Path) -> str:
    """Twelve permutes, the last a small one, by numbers whose order as text is another."""
    line = "  permute.{} = bf16[{},8]{{1,0}} collective-permute(kv), source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}"
    lines = [line.format(number, 2**20 if number < 12 else 8) for number in range(1, 13)]
    (tmp_path / "dump.txt").write_text(PERMUTES.format("\n".join(lines)))
    return str(tmp_path / "dump.txt")


def test_a_dump_s_reasons_stand_in_its_own_order(dump: str, cli) -> None:
    code, out, _ = cli("choose", "--hlo", dump, "--machine", "gb200-nvl72")

    why = out.partition("\nWhy")[2].partition("XLA_FLAGS")[0]
    assert code == 0
    assert re.findall(r"^permute\.(\d+)", why, re.MULTILINE) == [str(number) for number in range(1, 13)]


def test_flags_are_printed_for_a_dump_and_where_collectives_want_different_ones_for_each(dump: str, cli) -> None:
    _, out, _ = cli("choose", "--hlo", dump, "--machine", "gb200-nvl72")
    told = json.loads(cli("choose", "--hlo", dump, "--machine", "gb200-nvl72", "--json")[1])

    flags = out.partition("XLA_FLAGS for the choices")[2]
    assert {row["name"]: row["backend"] for row in told["collectives"]}["permute.12"] == "nccl"
    assert "flags hold for a whole program" in flags
    put = "--xla_gpu_experimental_enable_nvshmem=false --xla_gpu_collective_permute_mode=symmetric"
    assert f"xla-0.10.1 for permute.1, permute.2, permute.3 and 8 more: {put}\n" in flags
    assert "xla-0.10.1 for permute.12: --xla_gpu_experimental_enable_nvshmem=false\n" in flags
    assert "xla-0.10.2 for permute.12: none needed\n" in flags


def test_flags_that_all_want_are_one_line_a_release(tmp_path: Path, cli) -> None:
    line = "  next = bf16[1048576,8]{1,0} collective-permute(kv), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    (tmp_path / "one.txt").write_text(PERMUTES.format(line))

    _, out, _ = cli("choose", "--hlo", str(tmp_path / "one.txt"), "--machine", "gb200-nvl72", "--rules", "xla-0.11.1")

    assert out.partition("XLA_FLAGS for the choice\n")[2].strip() == "xla-0.11.1: --xla_gpu_collective_permute_mode=symmetric"


def test_steps_of_a_plan_that_differ_only_in_their_ranks_are_one_row_with_their_number(tmp_path: Path, cli) -> None:
    save_plan(rows_to_columns(), tmp_path / "a.plan")
    command = ["choose", "--plan", str(tmp_path / "a.plan"), "--machine", "dgx-h100"]

    told = json.loads(cli(*command, "--json")[1])["steps"]
    _, out, _ = cli(*command)

    rows = re.findall(r"^ *(\d+) +collective-permute +16 B", out.partition("\nWhy")[0], re.MULTILINE)
    assert len(told) > 1
    assert rows == [str(sum(row["count"] for row in told))]
    assert "XLA_FLAGS for the choices" in out


def test_which_communicator_a_permute_has_is_said_with_its_time(cli) -> None:
    asked = ["choose", "--op", "collective-permute", "--bytes", "1MiB", "--ranks", "4", "--devices", "32"]
    asked += ["--machine", "gb200-nvl72"]

    whole, own = (" ".join(cli(*asked, "--rules", rules)[1].split()) for rules in ("xla-0.8.1", "xla-0.10.1"))

    assert "1 channel of a communicator of 32: all devices of the program, as XLA before JAX 0.10.0 has it" in whole
    assert "8 channels of a communicator of 4 " in own
    assert "if NVSHMEM is enabled, which it isn't by default" in own


def test_ring_says_how_many_layouts_there_are_beside_those_shown(cli) -> None:
    ring = ["ring", "--model", "llama-3-8b", "--seq", "128K", "--machine", "gb200-nvl72"]

    many, one = (cli(*ring, *more)[1] for more in (["--gpus", "8"], ["--cp", "8", "--tp", "1", "--backend", "nccl"]))

    n_told = int(re.search(r"the best 12 of (\d+);", many)[1])
    assert n_told > 12
    assert len(re.findall(r"^ *\d+ x \d+ x \d+ ", many, re.MULTILINE)) == 12
    assert "Layouts (cp x tp x fsdp), best first; GB a GPU" in one


def test_a_machine_without_costs_is_told_of_those_that_ship(tmp_path: Path, cli) -> None:
    shown = cli("machines", "show", "dgx-h100", "--json")[1]
    assert json.loads(shown)["name"] == "dgx-h100"
    ours = Path(__file__).parent.parent / "topologies" / "machines" / "dgx-h100.toml"
    (tmp_path / "mine.toml").write_text(ours.read_text())
    (tmp_path / "other.toml").write_text(ours.read_text().replace("NVIDIA H100", "NVIDIA Z900"))
    sides = ["--from-mesh", "x=2", "--from-placements", "S0", "--to-mesh", "x=2", "--to-placements", "S1"]
    move = ["plan", "--shape", "8,8", *sides, "--machine"]

    alike, unlike = (cli(*move, str(tmp_path / f"{name}.toml")) for name in ("mine", "other"))

    assert (alike[0], unlike[0]) == (2, 2)
    assert "give --calibration dgx-h100, a machine with the same GPUs" in alike[2]
    assert "that of a machine like it (cpu-processes, dgx-b200, dgx-h100, gb200-nvl72, hgx-h200)" in unlike[2]


def test_diff_compares_the_memory_to_pack_in(tmp_path: Path, cli) -> None:
    save_plan(rows_to_columns(), tmp_path / "a.plan")
    cli("plan", "--shape", "8,8", "--from-mesh", "x=2", "--from-placements", "S0", "--to-mesh", "x=2", "--to-placements", "S0",
        "--machine", "cpu-processes", "-o", str(tmp_path / "b.plan"))  # fmt: skip

    found = json.loads(cli("diff", str(tmp_path / "a.plan"), str(tmp_path / "b.plan"), "--json")[1])

    (packing,) = [row for row in found["numbers"] if row["name"] == "packing, peak a rank"]
    assert packing["first"] > 0
