"""`strategies`, and what `simulate` and `trace` say and write: numbers that stay, loud words where nothing was measured."""

import json
from pathlib import Path

import pytest

from shardroute.planner.routing.strategies import STRATEGIES
from shardroute.topologies import machines

TENSOR = [
    "--shape", "64,96", "--from-mesh", "x=4", "--from-placements", "S0", "--to-mesh", "dp=3,tp=4", "--to-placements", "R,S1",
]  # fmt: skip


@pytest.fixture
def plan(cli, tmp_path) -> str:
    path = str(tmp_path / "t.plan")
    code, _, err = cli("plan", *TENSOR, "--machine", "dgx-h100", "-s", "m2n-pack", "-o", path)
    assert code == 0, err
    return path


def test_strategies_are_listed_without_a_problem(cli) -> None:
    code, out, _ = cli("strategies", "--json")

    assert code == 0
    assert [row["name"] for row in json.loads(out)] == [*STRATEGIES]


def test_all_strategies_are_compared_on_several_machines_fastest_first(cli) -> None:
    code, out, err = cli("strategies", *TENSOR, "-m", "dgx-h100", "-m", "gb200-nvl72", "--json")

    assert (code, err) == (0, "")
    machines = json.loads(out)["machines"]
    assert [m["machine"] for m in machines] == ["dgx-h100 x 2", "gb200-nvl72 x 1"]
    for contest in machines:
        rows = contest["strategies"]
        assert contest["calibrated"]
        assert {row["strategy"] for row in rows} == set(STRATEGIES)
        assert [row["predicted_s"] for row in rows] == sorted(row["predicted_s"] for row in rows)
        assert all(row["busiest"]["seconds"] <= row["predicted_s"] for row in rows)
        assert all(row["n_bytes_cross_domain"] >= contest["least_bytes_cross_domain"] for row in rows)
        assert all(row["lower_bound_s"] == contest["lower_bound_s"] for row in rows)


def test_the_table_shows_what_is_asked_for(cli) -> None:
    code, out, _ = cli("strategies", *TENSOR, "-m", "dgx-h100", "-s", "direct", "-s", "hybrid")

    assert code == 0
    for word in ("predicted", "bound", "across", "staging", "busiest", "direct", "hybrid"):
        assert word in out
    assert "m2n-pack" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*TENSOR, "-s", "fastest", "-m", "dgx-h100"], "strategy 'fastest' is not known"),
        (TENSOR, "--machine is missing"),
        (["-m", "dgx-h100"], "nothing to move"),
        ([*TENSOR, "-m", "dgx-h100 x 1"], "16 are needed"),
    ],
)
def test_a_mistake_is_named_and_ends_with_2(cli, arguments, words) -> None:
    code, out, err = cli("strategies", *arguments)

    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_a_prediction_without_a_calibration_says_so_aloud(cli, plan) -> None:
    _, out, err = cli("simulate", plan, "--calibration", "nominal", "--json")
    _, _, calm = cli("simulate", plan, "--json")
    _, table, loud = cli("strategies", *TENSOR, "-m", "dgx-h100", "-s", "direct", "--calibration", "nominal")
    _, shown, _ = cli("plan", *TENSOR, "-m", "dgx-h100", "-s", "direct", "--calibration", "nominal")

    assert json.loads(out)["calibrated"] is False
    assert "NOT CALIBRATED" in err
    assert calm == ""
    assert "NOT CALIBRATED" in loud
    assert "direct" in table
    assert "NOTHING MEASURED" in shown


def test_a_prediction_with_another_machine_s_calibration_says_so_aloud(cli, plan) -> None:
    _, out, err = cli("simulate", plan, "--calibration", "gb200-nvl72", "--json")

    assert json.loads(out)["calibrated"] is False
    assert "CALIBRATED FOR ANOTHER MACHINE" in " ".join(err.split())
    assert "gb200-nvl72" in err


def test_a_machine_without_a_calibration_is_refused_until_the_user_chooses_one(cli, plan, tmp_path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text((Path(machines.__file__).parent / "machines" / "dgx-h100.toml").read_text())

    code, _, err = cli("simulate", plan, "--machine", str(own))
    chosen, out, loud = cli("simulate", plan, "--machine", str(own), "--calibration", "nominal", "--json")

    assert code == 2
    assert "predicting needs one" in " ".join(err.split())
    assert "--calibration" in err
    assert chosen == 0
    assert json.loads(out)["calibrated"] is False
    assert "NOT CALIBRATED" in loud


def test_simulating_tells_the_critical_path_in_words_and_numbers(cli, plan) -> None:
    _, table, _ = cli("simulate", plan)
    _, out, _ = cli("simulate", plan, "--json")

    found = json.loads(out)
    assert "Critical path" in table
    assert "Busiest of" in table
    assert "a barrier" in table
    assert sum(part["seconds"] for part in found["critical_path"]["parts"]) == pytest.approx(found["predicted_s"])
    assert found["critical_path"]["steps"][-1]["end_s"] == found["predicted_s"]


def test_a_trace_is_written_of_a_prediction_and_of_a_timeline(cli, plan, tmp_path) -> None:
    one, two, line = (str(tmp_path / name) for name in ("one.json", "two.json", "line.json"))

    code, _, err = cli("simulate", plan, "--trace", one, "-o", line, "--trace-ranks", "0-3,5")
    again, _, _ = cli("trace", plan, line, "-o", two)

    assert (code, again) == (0, 0)
    assert "5 of 16 ranks are shown" in err
    first, second = (json.loads(Path(path).read_text())["traceEvents"] for path in (one, two))
    slices = [{(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"} for events in (first, second)]
    assert slices[0] < slices[1]


def test_a_trace_of_another_plan_s_timeline_is_refused(cli, plan, tmp_path) -> None:
    other, line = str(tmp_path / "other.plan"), str(tmp_path / "line.json")
    cli("plan", *TENSOR, "--machine", "dgx-h100", "-s", "direct", "-o", other)
    cli("simulate", other, "-o", line)

    code, _, err = cli("trace", plan, line, "-o", str(tmp_path / "x.json"))

    assert code == 2
    assert "the timeline is of another plan" in " ".join(err.split())
    assert not (tmp_path / "x.json").exists()
