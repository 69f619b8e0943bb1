"""A plan's steps as CSV, and as Parquet where pyarrow is installed."""

import csv
import io
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from shardroute.executors.cli import main
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.parquet_tables import write_parquet
from shardroute.planner.plans import SOURCE, TARGET, Lane, Op, Plan
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.step_tables import COLUMNS, write_steps
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import InputError


def plan(strategy: str = "greedy", shape: str = "32,32") -> Plan:
    problem = tensor_problem(shape, "bf16", "x=4", "S0", "y=12", "S1")
    return make_plan(problem, build_topology(load_machine("dgx-h100"), None, 16), strategy)


def rows(made: Plan, timeline=None) -> list[dict[str, str]]:
    file = io.BytesIO()
    write_steps(made, timeline, file)
    return list(csv.DictReader(io.StringIO(file.getvalue().decode())))


@pytest.mark.parametrize("strategy", ["direct", "greedy", "gather-broadcast"])
def test_the_table_has_every_step_as_the_plan_has_it(strategy: str) -> None:
    made = plan(strategy)

    table = rows(made)

    steps = made.steps
    assert [row["op"] for row in table] == [Op(op).name.lower() for op in steps.op]
    assert [int(row["src"] or -1) for row in table] == steps.src.tolist()
    assert [int(row["dst"] or -1) for row in table] == steps.dst.tolist()
    assert [int(row["n_bytes"]) for row in table] == made.step_bytes.tolist()
    assert [int(step) for row in table for step in row["after"].split()] == steps.after.tolist()
    places = {"source": SOURCE, "target": TARGET}
    assert [places[row["dst_at"]] if row["dst_at"] in places else int(row["dst_at"]) for row in table] == steps.dst_at.tolist()
    groups = [made.group(g).tolist() if g >= 0 else [] for g in steps.group.tolist()]
    assert [[int(rank) for rank in row["group"].split()] for row in table] == groups
    assert {row["lane"] for row in table} <= {lane.name.lower() for lane in Lane}


def test_a_timeline_adds_its_times_exactly() -> None:
    made = plan()
    timeline = predict(made, default_calibration("dgx-h100")).timeline

    table = rows(made, timeline)

    assert [float(row["end_s"]) for row in table] == timeline.end_s.tolist()
    assert np.all([float(row["start_s"]) <= float(row["end_s"]) for row in table])


def test_a_timeline_of_another_plan_is_refused() -> None:
    timeline = predict(plan(shape="64,64"), default_calibration("dgx-h100")).timeline

    with pytest.raises(InputError, match="the timeline is of plan"):
        rows(plan(), timeline)


def test_rows_of_more_than_one_batch_are_numbered_on(monkeypatch) -> None:
    monkeypatch.setattr("shardroute.planner.step_tables._ROWS", 5)
    made = plan("direct")

    assert [int(row["step"]) for row in rows(made)] == list(range(len(made.steps)))


def test_the_command_writes_a_file_of_that_name_only(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["shardroute", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    tensor = ["--shape", "8,8", "--from-mesh", "x=2", "--from-placements", "S0", "--to-mesh", "y=2", "--to-placements", "S1"]
    assert run("plan", *tensor, "--machine", "dgx-h100", "-o", "a.plan") == 0

    assert run("steps", "a.plan", "-o", "a.csv") == 0
    assert run("steps", "a.plan", "-o", "a.txt") == 2

    assert (tmp_path / "a.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert "ends in .csv or .parquet" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow, the extra `parquet`")
@pytest.mark.parametrize("strategy", ["greedy", "gather-broadcast"])
def test_parquet_says_what_the_csv_says(monkeypatch, strategy: str) -> None:
    from pyarrow import parquet

    monkeypatch.setattr("shardroute.planner.parquet_tables._ROWS", 7)
    made = plan(strategy)
    timeline = predict(made, default_calibration("dgx-h100")).timeline
    file = io.BytesIO()

    write_parquet(made, timeline, file)

    def as_text(value: object) -> str:
        if isinstance(value, list):
            return " ".join(map(str, value))
        return "" if value is None else str(value)

    table = parquet.read_table(io.BytesIO(file.getvalue()))
    assert [{name: as_text(value) for name, value in row.items()} for row in table.to_pylist()] == rows(made, timeline)
    assert table.schema.metadata[b"plan"].decode() == made.digest


def test_without_pyarrow_parquet_is_refused_with_the_way_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(InputError, match=r"pip install 'shardroute\[parquet\]'"):
        write_parquet(plan(), None, io.BytesIO())
