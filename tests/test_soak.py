import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import soak
from soak import Row, Sample

N_RUNS = 100
SHARES = [k / 20 for k in range(1, 21)]


def row(
    *, clock_s: Callable[[float], float] = lambda share: 0.01, cpu_s: Callable[[float], float] = lambda share: 0.03,
    others: Callable[[float], float] = lambda share: 0.0,
) -> Row:  # fmt: skip
    """A soak of 100 runs in 20 samples a second apart: what a run takes on the clock and of its ranks' processor time, and how
    many cores others use, each by the share of the runs that is done."""
    samples, used_s, busy_s = [], 0.0, 0.0
    for at_s, share in enumerate(SHARES):
        used_s += cpu_s(share) * N_RUNS / len(SHARES)
        busy_s += cpu_s(share) * N_RUNS / len(SHARES) + others(share)
        samples.append(Sample(share, 10**8, 60, 4, float(at_s), busy_s, used_s))
    return soak.row_of("a soak", 4, 1000, 20.0, samples, [clock_s(k / N_RUNS) for k in range(N_RUNS)], ())


def test_what_stays_as_it_was_is_no_trouble() -> None:
    found = row()

    assert (found.troubles, found.not_judged) == ([], [])
    assert found.early_cpu_s == pytest.approx(0.03)
    assert found.others_cores == pytest.approx(0)


def test_a_run_that_takes_longer_on_the_clock_is_found_where_the_soak_had_the_cores() -> None:
    a_tenth = 0.1 * len(os.sched_getaffinity(0))

    found = row(clock_s=lambda share: 0.01 if share < 0.5 else 0.016, others=lambda share: 0.9 * a_tenth)

    assert found.troubles == ["a run took 10.0 ms and later 16.0 ms"]
    assert found.not_judged == []


@pytest.mark.parametrize("when", [0.3, 0.9])
def test_the_clock_is_not_judged_where_others_used_more_than_a_tenth_of_the_cores_in_a_fifth_that_counts(when: float) -> None:
    n_cores = len(os.sched_getaffinity(0))

    found = row(
        clock_s=lambda share: 0.01 if share < 0.5 else 0.016, others=lambda share: 0.2 * n_cores if abs(share - when) < 0.1 else 0
    )

    assert found.troubles == []
    assert len(found.not_judged) == 1
    assert f"of {n_cores} cores" in found.not_judged[0]


def test_processor_time_that_grows_is_found_however_busy_the_machine_is() -> None:
    n_cores = len(os.sched_getaffinity(0))

    found = row(cpu_s=lambda share: 0.03 if share < 0.5 else 0.048, others=lambda share: 0.5 * n_cores)

    assert found.troubles == ["a run took 30.0 ms of processor time and later 48.0 ms"]
    assert len(found.not_judged) == 1


def test_a_share_that_begins_between_two_samples_is_measured_from_the_one_before() -> None:
    samples = [Sample(share, 10**8, 60) for share in (0.05, 0.15, 0.3, 0.45, 0.7, 0.95)]

    fifths = ((0.2, 0.4), (0.8, 1.0), (0.0, 0.02), (0.98, 1.0))
    found = [tuple(sample.share for sample in soak.stretch(samples, fifth)) for fifth in fifths]

    assert found == [(0.15, 0.3, 0.45), (0.7, 0.95), (0.05, 0.15), (0.7, 0.95)]


def test_a_share_that_is_told_late_does_not_change_the_processor_time_of_a_run() -> None:
    told = [share - 0.03 if share in (0.4, 1.0) else share for share in SHARES]
    samples = [Sample(late, 10**8, 60, 4, share, share, 3 * share) for share, late in zip(SHARES, told, strict=True)]

    found = soak.row_of("a soak", 4, 1000, 1.0, samples, [0.01] * N_RUNS, ())

    assert (found.early_cpu_s, found.late_cpu_s) == pytest.approx((0.03, 0.03))


def test_what_another_process_takes_counts_as_others_and_what_this_one_takes_does_not() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass"
    first = soak.sample(0.0, [os.getpid()])
    while time.process_time() < first.cpu_s + 0.2:
        pass
    between = soak.sample(0.5, [os.getpid()])
    subprocess.run([sys.executable, "-c", code], check=True)
    last = soak.sample(1.0, [os.getpid()])

    assert 0.2 <= between.cpu_s - first.cpu_s < 0.25
    assert last.cpu_s - between.cpu_s < 0.1
    assert soak.others_cores(between, last) * (last.at_s - between.at_s) > 0.25


def ranks_copy_after(statements: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Ranks that start from now on run these before each copy: they know `trial`, and what they add to `kept` stays."""
    (folder / "sitecustomize.py").write_text(
        "import mmap, os, time\n"
        "from shardroute.executors.transports.shared_memory import SharedMemoryTransport\n"
        "post, kept = SharedMemoryTransport.post, []\n"
        "def changed(transport, action):\n"
        " trial = transport._value - 1\n"
        f"{textwrap.indent(textwrap.dedent(statements), ' ')}\n"
        " post(transport, action)\n"
        "SharedMemoryTransport.post = changed\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_ranks_that_compute_longer_with_every_run_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    statements = """
        until = time.process_time() + 2.5e-5 * trial
        while time.process_time() < until: pass
    """
    ranks_copy_after(statements, monkeypatch, tmp_path)

    found = soak.soak_processes("slower", soak.refit_plan(2, 8), 300)

    assert [trouble for trouble in found.troubles if "of processor time and later" in trouble], found


def test_ranks_that_wait_longer_with_every_run_are_found_or_said_not_to_be_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks_copy_after("time.sleep(2.5e-5 * trial)", monkeypatch, tmp_path)

    found = soak.soak_processes("later", soak.refit_plan(2, 8), 300)

    assert found.late_s > 1.5 * found.early_s
    assert bool(found.not_judged) != bool([trouble for trouble in found.troubles if "and later" in trouble])


def test_shared_memory_that_a_rank_leaves_is_found_and_that_of_other_programs_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "older").touch()
    statements = f"""
        time.sleep(0.003)
        if trial == 5:
            for name in ("mpich_shm_16dbd2_0", "shardroute-1", f"psm_{{os.getpid()}}"):
                with open(f"{shared}/{{name}}", "w+b") as file:
                    file.write(bytes(mmap.PAGESIZE))
                    file.flush()
                    if name.startswith("psm"):
                        kept.append(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    """
    ranks_copy_after(statements, monkeypatch, tmp_path)

    found = soak.soak_processes("leaves", soak.refit_plan(2, 8), 300, shared)

    left = sorted(line.rpartition(": ")[2].rstrip("0123456789") for line in found.left_over if line.startswith("shared memory"))
    assert left == ["psm_", "shardroute-"]


def test_a_soak_that_is_too_short_and_one_of_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["--refits", "1", "--ranks", "2", "--transport", "processes"], "ask for more"),
        ([], "nothing to soak"),
        (["--refits", "1", "--ranks", "3"], "an even number of ranks"),
    ):
        monkeypatch.setattr(sys, "argv", ["soak.py", *words])
        with pytest.raises(SystemExit) as stop:
            soak.main()
        assert said in f"{stop.value.code} {capsys.readouterr().err}"


def test_a_single_run_is_too_few_to_compare() -> None:
    samples = [Sample(1.0, 10**8, 60, 4, 1.0, 1.0, 1.0)]

    with pytest.raises(SystemExit, match=r"too few runs to compare \(1\)"):
        soak.row_of("a soak", 4, 1000, 1.0, samples, [0.1], ())


def test_json_says_what_was_not_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--refits", "10000", "--ranks", "2", "--kib", "8", "--transport", "processes", "--json"]
    monkeypatch.setattr(sys, "argv", ["soak.py", *words])

    code = soak.main()

    found = json.loads(capsys.readouterr().out)[0]
    assert (code == 1) == bool(found["troubles"])
    assert bool(found["not_judged"]) == (found["others_cores"] > 0.1 * found["n_cores"])
    assert 0 < found["early_cpu_s"] < 0.1
