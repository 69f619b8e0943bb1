"""What `study -o` writes beside a page: the rows as CSV, and the JSON of --json."""

import csv
import json
from pathlib import Path

import pytest

from shardroute.planner.cli.study_files import save_table, study_csv
from shardroute.planner.studies import LoadStudy, RefitRow, estimate

REFIT = ["study", "refit-vs-nic", "--model", "qwen3-0.6b", "--scale", "256", "--from", "TP2", "--to", "TP4", "-m", "dgx-h100"]


def test_rows_of_a_study_are_lines_of_csv_with_the_fields_of_its_json(cli, tmp_path: Path) -> None:
    code, out, err = cli(*REFIT, "--rates", "200Gb/s,400Gb/s", "-s", "direct", "--json", "-o", str(tmp_path / "s.csv"))

    with open(tmp_path / "s.csv", newline="") as file:
        found = list(csv.DictReader(file))
    rows = json.loads(out)["rows"]
    assert (code, "study written to" in err) == (0, True)
    assert [(row["name"], float(row["predicted_s"])) for row in found] == [(row["name"], row["predicted_s"]) for row in rows]
    assert found[0]["busiest.resource"] == rows[0]["busiest"]["resource"]


def test_the_file_of_json_holds_what_is_printed(cli, tmp_path: Path) -> None:
    _, out, _ = cli("study", "gather-vs-reshard", "--json", "-o", str(tmp_path / "s.json"))

    assert (tmp_path / "s.json").read_text() == out


def test_estimates_and_rows_of_plans_have_columns_of_their_own() -> None:
    row = RefitRow(name="small", value=1.0, strategy="direct", why_not="no, none")
    study = LoadStudy(
        study="s", title="t", calibration="", calibrated=False, notes=[], estimates=[estimate("large", 10.0, 2)], rows=[row]
    )

    first, second = csv.DictReader(study_csv(study).splitlines())

    assert (first["name"], first["gather_bytes"], first["strategy"]) == ("large", "20", "")
    assert (second["name"], second["gather_bytes"], second["strategy"], second["why_not"]) == ("small", "", "direct", "no, none")


@pytest.mark.parametrize("name", ["s.csv", "s.json"])
def test_a_table_is_written_whole(tmp_path: Path, name: str) -> None:
    study = LoadStudy(study="s", title="t", calibration="", calibrated=False, notes=[], estimates=[], rows=[])

    save_table(study, str(tmp_path / name))

    assert (tmp_path / name).read_text().endswith("\n")
