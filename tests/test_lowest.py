import sys

import lowest
import pytest


def test_what_stands_above_its_bound_is_named_and_what_stands_at_it_is_not() -> None:
    requirements = ["rich>=13", "numpy>=1.26", "PuLP>=3.3.1,<4", "mkdocstrings[python]>=0.27", "torch>=2.6", "absent>=1", "simpy"]
    installed = {
        "rich": "14.2.0", "numpy": "1.26.0", "pulp": "3.3.1", "mkdocstrings": "0.27.0", "torch": "2.6.0+cpu", "simpy": "4"
    }  # fmt: skip

    found = lowest.above_their_bounds(requirements, installed)

    assert [line.partition(":")[0] for line in found] == ["rich is 14.2.0, allowed from 13 on"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--extra", "tourch"], "--extra tourch: pyproject.toml has "),
        (["--bare", "rich"], "--bare rich: expected NAME==VERSION"),
        (["--bare", "--no-index"], "expected one argument"),
    ],
)
def test_an_extra_or_a_version_that_cannot_be_is_refused(words, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["lowest.py", *words])
    monkeypatch.setattr(lowest.shutil, "which", lambda *_, **__: "uv")

    with pytest.raises(SystemExit) as stop:
        lowest.main()

    assert stop.value.code == 2
    assert said in capsys.readouterr().err
