"""`shardroute bound` and `replan`, and what `plan` says of strategies, of its cache, and of unlike GPUs and groups."""

import json
import re

import numpy as np
import pytest

from shardroute.planner.layouts import lay_out, load_model, parse_spec
from shardroute.planner.layouts.holdings import holdings
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.refits import groups_problem, refit_problem
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

TENSOR = [
    "--shape", "8192,8192", "--from-mesh", "dp=8", "--from-placements", "R", "--to-mesh", "dp=4,tp=4", "--to-placements", "R,S0",
    "--machine", "dgx-h100",
]  # fmt: skip

# The same at a 64th of the bytes, where the size isn't the point.
SMALL = ["--shape", "1024,1024", *TENSOR[2:]]


def test_bound_lists_cuts_tightest_first(cli) -> None:
    code, out, _ = cli("bound", *TENSOR, "--json")

    found = json.loads(out)
    seconds = [cut["seconds"] for cut in found["cuts"]]
    assert code == 0
    assert seconds == sorted(seconds, reverse=True)
    assert found["lower_bound_s"] == seconds[0] == pytest.approx(2 * 8192**2 / (8 * 50e9))
    assert found["least_bytes_cross_domain"] == 2 * 2 * 8192**2
    assert {"name", "n_bytes", "seconds"} == found["cuts"][0].keys()


def test_bound_without_staging_has_one_more_cut(cli) -> None:
    both = [json.loads(cli("bound", *TENSOR, "--json", *more)[1]) for more in ([], ["--max-staging", "0B"])]
    names = [{cut["name"] for cut in found["cuts"]} for found in both]

    assert {name.partition(" it ")[0] for name in names[1] - names[0]} == {"NICs into ranks that need"}


def test_bound_for_people_names_the_problem_and_its_cuts(cli) -> None:
    _, out, _ = cli("bound", *TENSOR)

    assert "What no plan can beat" in out
    assert "NICs into domain 1" in out


@pytest.mark.parametrize(
    ("shape", "most"),
    [("8192,8192", 2.0), ("65536,16384", 0.5)],  # up to 2 % over where starts of messages count, else it stops (docs/routing.md)
)
def test_optimal_says_its_gap_and_solver_and_json_stays_json(cli, shape: str, most: float) -> None:
    tensor = [shape if each == TENSOR[1] else each for each in TENSOR]

    notes = json.loads(cli("plan", *tensor, "-s", "optimal", "--time-limit", "5", "--json")[1])["notes"]

    assert set(notes) == {"busiest link, nominal", "no plan beats, nominal", "solver"}
    gap = re.search(r"\(gap (\d+\.\d\d)%\)", notes["no plan beats, nominal"])
    assert float(gap[1]) <= most


def test_auto_says_what_it_chose_and_why(cli) -> None:
    found = json.loads(cli("plan", *TENSOR, "-s", "auto", "--json")[1])

    assert found["notes"]["chosen"].startswith(f"{found['strategy']} is predicted at")


@pytest.mark.parametrize("option", [("--max-staging", "much"), ("--max-ops-in-flight", "0"), ("--time-limit", "-1")])
def test_limits_that_make_no_sense_end_in_one_message(cli, option) -> None:
    code, out, err = cli("plan", *TENSOR, "-s", "greedy", *option)

    assert (code, out) == (2, "")
    assert err.startswith("error: ")


MODEL = ["--model", "qwen3-30b-a3b", "--scale", "64", "--from", "TP2 x PP2 x EP4"]


def test_a_plan_is_carried_by_the_backends_that_the_user_allows(cli) -> None:
    carried = {
        name: json.loads(cli("plan", *TENSOR, "-s", "greedy", "--backends", name, "--json")[1])["notes"]["carried by"]
        for name in ("nccl", "nvshmem")
    }

    assert carried == {"nccl": "nccl 100%", "nvshmem": "nvshmem 100%"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backends", "ucx"), "expected one of nccl, nccl-put, nvshmem"),
        (("--backends", "nccl,nccl"), "names one twice"),
        (("--backends", "nvshmem", "-s", "hybrid"), "carried by NCCL alone"),
        (("--backends", "nccl", "--machine", "cpu-processes"), "has no GPUs"),
    ],
)
def test_backends_that_make_no_sense_end_in_one_message(cli, options, message) -> None:
    code, _, err = cli("plan", *TENSOR, *options)

    assert code == 2
    assert message in " ".join(err.split())


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan file of 8 source and 16 destination GPUs on three DGX."""
    path = str(tmp_path_factory.mktemp("plans") / "a.plan")
    model, specs = load_model("qwen3-30b-a3b", 64), (parse_spec("TP2 x PP2 x EP4"), parse_spec("TP4 x DP4"))
    problem = refit_problem(model, *specs)[0]
    save_plan(make_plan(problem, build_topology(load_machine("dgx-h100"), None, problem.n_ranks), "greedy"), path)
    return path


def test_a_plan_comes_from_the_cache_the_second_time(cli, tmp_path) -> None:
    for strategy in ("greedy", "auto"):
        first, second = (
            json.loads(cli("plan", *SMALL, "-s", strategy, "--cache", str(tmp_path), "--json")[1]) for _ in range(2)
        )

        assert first["notes"]["kept in"] == second["notes"]["from cache"] == str(tmp_path)
        assert "from cache" not in first["notes"]
        assert first["digest"] == second["digest"]
        assert first["predicted_s"] == second["predicted_s"]
    assert len(list(tmp_path.iterdir())) == 2


def test_another_machine_or_limit_is_not_taken_from_the_cache(cli, tmp_path) -> None:
    for more in ([], ["--max-staging", "0B"], ["--nic", "3=25GB/s"]):
        found = json.loads(cli("plan", *SMALL, "-s", "greedy", "--cache", str(tmp_path), "--json", *more)[1])

        assert "from cache" not in found["notes"]


def test_where_the_plan_cannot_be_written_is_said_before_anything_is_planned(cli, tmp_path) -> None:
    cache = tmp_path / "cache"

    code, out, err = cli("plan", *TENSOR, "-s", "greedy", "--cache", str(cache), "-o", str(tmp_path / "none" / "a.plan"))

    assert (code, out) == (2, "")
    assert "can't write the plan" in err
    assert not cache.exists()


def test_a_cache_that_cannot_be_a_folder_ends_in_one_message(cli, tmp_path) -> None:
    (tmp_path / "file").write_text("")

    code, out, err = cli("plan", *TENSOR, "-s", "greedy", "--cache", str(tmp_path / "file" / "cache"))

    assert (code, out) == (2, "")
    assert err.startswith("error: can't write plans to")


def test_replanning_says_what_was_kept_and_what_changed(cli, planned, tmp_path) -> None:
    after = str(tmp_path / "b.plan")

    found = json.loads(cli("replan", planned, "--nic-down", "9", "--slow-domain", "0=0.5", "-o", after, "--json")[1])

    down = {"gpu": 9, "before_Bps": 50e9, "after_Bps": 0.0}
    halved = [{"gpu": gpu, "before_Bps": 50e9, "after_Bps": 25e9} for gpu in range(8)]
    assert found["nics"] == [*halved, down]
    assert found["gone"] == found["new"] == []
    assert found["n_bytes_kept"] + found["n_bytes_anew"] == found["n_tensor_bytes"]
    assert found["n_bytes_anew"] > 0
    assert json.loads(cli("check", after, "--json")[1])["digest"] == found["digest"] != found["digest_before"]


def test_a_host_that_goes_is_replaced_and_its_gpus_are_left_alone(cli, planned, tmp_path) -> None:
    after = tmp_path / "b.plan"

    code, out, _ = cli("replan", planned, "--gone", "20-23", "--new", "24-27=20-23", "-o", str(after))

    steps = load_plan(after).steps
    assert code == 0
    assert "ranks gone" in out
    assert "24-27" in out
    assert not np.isin([steps.src, steps.dst], [20, 21, 22, 23]).any()
    assert set(range(24, 28)) <= set(steps.dst.tolist())
    assert cli("check", str(after))[0] == 0


def test_a_process_that_is_gone_has_no_nic_to_silence(cli, tmp_path) -> None:
    before, after = str(tmp_path / "before.plan"), str(tmp_path / "after.plan")
    source = ("--from-mesh", "tp=2,dp=2", "--from-placements", "S0,R")
    target = ("--to-mesh", "dp=2", "--to-placements", "R", "--machine", "cpu-processes")
    cli("plan", "--shape", "64,8", *source, *target, "-s", "greedy", "-o", before)

    code, _, err = cli("replan", before, "--gone", "3", "-o", after)

    assert (code, cli("check", after)[0]) == (0, 0), err


def test_a_change_leaves_alone_what_it_does_not_touch(cli, planned) -> None:
    found = json.loads(cli("replan", planned, "--nic", "9=49GB/s", "--json")[1])

    assert found["n_bytes_kept"] > found["n_bytes_anew"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing has changed"),
        (["--gone", "99"], "rank 99 holds and needs nothing"),
        (["--gone", "0-7"], "no source rank holds it"),
        (["--gone", "12-x"], "isn't a rank"),
        (["--new", "24"], "expected new ranks and whom they are like"),
        (["--new", "24=12-13"], "expected as many, each once"),
        (["--new", "24-25=0-1"], "rank 0 needs nothing"),
        (["--new", "12=13", "--gone", "12"], "both in --new and in --gone"),
        (["--slow-domain", "9=0.5"], "expected a domain of 0 to 2"),
        (["--slow-domain", "1=2"], "a share of 0 to 1"),
        (["--slow-domain", "1"], "expected a domain and a share"),
        (["--nic", "3"], "expected GPUs and what their NICs carry"),
        (["--nic", "99=0"], "own NICs are given for GPUs"),
        (["--nic", "3=25XB/s"], "is not a bandwidth"),
        (["--nic-down", "8-15"], "has no bandwidth"),
        (["--nic-down", "3", "-o", "no/such/folder.plan"], "can't write the plan"),
    ],
)
def test_a_change_that_makes_no_sense_ends_in_one_message(cli, planned, options, message) -> None:
    code, out, err = cli("replan", planned, *options)

    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


def test_a_plan_of_collectives_is_refused_by_replan(cli, tmp_path) -> None:
    path = str(tmp_path / "g.plan")
    cli("plan", *TENSOR, "-s", "gather-broadcast", "-o", path)

    code, _, err = cli("replan", path, "--nic-down", "3")

    assert code == 2
    assert "it has collectives" in err


def test_nics_that_differ_change_bound_and_plan(cli) -> None:
    for command in (["bound"], ["plan", "-s", "greedy"]):
        whole, slower = (
            json.loads(cli(command[0], *SMALL, *command[1:], *more, "--json")[1])
            for more in ([], ["--nic", "0-3=25GB/s", "--nic", "5=0"])
        )

        assert slower["lower_bound_s"] > whole["lower_bound_s"]


def test_machines_of_different_kinds_stand_on_one_fabric(cli, tmp_path) -> None:
    path = str(tmp_path / "a.plan")
    two = [*TENSOR[:-1], "dgx-h100 x 1 + gb200-nvl72"]

    found = json.loads(cli("plan", *two, "-s", "greedy", "-o", path, "--json")[1])

    topology = load_plan(path).topology
    assert found["machine"] == topology.title == "dgx-h100 x 1 + gb200-nvl72 x 1"
    assert topology.domain.tolist() == [0] * 8 + [1] * 72
    assert found["n_bytes_cross_domain"] == 2 * 8192**2
    assert cli("check", path)[0] == 0


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ("dgx-h100 + gb200-nvl72", "'dgx-h100' needs a count"),
        ("dgx-h100 x 1 + cpu-processes", "don't go together"),
        ("cpu-processes x 2 + cpu-processes x 30", "24"),
        ("dgx-h100 x 1 + nowhere", "nowhere"),
    ],
)
def test_machines_that_do_not_go_together_are_refused(cli, machine, message) -> None:
    code, _, err = cli("plan", *TENSOR[:-1], machine, "-s", "greedy")

    if "cpu-processes x 2" in machine:  # one machine, said in two parts
        assert code == 0
        return
    assert code == 2
    assert message in err


def test_several_inference_groups_are_one_problem(cli, tmp_path) -> None:
    path = str(tmp_path / "a.plan")
    to = ["--to", "TP4 x DP2 + TP2 x DP3", "--to-convention", "vllm + sglang"]

    found = json.loads(cli("plan", *MODEL, *to, "-m", "dgx-h100", "-s", "greedy", "-o", path, "--json")[1])

    plan = load_plan(path)
    assert plan.problem.target.ranks.tolist() == list(range(8, 22))
    assert (found["n_src_gpus"], found["n_dst_gpus"]) == (8, 14)
    assert found["layouts"]["destination group 0 convention"] == "vllm"
    assert found["layouts"]["destination group 1 layout"] == "TP2 x DP3"
    assert cli("check", path)[0] == 0


def test_each_group_has_what_it_has_alone() -> None:
    model = load_model("qwen3-30b-a3b", 64)
    specs = [parse_spec("TP4 x DP2"), parse_spec("TP2 x DP3")]

    together, _ = groups_problem(model, parse_spec("TP2 x PP2 x EP4"), specs, to_conventions=["vllm", "sglang"])

    for first, end, convention, spec in ((8, 16, "vllm", specs[0]), (16, 22, "sglang", specs[1])):
        alone = lay_out(convention, model, spec, first_rank=first).layout
        for i, tensor in enumerate(model.tensors):
            held = holdings([tensor], Layout(together.target.fragments[i : i + 1], together.target.buffers[i : i + 1]), first)
            assert held == holdings([tensor], Layout(alone.fragments[i : i + 1], alone.buffers[i : i + 1]), first)
        assert end - 1 in together.target.ranks


def test_a_destination_may_sit_on_the_sources_gpus(cli) -> None:
    options = [*MODEL, "--to", "TP4 x DP2", "-m", "dgx-h100", "-s", "greedy", "--json"]

    apart, colocated = (json.loads(cli("plan", *options, *more)[1]) for more in ([], ["--to-first-rank", "0"]))

    assert colocated["machine"] == "dgx-h100 x 1"
    assert colocated["n_bytes_cross_domain"] == 0 < apart["n_bytes_cross_domain"]
    assert colocated["n_bytes_moved"] < apart["n_bytes_moved"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "TP4 x DP2 + TP2", "--to-convention", "vllm + vllm + vllm"], "3 destination conventions for 2 groups"),
        (["--to", "TP4 + ", "--to-convention", "vllm"], "layout"),
        (["--to", "TP4", "--to-first-rank", "-1"], "expected 0 or more"),
    ],
)
def test_groups_that_make_no_sense_end_in_one_message(cli, options, message) -> None:
    code, out, err = cli("plan", *MODEL, *options, "-m", "dgx-h100")

    assert (code, out) == (2, "")
    assert message in err


def test_show_tells_a_ranks_own_part(cli, planned) -> None:
    plan, whole = load_plan(planned), json.loads(cli("show", planned, "--json")[1])

    for rank in (0, 9):
        found = json.loads(cli("show", planned, "--rank", str(rank), "--json")[1])

        sent = (plan.steps.src == rank) & (plan.steps.dst != rank)
        assert found["n_bytes_sent"] == plan.step_bytes[sent].sum()
        assert found["sends_to"] == sorted(set(plan.steps.dst[sent].tolist()))
        assert found["n_steps_got"] == ((plan.steps.dst == rank) & (plan.steps.src != rank)).sum()
        assert found["digest"] == whole["digest"]
        assert sum(lane["n_steps"] for lane in found["lanes"]) == (plan.steps.src == rank).sum()
    assert "of its own" in cli("show", planned, "--rank", "9")[1]


def test_show_refuses_a_rank_that_the_plan_lacks(cli, planned) -> None:
    assert cli("show", planned, "--rank", "24")[2] == "error: --rank 24: the plan has ranks 0 to 23\n"
