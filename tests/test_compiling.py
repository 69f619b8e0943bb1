"""Kernels are compiled once for an installation, and whoever waits for that is told."""

import importlib
import logging
import os
import sys

import pytest

from shardroute.planner import compiling, rounds_kernel
from shardroute.planner.compiling import COMPILINGS, compiled

KERNEL = """
def twice(x: int) -> int:
    return 2 * x

FUNCTIONS = ("twice",)
""" + "\n" * 100  # so long that it is worth a word


def test_only_what_numba_has_not_compiled_since_it_changed_is_announced(tmp_path, monkeypatch, caplog) -> None:
    pytest.importorskip("numba")
    (tmp_path / "some_kernel.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO, COMPILINGS.name)
    plain = importlib.import_module("some_kernel")

    def announced() -> int:
        caplog.clear()
        compiling._compiled.cache_clear()
        assert compiled(plain).twice(21) == 42
        return len(caplog.records)

    try:
        assert [announced(), announced()] == [1, 0]
        later = (tmp_path / "some_kernel.py").stat().st_mtime + 3600
        os.utime(tmp_path / "some_kernel.py", (later, later))
        assert announced() == 1
    finally:
        compiling._compiled.cache_clear()
        sys.modules.pop("some_kernel")


def test_kernels_run_plain_where_numba_is_told_not_to_compile(monkeypatch) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    compiling._compiled.cache_clear()

    try:
        assert compiled(rounds_kernel) is rounds_kernel
    finally:
        compiling._compiled.cache_clear()
