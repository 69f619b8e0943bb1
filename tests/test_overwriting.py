"""Outputs that would write over what a command reads are refused."""

from pathlib import Path

import pytest

from shardroute.planner.cli.overwriting import keep_inputs
from shardroute.topologies.errors import InputError


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"plan": "a.toml", "output": "./a.toml"}, "--output"),
        ({"plan": "link", "trace_to": "a.toml"}, "--trace"),
        ({"machine": "dgx-h100 x 2 + a.toml x 3", "output": "a.toml"}, "--output"),
        ({"files": ["other", "a.toml"], "output": "a.toml"}, "--output"),
        ({"plan": "other", "output": "new", "trace_to": "./new"}, "--trace"),
    ],
)
def test_a_file_that_is_read_or_was_just_written_isnt_written_over(
    given: dict[str, object], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("kept")
    Path("link").symlink_to("a.toml")

    with pytest.raises(InputError, match=f"^{option} .* give another name"):
        keep_inputs(given)


def test_other_outputs_are_written_over_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old").write_text("of an earlier run")

    keep_inputs({"plan": "a.plan", "machine": "dgx-h100 x 2", "output": "old", "trace_to": "t.json", "seq": 4})
