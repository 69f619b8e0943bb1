"""`shardroute bound`, and what `plan` says of the strategies that decide for themselves."""

import json
import sys

import pytest

from shardroute.executors.cli import main

TENSOR = [
    "--shape", "8192,8192", "--from-mesh", "dp=8", "--from-placements", "R", "--to-mesh", "dp=4,tp=4", "--to-placements", "R,S0",
    "--machine", "dgx-h100",
]  # fmt: skip


@pytest.fixture
def cli(monkeypatch, capfd):
    """Run a command in this process: exit code, standard output (of libraries too), standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardroute", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        return int(stop.value.code or 0), out, err

    return run


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


def test_optimal_says_its_gap_and_solver_and_json_stays_json(cli) -> None:
    notes = json.loads(cli("plan", *TENSOR, "-s", "optimal", "--time-limit", "5", "--json")[1])["notes"]

    assert set(notes) == {"busiest link, nominal", "no plan beats, nominal", "solver"}
    assert "gap 0.00%" in notes["no plan beats, nominal"]


def test_auto_says_what_it_chose_and_why(cli) -> None:
    found = json.loads(cli("plan", *TENSOR, "-s", "auto", "--json")[1])

    assert found["notes"]["chosen"].startswith(f"{found['strategy']} is predicted at")


@pytest.mark.parametrize("option", [("--max-staging", "much"), ("--max-ops-in-flight", "0"), ("--time-limit", "-1")])
def test_limits_that_make_no_sense_end_in_one_message(cli, option) -> None:
    code, out, err = cli("plan", *TENSOR, "-s", "greedy", *option)

    assert (code, out) == (2, "")
    assert err.startswith("error: ")
