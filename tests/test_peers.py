"""The re-stated rules give the figures that the planners themselves gave; the M2N library is asked where it is there."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from bench_routes import Worse, worse

from peers import m2n_wheel
from peers.contenders import Row, arena, contenders
from peers.layouts import EXPERTS, SQUARE, TENSORS
from peers.m2n_wheel import Absent, M2n, side_of
from peers.rounds import alpa_rounds, megatron_rounds
from peers.rules import RULES, m2n_limits
from peers.ways import Refused, loads_of_ways
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.routing.patterns import entries_of
from shardroute.planner.routing.strategies import pieces_of


def patterns_of(tensor):
    """Patterns, their bytes, source ranks and ranks in all."""
    shape, *meshes = tensor
    problem = tensor_problem(shape, "bf16", *meshes)
    entries, holders, needers = entries_of(problem, pieces_of(problem))
    n_bytes = np.bincount(entries.pattern, weights=entries.n_bytes)
    return list(zip(holders, needers, strict=True)), n_bytes, problem.source.ranks, problem.n_ranks


def figures(ways, n_bytes, sources, n_ranks, domain):
    """Megabytes of the busiest source and of the mean one over NICs, idle sources, most into a rank from elsewhere."""
    found = loads_of_ways(ways, n_bytes, n_ranks, domain)
    sent = found.sent[sources]
    return round(sent.max() / 1e6, 1), round(sent.mean() / 1e6, 1), int((sent == 0).sum()), round(found.nic_in.max() / 1e6, 1)


# What the planners gave when they were run (M2N 0.1.0's wheel and source, NeMo RL's xferdtensor_python, Awex's
# TransferPlanBuilder; 2026-11): busiest source, mean source (MB), idle sources, most into a rank.
PUBLISHED = [
    ("TP4 -> TP2xDP2", 4, "M2N uniform*", (33.6, 33.6, 0, 33.6)),
    ("EP16 -> DP8xTP32", 8, "M2N node-aware*", (469.8, 469.8, 0, 234.9)),
    ("DP8xEP8 -> DP2xEP32", 8, "M2N uniform*", (939.5, 234.9, 48, 234.9)),
    ("DP8 -> TP4xDP4", 8, "M2N uniform*", (134.2, 67.1, 4, 33.6)),
    ("DP8 -> TP4xDP4", 8, "M2N node-aware*", (134.2, 33.6, 6, 33.6)),
    ("DP8xTP8 -> TP8", 8, "M2N uniform*", (16.8, 2.1, 56, 16.8)),
    ("DP2xTP8 -> DP2xTP16", 8, "M2N node-aware*", (201.3, 201.3, 0, 100.7)),
    ("TP4 -> TP2xDP2", 4, "NeMo v1*", (33.6, 33.6, 0, 67.1)),
    ("DP8 -> TP4xDP4", 8, "NeMo v1*", (134.2, 16.8, 7, 33.6)),
    ("DP8xTP8 -> TP8", 8, "NeMo v1*", (16.8, 2.1, 56, 16.8)),
    ("EP64 -> DP8xTP8", 8, "NeMo v1*", (117.4, 117.4, 0, 939.5)),
    ("DP8xEP8 -> DP2xEP32", 8, "NeMo v1*", (939.5, 117.4, 56, 234.9)),
    ("TP4 -> TP2xDP2", 4, "Awex*", (67.1, 67.1, 0, 67.1)),
    ("EP16 -> DP8xTP32", 8, "Awex*", (3758.1, 3758.1, 0, 234.9)),
    ("DP8 -> DP4xTP4", 8, "Awex*", (134.2, 67.1, 4, 33.6)),
    ("DP8xEP8 -> DP2xEP32", 8, "Awex*", (939.5, 234.9, 48, 234.9)),
]


@pytest.mark.parametrize(("layout", "per_domain", "rule", "wanted"), PUBLISHED)
def test_a_restated_rule_gives_the_planners_own_figures(layout, per_domain, rule, wanted) -> None:
    patterns, n_bytes, sources, n_ranks = patterns_of(TENSORS[layout])
    domain = (np.arange(n_ranks) // per_domain).astype(np.int32)

    assert figures(RULES[rule](patterns, domain), n_bytes, sources, n_ranks, domain) == wanted


# NeMo's striped planner: busiest source, and what the stripes alone bring a rank (the all-gather after it left out).
@pytest.mark.parametrize(
    ("layout", "sent", "stripe"),
    [
        ("TP4 -> TP2xDP2", 33.6, 33.6),
        ("DP8 -> TP4xDP4", 16.8, 8.4),
        ("EP16 -> DP8xTP32", 469.8, 29.4),
        ("EP64 -> DP8xTP8", 117.4, 117.4),
        ("DP8xEP8 -> DP2xEP32", 117.4, 117.4),
        ("DP256xTP8 -> same", 0.1, 0.1),
    ],
)
def test_stripes_are_as_the_striped_planner_deals_them(layout, sent, stripe) -> None:
    patterns, n_bytes, sources, n_ranks = patterns_of(TENSORS[layout])
    domain = np.arange(n_ranks, dtype=np.int32)  # no notion of domains

    ways = RULES["NeMo striped*"](patterns, domain)

    found = loads_of_ways(ways, n_bytes, n_ranks, domain)
    arrived = np.zeros(n_ranks)
    for way, size in zip(ways, n_bytes, strict=True):
        for src, dst, share in way.hops:
            arrived[dst] += share * size * (src in set(sources.tolist()))
    assert round(found.sent[sources].max() / 1e6, 1) == sent
    assert (found.sent[sources] > 0).all()
    assert round(arrived.max() / 1e6, 1) == stripe


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["DP8 -> TP4xDP4", "DP4xEP4 -> DP2xTP8", "TP3 -> DP2xTP8, uneven", "EP16 -> DP12xTP4"])
def test_every_rule_brings_every_needer_every_byte_once(rule, layout) -> None:
    patterns, _, _, n_ranks = patterns_of(TENSORS[layout])
    domain = (np.arange(n_ranks) // 8).astype(np.int32)

    for (who, to), way in zip(patterns, RULES[rule](patterns, domain), strict=True):
        for tree in way.trees:
            assert sorted(hop.dst for hop in tree) == sorted(to.tolist())
            for hop in tree:
                assert hop.src in who if hop.parent is None else hop.src == tree[hop.parent].dst


def test_what_m2n_refuses_is_refused() -> None:
    for layout, refused in (("EP32 -> DP16xTP16", "32 sources > 16"), ("EP64 -> DP8xTP8", "64 sources > 16")):
        with pytest.raises(Refused, match=refused):
            m2n_limits(patterns_of(TENSORS[layout])[0])
    with pytest.raises(Refused, match="256 targets > 64"):
        m2n_limits(patterns_of(TENSORS["EP16 -> DP8xTP32"])[0], direct=True)
    m2n_limits(patterns_of(TENSORS["EP16 -> DP8xTP32"])[0])


def test_megatrons_scheduler_needs_the_rounds_that_it_was_seen_to_need() -> None:
    def all_to_all(n):
        return [(a, b) for a in range(n) for b in range(n) if a != b]

    assert [megatron_rounds(all_to_all(n)) for n in (8, 16, 32, 64)] == [14, 30, 62, 126]
    assert megatron_rounds([(a, 16 + b) for a in range(16) for b in range(256)]) == 256


def test_alpas_orders_need_the_rounds_that_they_were_seen_to_need() -> None:
    copies = patterns_of((SQUARE, "dp=4", "R", "tp=8", "S0"))[0]
    experts = patterns_of(TENSORS["EP16 -> DP8xTP32"])[0]
    small = patterns_of((EXPERTS, "dp=4,ep=4", "R,S0", "dp=2,tp=8", "R,S1"))[0]

    by_size = [alpa_rounds(patterns, greedy=False)[1] for patterns in (copies, experts, small)]
    greedy = [alpa_rounds(patterns)[1] for patterns in (copies, experts, small)]

    assert by_size == [2, 47, 5]  # 47 of 32: 1.47 x the bound
    assert greedy[0] == 2
    assert greedy[1] in (32, 33)  # theirs, which draws at random, took 33
    assert greedy[2] == 4


@pytest.fixture(scope="module")
def m2n():
    try:
        return M2n(os.environ.get("M2N_WHEEL"))
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.mark.parametrize("row", [row for row in PUBLISHED if row[2].startswith("M2N")])
def test_the_library_and_the_restated_rule_agree(m2n, row) -> None:
    layout, per_domain, rule, wanted = row
    shape, *meshes = TENSORS[layout]
    patterns, n_bytes, sources, n_ranks = patterns_of(TENSORS[layout])
    domain = (np.arange(n_ranks) // per_domain).astype(np.int32)
    source, target = side_of(shape, "bf16", *meshes[:2]), side_of(shape, "bf16", *meshes[2:])

    ways = m2n.ways(source, target, patterns, n_bytes, domain, per_domain, "uniform" if "uniform" in rule else "node")

    assert figures(ways, n_bytes, sources, n_ranks, domain) == wanted
    assert [sorted(w.hops) for w in ways] == [sorted(w.hops) for w in RULES[rule](patterns, domain)]


def test_the_library_refuses_in_its_own_words(m2n) -> None:
    shape, *meshes = TENSORS["EP32 -> DP16xTP16"]
    patterns, n_bytes, _, n_ranks = patterns_of(TENSORS["EP32 -> DP16xTP16"])
    domain = (np.arange(n_ranks) // 8).astype(np.int32)

    with pytest.raises(Refused, match=r"sources=32 > MAX_SOURCES=16"):
        m2n.ways(side_of(shape, "bf16", *meshes[:2]), side_of(shape, "bf16", *meshes[2:]), patterns, n_bytes, domain, 8, "node")


@pytest.mark.parametrize(
    ("wheel", "why"),
    [
        ("x-0.1.0-y.whl", "No such file"),
        ("nccl_extensions-0.2.0-x.whl", "0.1.0 is what is known"),
        ("nowhere", "there is no nowhere"),
    ],
)
def test_without_the_wheel_it_says_why(monkeypatch, tmp_path, wheel, why) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(m2n_wheel.platform, "system", lambda: "Linux")
    monkeypatch.setattr(m2n_wheel.platform, "machine", lambda: "x86_64")

    with pytest.raises(Absent, match=why):
        M2n(wheel)


@pytest.mark.parametrize("layout", ["EP8xETP4 -> DP4xTP8", "HSDP2x8xTP2 -> DP4xTP4", "TP3 -> DP2xTP8, uneven"])
def test_what_m2n_cannot_say_is_refused_before_it_is_asked(layout) -> None:
    shape, *meshes = TENSORS[layout]

    with pytest.raises(Refused):
        side_of(shape, "bf16", *meshes[:2])


def test_contenders_are_rows_of_one_kind() -> None:
    place = arena("DP8 -> TP4xDP4", "dgx-h100")

    rows = {name: run() for name, run in contenders(place, "not here")}

    assert all(isinstance(row, Row) for row in rows.values())
    assert (rows["greedy"].ours, rows["Awex*"].ours) == (True, False)
    assert rows["M2N wheel, node"].note == "absent: not here"
    assert rows["greedy"].crossed == rows["greedy"].least == 2 * 2 * 8192**2
    assert rows["NeMo striped*"].depth == 4
    assert rows["greedy"].predicted_s < rows["Awex*"].predicted_s


def test_the_benchmark_prints_a_table_json_and_where_ours_loses(repo) -> None:
    command = [sys.executable, str(repo / "tools" / "bench_routes.py"), "--only", "TP4 -> TP2xDP2", "--only", "dgx-h100"]

    some = ["--only", "direct", "--only", "greedy", "--only", "Awex*"]

    table = subprocess.run([*command, *some], check=True, capture_output=True, text=True)
    rows = json.loads(subprocess.run([*command, *some, "--json"], check=True, capture_output=True, text=True).stdout)

    assert [line.split()[0] for line in table.stdout.splitlines()[5:8]] == ["direct", "greedy", "Awex*"]
    assert "figures in which greedy or optimal is worse" in table.stdout
    assert "TP4 -> TP2xDP2, dgx-h100: greedy" in table.stderr
    assert [row["contender"] for row in rows["rows"]] == ["direct", "greedy", "Awex*"]


def test_where_ours_is_worse_is_listed_against_the_best_other() -> None:
    def row(contender, **figures):
        return Row("a layout", "a machine", contender, contender in ("greedy", "direct"), **figures)

    rows = [
        row("greedy", senders=1.5, crossed=100.0, predicted_s=2.0),
        row("optimal", senders=1.0, crossed=None, predicted_s=1.0),
        row("direct", senders=1.2, crossed=100.0, predicted_s=1.99),
        row("Awex*", senders=1.0, crossed=400.0, predicted_s=None),
        Row("another", "a machine", "Awex*", False, senders=0.5, predicted_s=0.1),
    ]

    assert worse(rows) == [Worse("a layout", "a machine", "greedy", "senders", 1.5, "Awex*", 1.0)]


def test_growth_is_measured_a_process_a_size(repo) -> None:
    command = [sys.executable, str(repo / "tools" / "bench_routes.py"), "--scale", "--most-gpus", "64", "--json"]

    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert [row["gpus"] for row in found["rows"]] == [64]
    assert found["rows"][0]["plan_s"] > 0
    assert 1 <= found["rows"][0]["ratio"] < 1.1
