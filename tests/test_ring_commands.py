"""`shardroute ring`, `choose` and `validate --ring` as a user meets them."""

import json
import re
from pathlib import Path

import pytest

DUMPS = Path(__file__).parent / "data" / "hlo"
STEP = ["ring", "--model", "llama-3-8b", "--seq", "131072", "--cp", "16", "--tp", "1", "--machine", "gb200-nvl72"]
PERMUTE = ["choose", "--op", "collective-permute", "--bytes", "32MiB", "--ranks", "16", "--machine", "gb200-nvl72"]


def test_ring_predicts_the_step_that_was_asked_for(cli) -> None:
    code, out, _ = cli(*STEP, "--backend", "nvshmem", "--json")

    found = json.loads(out)
    assert code == 0
    assert (found["cp"], found["tp"], found["fsdp"], found["strategy"], found["backend"]) == (16, 1, 1, "ring", "nvshmem")
    assert found["step_s"] == pytest.approx(found["compute_s"] + found["exposed_comm_s"])
    assert found["tflops_per_gpu"] == pytest.approx(472.46, rel=0.06)  # published
    parts = ("kv_bytes", "activation_bytes", "weight_bytes", "optimizer_bytes")
    assert found["memory_bytes"] == pytest.approx(sum(found[key] for key in parts))


def test_ring_ranks_layouts_and_says_why(cli) -> None:
    code, out, _ = cli(
        "ring", "--model", "llama-3-8b", "--seq", "262144", "--gpus", "32", "--machine", "gb200-nvl72", "--batch", "0.25",
        "--json",
    )  # fmt: skip

    found = json.loads(out)
    times = [row["step_s"] for row in found["layouts"] if row["fits"]]
    assert code == 0
    assert times == sorted(times)
    assert all(row["cp"] * row["tp"] * row["fsdp"] == 32 for row in found["layouts"])
    assert len({row["strategy"] for row in found["layouts"]}) > 1
    assert "% faster" in found["why"]


def test_ring_shows_memory_and_exposed_communication_in_a_table(cli) -> None:
    code, out, _ = cli(*STEP)

    assert code == 0
    assert re.search(r"16 x 1 x 1\s+ring nccl-put\s+[\d.]+ s\s+\d+\.\d\s+[\d.]+ s\s+[\d.]+\+[\d.]+\+[\d.]+\+[\d.]+\s+yes", out)


def test_ring_says_when_nothing_fits(cli) -> None:
    asked = ["ring", "--model", "llama-3-8b", "--seq", "1048576", "--gpus", "16", "--machine", "gb200-nvl72"]

    code, out, _ = cli(*asked)

    assert code == 0
    assert "none fits: a tenth of a GPU's 186 GB must stay free" in " ".join(out.split())
    batch = re.search(r"with --batch ([\d.]+) one fits", " ".join(out.split()))
    assert batch is not None
    assert json.loads(cli(*asked, "--batch", batch[1], "--json")[1])["fits"]
    assert not json.loads(cli(*asked, "--batch", str(2 * float(batch[1])), "--json")[1])["fits"]


def test_ring_says_when_fewer_sequences_do_not_help(cli) -> None:
    code, out, _ = cli("ring", "--model", "llama-3-8b", "--seq", "67108864", "--gpus", "8", "--machine", "gb200-nvl72")

    assert code == 0
    assert "fewer sequences don't help" in " ".join(out.split())


def test_choose_gives_flags_for_a_way_that_is_as_fast_as_the_chosen_one(cli) -> None:
    asked = ["choose", "--op", "collective-permute", "--bytes", "32MiB", "--ranks", "16", "--machine", "gb200-nvl72"]

    code, out, _ = cli(*asked, "--json")
    _, table, _ = cli(*asked)

    found = json.loads(out)
    rules = next(rules for rules in found["rules"] if rules["rules"] == "xla-0.8.1")
    assert code == 0
    times = {option["backend"]: option["predicted_s"] for option in found["options"]}
    assert found["backend"] == "nccl-put"
    assert times["nvshmem-put"] == times["nccl-put"]
    assert rules["flags"] == ["--xla_gpu_experimental_enable_nvshmem=true"]
    assert rules["flags_for"] == "nvshmem-put"
    assert "nvshmem-put, as fast" in " ".join(table.split())


def test_the_table_of_a_programs_collectives_names_each(cli) -> None:
    _, out, _ = cli("choose", "--hlo", str(DUMPS / "mixed.txt"), "--machine", "dgx-h100")

    first = out.partition("Collectives in order")[2].partition("Why")[0]
    assert all(
        re.search(rf"^{name}\b", first, re.MULTILINE) for name in ("ppermute.3", "psum.8", "reduce_scatter.7", "all-to-all")
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "llama-3-8b", "--seq", "131072", "--machine", "gb200-nvl72"], "give --gpus N"),
        (
            ["--model", "llama-3-8b", "--seq", "131072", "--cp", "8", "--machine", "gb200-nvl72", "--calibration", "nominal"],
            "has no [p2p] table",
        ),
        (["--model", "llama-3-8b", "--seq", "131071", "--cp", "16", "--machine", "gb200-nvl72"], "isn't divisible by 2 x cp"),
        (["--model", "deepseek-v3", "--seq", "131072", "--cp", "16", "--machine", "gb200-nvl72"], "experts"),
        (["--model", "llama-3-8b", "--seq", "131072", "--cp", "16", "--machine", "cpu-processes"], "no GPUs"),
        (["--model", "llama-3-8b", "--seq", "131072", "--gpus", "32", "--machine", "dgx-h100 x 2"], "dgx-h100 x 4"),
        (
            ["--model", "llama-3-8b", "--seq", "131072", "--cp", "16", "--machine", "dgx-h100", "--backend", "nvshmem"],
            "one NVLink domain",
        ),
        (["--model", "llama-3-8b", "--seq", str(2**63), "--cp", "4", "--machine", "gb200-nvl72"], "at most 2^40 tokens"),
        (
            ["--model", "llama-3-8b", "--seq", "131072", "--gpus", "32", "--machine", "gb200-nvl72", "--batch", "0.3"],
            "expected a whole number",
        ),
    ],
)
def test_a_mistake_ends_in_one_line(cli, arguments: list[str], reason: str) -> None:
    code, out, err = cli("ring", *arguments)

    assert (code, out) == (2, "")
    assert reason in " ".join(err.split())


def test_choose_says_which_margin_decided_and_what_xla_would_take(cli) -> None:
    code, out, _ = cli(*PERMUTE, "--rules", "xla-0.8.1", "--json")

    found = json.loads(out)
    (rules,) = found["rules"]
    assert code == 0
    assert (found["backend"], rules["backend"]) == ("nvshmem-put", "nvshmem")
    assert rules["flags"] == ["--xla_gpu_experimental_enable_nvshmem=true"]
    assert found["decided_by"].startswith("margin")
    assert {row["backend"] for row in found["options"]} == {"nccl", "nccl-put", "nvshmem-put"}


def test_choose_lists_every_release_whose_rules_changed(cli) -> None:
    code, out, _ = cli(*PERMUTE)

    assert code == 0
    for release in ("xla-0.6.2", "xla-0.7.2", "xla-0.8.1", "xla-0.10.1", "xla-0.10.2"):
        assert release in out


def test_choose_heeds_the_library_at_hand(cli) -> None:
    _, out, _ = cli(*PERMUTE, "--library-version", "nccl=2.28.9", "--json")

    put = next(row for row in json.loads(out)["options"] if row["backend"] == "nccl-put")
    assert (put["possible"], put["predicted_s"]) == (False, None)


def test_choose_takes_pairs_and_a_copy_is_one_of_them(cli) -> None:
    where = ("--machine", "gb200-nvl72", "--rules", "xla-0.8.1")
    code, out, _ = cli("choose", "--pairs", "0>5", "--bytes", "1GiB", *where, "--json")

    found = json.loads(out)
    put = next(row for row in found["options"] if row["backend"] == "nvshmem-put")
    assert (code, found["op"], found["group_size"]) == (0, "collective-permute", 2)
    assert "without a source" in put["reason"]


def test_choose_reads_every_collective_of_a_dump(cli) -> None:
    code, out, _ = cli("choose", "--hlo", str(DUMPS / "mixed.txt"), "--machine", "gb200-nvl72", "--json")

    found = json.loads(out)
    assert code == 0
    assert (found["n_devices"], len(found["collectives"])) == (8, 5)
    permute = found["collectives"][0]
    assert any("no source" in hazard for rules in permute["rules"] for hazard in rules["hazards"])


def test_choose_shows_a_dump_s_hazards_once(cli) -> None:
    code, out, _ = cli("choose", "--hlo", str(DUMPS / "mixed.txt"), "--machine", "gb200-nvl72")

    assert code == 0
    assert "2 x 4" in out
    assert out.count("0.6.2, 0.7.2, 0.8.1, 0.10.1") >= 2
    assert len(re.findall(r"^ppermute\.3\s+0\.6\.2", out, re.MULTILINE)) == 1


ALL_REDUCE = ["--op", "all-reduce", "--bytes", "1MiB", "--machine", "gb200-nvl72"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--op", "collective-permute", "--machine", "gb200-nvl72"], "give --op, --bytes and --ranks"),
        (["--op", "all-reduce", "--bytes", "0B", "--ranks", "4", "--machine", "gb200-nvl72"], "above 0"),
        (["--op", "all-reduce", "--bytes", "1MiB", "--ranks", "4", "--machine", "gb200-nvl72", "--rules", "jax"], "xla-0.8.1"),
        (["--op", "all-reduce", "--bytes", "1MiB", "--ranks", "4", "--machine", "cpu-processes"], "no GPUs"),
        (["--pairs", "0>1,0>2", "--bytes", "1MiB", "--machine", "gb200-nvl72"], "each device a source once"),
        (["--pairs", "0>1", "--op", "all-reduce", "--bytes", "1MiB", "--machine", "gb200-nvl72"], "don't go together"),
        (["--hlo", "nowhere.txt", "--machine", "gb200-nvl72"], "nowhere.txt"),
        (["--hlo", "a", "--op", "all-reduce", "--machine", "gb200-nvl72"], "don't go together"),
        (
            ["--op", "all-reduce", "--bytes", "1MiB", "--ranks", "4", "--devices", "2", "--machine", "gb200-nvl72"],
            "--ranks 4: the whole program has --devices 2; give --devices 4 or more",
        ),
        (
            ["--op", "all-reduce", "--bytes", "1MiB", "--ranks", "4", "--machine", "gb200-nvl72", "--library-version", "cuda=1"],
            "expected nccl=VERSION",
        ),
        ([*ALL_REDUCE, "--ranks", str(2**63)], f"--ranks {2**63}: expected at most 1048576"),
        ([*ALL_REDUCE, "--ranks", "4", "--devices", str(2**63)], f"--devices {2**63}: expected at most 1048576"),
        ([*ALL_REDUCE, "--ranks", "4", "--devices-per-process", "8"], "--devices-per-process 8: the whole program has 4"),
        ([*ALL_REDUCE, "--ranks", "4", "--library-version", "nccl=2.29.7", "--library-version", "nccl=2.20.1"], "nccl twice"),
        (["--op", "all-reduce", "--bytes", "1MiB", "--ranks", "400", "--machine", "gb200-nvl72 x 1"], "use 'gb200-nvl72 x 6'"),
        (["--pairs", "0>0", "--bytes", "1MiB", "--machine", "gb200-nvl72"], "nothing goes from one device to another"),
        (["--hlo", "a", "--pairs", "0>1", "--machine", "gb200-nvl72"], "--hlo and --pairs don't go together"),
        (["--hlo", "a", "--dtype", "f32", "--machine", "gb200-nvl72"], "--hlo and --dtype don't go together"),
    ],
)
def test_a_mistaken_choice_ends_in_one_line(cli, arguments: list[str], reason: str) -> None:
    code, out, err = cli("choose", *arguments)

    assert (code, out) == (2, "")
    assert reason in " ".join(err.split())


@pytest.mark.parametrize(
    "command",
    [
        ["choose", "--op", "all-reduce", "--bytes", "1MiB", "--ranks", "4"],
        ["ring", "--model", "llama-3-8b", "--seq", "131072", "--cp", "16"],
        ["plan-ring", "--model", "llama-3-8b", "--seq", "8192", "--cp", "4"],
    ],
)
def test_costs_of_another_machine_are_said_aloud(cli, command: list[str]) -> None:
    code, _, err = cli(*command, "--machine", "dgx-h100", "--calibration", "gb200-nvl72")

    assert code == 0
    assert "CALIBRATED FOR ANOTHER MACHINE" in err


def test_nominal_costs_of_a_ring_are_said_aloud(cli) -> None:
    call = ["--model", "llama-3-8b", "--seq", "8192", "--cp", "4", "--machine", "gb200-nvl72"]

    _, out, err = cli("plan-ring", *call, "--calibration", "nominal")

    assert "NOT CALIBRATED" in err
    assert "NOTHING MEASURED" in out


def test_validate_shows_every_group_and_what_is_unexplained(cli) -> None:
    code, out, _ = cli("validate", "--ring")

    assert code == 0
    assert out.count("UNEXPLAINED") == 2
    assert "ring-flash-attention README" in out
    assert "not predicted" in out


OWN = (
    "id,source,system,impl,scheme,layout,ulysses,direction,mask,cp,nodes,seq,heads,kv_heads,head_dim,batch,kernel,alone,unit,value,"
    "skip\n"
)


def test_validate_predicts_rows_of_one_s_own(cli, tmp_path) -> None:
    path = tmp_path / "mine.csv"
    mine = "a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,fa3,,TFLOP/s/GPU,440,\n"
    path.write_text(OWN + mine + "b,,,,,,,,,,,,,,,,,,,1,no\n")

    code, out, _ = cli("validate", "--ring", "--ring-rows", str(path), "--json")

    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert abs(row["error"]) < 0.15
    assert not row["fitted"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a,me,h200,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,fa3,,ms,4,", "system 'h200': expected one of h100"),
        ("a,me,h100,ring,star,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,fa3,,ms,4,", "scheme 'star'"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,many,64,8,128,1,fa3,,ms,4,", "line 2"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,fa9,,ms,4,", "kernel 'fa9'"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,,,ms,4,", "give a kernel"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,0,2,131072,64,8,128,1,fa3,,ms,4,", "above 0"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,fa3,,miles,4,", "unit 'miles'"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131073,64,8,128,1,fa3,,ms,4,", "seq 131073 isn't divisible by cp 16"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,3,131072,64,8,128,1,fa3,,ms,4,", "cp 16 isn't divisible by nodes 3"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,7,128,1,fa3,,ms,4,", "heads 64 isn't divisible by kv_heads 7"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,,1e-320,ms,4,", "alone 1e-320"),
        ("a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,fa3,,TFLOP/s/GPU,1e308,", "value 1e+308"),
        ("x" * 200_000 + ",me,h100,ring,ring,zigzag,1,fwd,causal,16,2,131072,64,8,128,1,fa3,,ms,4,", "larger than field limit"),
        (f"a,me,h100,ring,ring,zigzag,1,fwd,causal,16,2,{2**63},64,8,128,1,fa3,,ms,4,", "up to 2^40"),
    ],
)
def test_a_row_of_one_s_own_that_cannot_be_read_is_refused(cli, tmp_path, line: str, reason: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(OWN + line + "\n")

    code, out, err = cli("validate", "--ring", "--ring-rows", str(path))

    assert (code, out) == (2, "")
    assert reason in " ".join(err.split())


def test_validate_gives_each_row_with_its_source(cli) -> None:
    _, out, _ = cli("validate", "--ring", "--json")

    found = json.loads(out)
    assert {row["kind"] for row in found["rows"]} == {"step", "attention", "unexplained", "kernel"}
    assert all(row["source"] for row in found["rows"])
    assert sum(not gain["explained"] for gain in found["gains"]) == 2
