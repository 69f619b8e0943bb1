"""shardroute.topologies.units: text with units to SI numbers and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.topologies.errors import InputError
from shardroute.topologies.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_operations,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400 Gb/s", 50e9),
        ("450 GB/s", 450e9),
        ("3.35 TB/s", 3.35e12),
        ("12 GiB/s", 12 * 2**30),
        ("100Mb/s", 12.5e6),
        ("8 b/s", 1.0),
        ("1.5e2 kB/s", 150e3),
        ("0 B/s", 0.0),
    ],
)
def test_a_bandwidth_counts_bits_for_b_and_bytes_for_capital_b(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


def test_a_rate_of_computing_is_in_operations_per_second() -> None:
    assert parse_operations("1400 TFLOP/s") == parse_operations("1.4 PFLOP/s") == 1.4e15
    with pytest.raises(InputError, match=r"'1400 TFLOPS' is not a rate of computing .*write for example '1400 TFLOP/s'"):
        parse_operations("1400 TFLOPS")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80 GB", 80 * 10**9),
        ("64MiB", 64 * 2**20),
        ("1024", 1024),
        ("1.5 kB", 1500),
        (" 7 B ", 7),
        ("2 KiB", 2048),
    ],
)
def test_a_byte_count_without_unit_is_bytes(text: str, expected: int) -> None:
    parsed = parse_bytes(text)

    assert parsed == expected
    assert isinstance(parsed, int)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("18 us", 18e-6), ("18 µs", 18e-6), ("1.5 ms", 1.5e-3), ("2 s", 2.0), ("3ns", 3e-9), ("0 s", 0.0)],
)
def test_a_time_needs_its_unit(text: str, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "400",
            "Gb/s",
            "-1 GB/s",
            "nan GB/s",
            "inf GB/s",
            "400 Gbps",
            "400 gb/s",
            "4 00 GB/s",
            "1,5 GB/s",
        ),
        *("1 GB", "1e999 GB/s", "0x10 GB/s", "1e9999999999 GB/s", "1 GB/s extra", "٣ GB/s", "1 GB/s/s"),
    ],
)
def test_text_that_is_no_bandwidth_is_refused_with_the_text_and_examples(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_bandwidth(text)

    assert repr(text) in str(caught.value)
    assert "'400 Gb/s'" in str(caught.value) or "exponent" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["-1", "1.5", "0.3 kiB", "80 Gb", "80 GB/s", "nan", "1e30 GB", "9223372036854775808"]
)
def test_text_that_is_no_whole_byte_count_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="1024"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["18", "18 m", "-2 s", "inf s", "2 S", "1 hour"])
def test_text_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="18 us"):
        parse_seconds(text)


def test_the_refusal_names_an_unknown_unit() -> None:
    with pytest.raises(InputError, match="unit 'Gbps' is unknown"):
        parse_bandwidth("400 Gbps")


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_600, "1.00 MB"),
        (80e9, "80.0 GB"),
        (141e9, "141 GB"),
        (0.25, "0.25 B"),
        (2.5e18, "2500 PB"),
    ],
)
def test_bytes_show_three_significant_digits(n_bytes: float, expected: str) -> None:
    assert format_bytes(n_bytes) == expected


@pytest.mark.parametrize(
    ("bandwidth_Bps", "expected"),
    [(50e9, "50.0 GB/s"), (3.35e12, "3.35 TB/s"), (450e9, "450 GB/s"), (0.0, "0 B/s")],
)
def test_a_bandwidth_shows_three_significant_digits(bandwidth_Bps: float, expected: str) -> None:
    assert format_bandwidth(bandwidth_Bps) == expected


@pytest.mark.parametrize(
    ("time_s", "expected"),
    [
        (0.0, "0 s"),
        (18e-6, "18.0 us"),
        (0.9996e-3, "1.00 ms"),
        (0.0015, "1.50 ms"),
        (2.0, "2.00 s"),
        (3600.0, "3600 s"),
        (4e-10, "0.40 ns"),
        (-2e-3, "-2.00 ms"),
    ],
)
def test_a_time_shows_three_significant_digits(time_s: float, expected: str) -> None:
    assert format_seconds(time_s) == expected


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_a_shown_time_reads_back_within_its_three_digits(time_s: float) -> None:
    read = parse_seconds(format_seconds(time_s))

    assert math.isclose(read, time_s, rel_tol=0.00501)


@given(st.floats(min_value=1.0, max_value=1e15))
def test_a_shown_bandwidth_reads_back_within_its_three_digits(bandwidth_Bps: float) -> None:
    read = parse_bandwidth(format_bandwidth(bandwidth_Bps))

    assert math.isclose(read, bandwidth_Bps, rel_tol=0.00501)


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_every_storable_byte_count_parses_to_itself(n_bytes: int) -> None:
    assert parse_bytes(str(n_bytes)) == n_bytes


@given(st.text(max_size=20))
def test_any_text_is_either_parsed_or_refused_with_input_error(text: str) -> None:
    for parse in (parse_bandwidth, parse_bytes, parse_seconds):
        try:
            value = parse(text)
        except InputError:
            continue
        assert value >= 0
        assert math.isfinite(value)


@pytest.mark.parametrize(
    ("n", "nouns", "expected"),
    [
        (0, ("step",), "0 steps"),
        (1, ("step",), "1 step"),
        (1200, ("step",), "1,200 steps"),
        (1, ("strategy", "strategies"), "1 strategy"),
        (2, ("strategy", "strategies"), "2 strategies"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(n: int, nouns: tuple[str, ...], expected: str) -> None:
    assert format_count(n, *nouns) == expected
