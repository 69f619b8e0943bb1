"""What carries a collective: XLA's rules by release, NCCL's own, and the margin that decides."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.backends.channels import Traffic, channel_law, put_law
from shardroute.planner.choice import (
    NEWEST,
    RULE_SETS,
    Assigned,
    Libraries,
    Operation,
    Setting,
    Version,
    Way,
    assign,
    choose,
    hazards,
    operation,
    options,
    rule_set,
)
from shardroute.planner.choice.operations import joined
from shardroute.planner.choice.symmetric import symmetric_kernel
from shardroute.planner.choice.ways import DERIVED_ERROR, MODEL_ERROR
from shardroute.planner.choice.xla import Wanted, flags
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine

MACHINE = load_machine("gb200-nvl72")
CALIBRATION = default_calibration("gb200-nvl72")
MiB = 2**20


def setting(rules: str | None = None, nccl: str | None = None) -> Setting:
    libraries = NEWEST if nccl is None else Libraries(Version.of(nccl), NEWEST.nvshmem)
    return Setting(
        machine=MACHINE, calibration=CALIBRATION, libraries=libraries, rules=None if rules is None else rule_set(rules)
    )


def pair(op: Collective, n_bytes: int, *, devices_per_process: int = 1, n_devices: int = 2) -> Operation:
    """XLA's tests have groups {0,1} and pairs {0,1},{1,0}."""
    pairs = ((0, 1), (1, 0)) if op is Collective.PERMUTE else ()
    return Operation(
        op=op, n_bytes=n_bytes, dtype="f32", groups=((0, 1),), pairs=pairs, n_devices=n_devices,
        devices_per_process=devices_per_process,
    )  # fmt: skip


NVSHMEM_OFF = "--xla_gpu_experimental_enable_nvshmem=false"
SMALL, LARGE = 1024 * 1024 * 4, 8192 * 8192 * 4


# collective_backend_assigner_test.cc of each release, case by case.
@pytest.mark.parametrize(
    ("rules", "asked", "slice_size", "expected"),
    [
        ("xla-0.6.2", pair(Collective.ALL_REDUCE, SMALL), 0, Assigned.NVSHMEM),
        ("xla-0.6.2", pair(Collective.ALL_REDUCE, LARGE), 0, Assigned.NCCL),
        ("xla-0.6.2", pair(Collective.PERMUTE, SMALL), 0, Assigned.NVSHMEM),
        ("xla-0.7.1", pair(Collective.PERMUTE, LARGE), 0, Assigned.NCCL),
        ("xla-0.7.2", pair(Collective.PERMUTE, LARGE), 0, Assigned.NVSHMEM),
        ("xla-0.8.1", pair(Collective.ALL_REDUCE, SMALL), 0, Assigned.NVSHMEM),
        ("xla-0.8.1", pair(Collective.ALL_REDUCE, LARGE), 0, Assigned.NCCL),
        ("xla-0.8.1", pair(Collective.PERMUTE, LARGE), 0, Assigned.NVSHMEM),
        # IntraNvlinkDomain: 2 devices a host, groups across hosts, 4 replicas in a slice of 4
        ("xla-0.8.1", Operation(op=Collective.PERMUTE, n_bytes=SMALL, dtype="u32", groups=((0, 2), (1, 3)), n_devices=4,
                                pairs=((0, 2), (2, 0), (1, 3), (3, 1)), devices_per_process=2), 4, Assigned.NVSHMEM),
        ("xla-0.8.1", Operation(op=Collective.PERMUTE, n_bytes=LARGE, dtype="u32", groups=((0, 2), (1, 3)), n_devices=4,
                                pairs=((0, 2), (2, 0), (1, 3), (3, 1)), devices_per_process=2), 4, Assigned.NVSHMEM),
        # NonIntraNvlinkDomain: a slice of 2
        ("xla-0.8.1", Operation(op=Collective.PERMUTE, n_bytes=SMALL, dtype="u32", groups=((0, 2), (1, 3)), n_devices=4,
                                pairs=((0, 2), (2, 0), (1, 3), (3, 1)), devices_per_process=2), 2, Assigned.NCCL),
        # before 0.8.1 the slice didn't count
        ("xla-0.8.0", Operation(op=Collective.PERMUTE, n_bytes=SMALL, dtype="u32", groups=((0, 2), (1, 3)), n_devices=4,
                                pairs=((0, 2), (2, 0), (1, 3), (3, 1)), devices_per_process=2), 4, Assigned.NCCL),
        ("xla-0.10.1", pair(Collective.PERMUTE, LARGE), 0, Assigned.NVSHMEM),
        ("xla-0.10.2", pair(Collective.PERMUTE, SMALL), 0, Assigned.NCCL),
        ("xla-0.11.1", pair(Collective.ALL_REDUCE, SMALL), 0, Assigned.NCCL),
    ],
)  # fmt: skip
def test_xla_s_own_test_cases_come_out_as_in_xla(rules: str, asked: Operation, slice_size: int, expected: Assigned) -> None:
    assert assign(rule_set(rules), asked, slice_size)[0] is expected


@pytest.mark.parametrize("rules", ["xla-0.6.2", "xla-0.8.1"])
def test_the_threshold_is_strict(rules: str) -> None:
    at, below = (assign(rule_set(rules), pair(Collective.ALL_REDUCE, n), 0)[0] for n in (16 * MiB, 16 * MiB - 1))

    assert (at, below) == (Assigned.NCCL, Assigned.NVSHMEM)


@pytest.mark.parametrize("op", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.BROADCAST])
def test_xla_never_gives_other_operations_to_nvshmem(op: Collective) -> None:
    for rules in RULE_SETS:
        assert assign(rules, operation(op, 1024, 4), 72)[0] is Assigned.NCCL


def test_one_device_a_process_qualifies_even_across_domains_and_that_is_a_hazard() -> None:
    wide = operation(Collective.PERMUTE, MiB, 144)

    assert assign(rule_set("xla-0.8.1"), wide, 72)[0] is Assigned.NVSHMEM
    assert any("several NVLink domains" in hazard for hazard in hazards(wide, 72))


def test_a_program_larger_than_a_domain_never_qualifies_by_its_slice() -> None:
    small_groups = Operation(
        op=Collective.ALL_REDUCE, n_bytes=1024, dtype="f32", groups=tuple((i, i + 72) for i in range(4)), n_devices=144,
        devices_per_process=4,
    )  # fmt: skip

    assert assign(rule_set("xla-0.8.1"), small_groups, 72)[0] is Assigned.NCCL


@pytest.mark.parametrize("name", ["0.8.1", "xla-", "xla-new", "xla-0.5.0", "xla-0.12.0", "xla-0.8.x"])
def test_rules_that_are_not_known_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"rules|version"):
        rule_set(name)


def test_hazards_name_a_team_too_wide_a_partial_permute_and_a_dtype_without_put() -> None:
    subgroup = operation(Collective.ALL_REDUCE, MiB, 2, n_devices=32)
    partial = Operation(
        op=Collective.PERMUTE, n_bytes=MiB, dtype="bf16", groups=((0, 1, 2),), pairs=((0, 1), (1, 2)), n_devices=3
    )
    eight_bit = operation(Collective.PERMUTE, MiB, 4, dtype="f8e4m3fn")

    assert any("NVSHMEM_TEAM_SHARED" in hazard for hazard in hazards(subgroup, 72))
    assert any("no source" in hazard for hazard in hazards(partial, 72))
    assert any("no put of this dtype" in hazard for hazard in hazards(eight_bit, 72))
    assert hazards(operation(Collective.PERMUTE, MiB, 4), 72) == []


@pytest.mark.parametrize(
    ("rules", "wanted", "expected"),
    [
        ("xla-0.8.1", Wanted.NVSHMEM, ["--xla_gpu_experimental_enable_nvshmem=true"]),
        ("xla-0.10.2", Wanted.NVSHMEM, None),
        ("xla-0.8.1", Wanted.PUTS, None),
        # NVSHMEM, where it is enabled, takes the permute before its mode counts
        ("xla-0.10.1", Wanted.PUTS, [NVSHMEM_OFF, "--xla_gpu_collective_permute_mode=symmetric"]),
        ("xla-0.11.1", Wanted.PUTS, ["--xla_gpu_collective_permute_mode=symmetric"]),
        ("xla-0.11.1", Wanted.NCCL, []),
    ],
)
def test_flags_follow_the_release(rules: str, wanted: Wanted, expected: list[str] | None) -> None:
    assert flags(rule_set(rules), operation(Collective.PERMUTE, MiB, 4), wanted) == expected


def test_a_large_permute_of_a_ring_goes_by_puts_for_a_margin() -> None:
    found = choose(operation(Collective.PERMUTE, 32 * MiB, 16), setting())

    assert found.chosen.way is Way.NCCL_PUT
    assert found.margin is not None
    assert found.margin > MODEL_ERROR
    assert found.decided_by.startswith("margin")


def test_nccl_stays_when_the_gain_is_within_the_model_s_error() -> None:
    found = choose(operation(Collective.PERMUTE, 2**30, 16), setting())

    assert found.margin is not None
    assert 0 < found.margin <= MODEL_ERROR
    assert found.chosen.way is Way.NCCL
    assert "NCCL stays" in found.decided_by


def test_a_way_that_nobody_measured_needs_a_larger_margin() -> None:
    found = choose(operation(Collective.ALL_REDUCE, MiB, 2), setting())
    reduce = next(o for o in found.options if o.way is Way.NVSHMEM_REDUCE)

    assert reduce.error == DERIVED_ERROR
    assert found.chosen.way is Way.NCCL


def test_another_nvshmem_than_the_one_that_was_read_is_noted() -> None:
    older = replace(setting(), libraries=Libraries(NEWEST.nccl, Version((2, 10, 1))))

    found = {option.way: option for option in options(operation(Collective.PERMUTE, 2**20, 8), older)}

    assert "as of NVSHMEM 3.5.1, 2.10.1 may differ" in found[Way.NVSHMEM_PUT].reason
    assert "may differ" not in found[Way.NCCL_PUT].reason


def test_rules_come_before_cost() -> None:
    found = choose(operation(Collective.PERMUTE, 32 * MiB, 16, dtype="s8"), setting("xla-0.8.1"))

    assert found.chosen.way is Way.NCCL
    assert found.decided_by.startswith("rule: nothing else is possible")
    assert "no put of this dtype" in found.decided_by


@pytest.mark.parametrize(
    ("asked", "where", "way", "reason"),
    [
        (operation(Collective.PERMUTE, MiB, 16), setting(nccl="2.28.9"), Way.NCCL_PUT, "came with 2.29.2"),
        (operation(Collective.PERMUTE, MiB, 144), setting(), Way.NCCL_PUT, "several NVLink domains"),
        (operation(Collective.PERMUTE, MiB, 16), setting("xla-0.8.1"), Way.NCCL_PUT, "came with xla-0.10.1"),
        (operation(Collective.PERMUTE, MiB, 16), setting("xla-0.11.1"), Way.NVSHMEM_PUT, "no NVSHMEM collectives"),
        (operation(Collective.PERMUTE, MiB, 16, devices_per_process=4), setting("xla-0.8.1"), Way.NVSHMEM_PUT, "unless each"),
        (operation(Collective.PERMUTE, MiB, 144), setting("xla-0.8.1"), Way.NVSHMEM_PUT, "is over the team of one"),
        (operation(Collective.ALL_REDUCE, MiB, 2, n_devices=32), setting("xla-0.8.1"), Way.NVSHMEM_REDUCE, "would be wrong"),
        (operation(Collective.ALL_GATHER, MiB, 8), setting(nccl="2.28.2"), Way.NCCL_COPY_ENGINE, "came with 2.28.3"),
        (operation(Collective.ALL_REDUCE, MiB, 8), setting(nccl="2.26.2"), Way.NCCL_SYMMETRIC, "came with 2.27.3"),
        (operation(Collective.ALL_REDUCE, MiB, 8, dtype="s32"), setting(), Way.NCCL_SYMMETRIC, "no sum of s32"),
    ],
)  # fmt: skip
def test_what_is_not_possible_says_which_rule(asked: Operation, where: Setting, way: Way, reason: str) -> None:
    found = next(o for o in options(asked, where) if o.way is way)

    assert not found.possible
    assert reason in found.reason


def test_a_permute_costs_what_the_channel_law_says_of_the_communicator_that_xla_makes() -> None:
    law = channel_law(MACHINE, CALIBRATION)
    assert law is not None
    asked = operation(Collective.PERMUTE, 4 * MiB, 8, n_devices=64)

    whole = next(o for o in options(asked, setting("xla-0.8.1")) if o.way is Way.NCCL)
    own = next(o for o in options(asked, setting("xla-0.11.1")) if o.way is Way.NCCL)

    assert whole.seconds == float(law.send_recv_s(4 * MiB, 64))
    assert own.seconds == float(law.send_recv_s(4 * MiB, 8))


def test_nvshmem_under_xla_costs_a_put_and_a_barrier() -> None:
    law = put_law(MACHINE, CALIBRATION)
    assert law is not None
    asked = operation(Collective.PERMUTE, 4 * MiB, 8)

    found = next(o for o in options(asked, setting("xla-0.8.1")) if o.way is Way.NVSHMEM_PUT)

    assert found.seconds == pytest.approx(float(law.put_s(4 * MiB)) + 3 * CALIBRATION.put.barrier_s)


def test_traffic_is_told_from_the_pairs() -> None:
    def permute(*pairs: tuple[int, int]) -> Operation:
        return Operation(op=Collective.PERMUTE, n_bytes=8, dtype="f32", groups=joined(pairs), pairs=pairs, n_devices=4)

    assert permute((0, 1), (1, 0)).traffic is Traffic.PAIRS
    assert permute((0, 1), (1, 2), (2, 0)).traffic is Traffic.RING
    assert permute((0, 1), (2, 3)).traffic is Traffic.ONE_WAY


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=20))
def test_joined_ranks_are_those_that_a_walk_over_the_pairs_reaches(pairs: list[tuple[int, int]]) -> None:
    def reached(rank: int) -> frozenset[int]:
        found = {rank}
        while more := {b for a, b in (*pairs, *((b, a) for a, b in pairs)) if a in found} - found:
            found |= more
        return frozenset(found)

    expected = {reached(rank) for pair in pairs for rank in pair}

    assert {frozenset(group) for group in joined(tuple(pairs))} == expected


def test_the_symmetric_kernel_is_as_nccl_s_model_has_it_by_hand() -> None:
    # Blackwell, 8 ranks, all-reduce of 64 MiB: multicast, at most ceil(32 / 8) = 4 blocks. 1 block of 55 GiB/s x 8 = 440 GiB/s
    # is not within 2.5 % of 4, nor are 2 (880); 3 (1320) are. Bytes on the bus: B / 8 + B.
    gib_us = 2**30 / 1e6
    ceiling, block = 1000 * gib_us, 55 * gib_us
    bandwidth = ceiling - block * math.log1p((math.exp(ceiling / block) - 1) * math.exp(-3 * 8 * block / block))
    us = 19.5 + 64 * MiB * 9 / 8 / bandwidth - 1

    found = symmetric_kernel(Collective.ALL_REDUCE, 64 * MiB, 8, MACHINE)

    assert (found.name, found.n_blocks) == ("RSxLDMC_AGxSTMC", 3)
    assert found.seconds == pytest.approx(us * 1e-6, rel=1e-6)


def test_small_messages_go_by_low_latency_kernels() -> None:
    assert symmetric_kernel(Collective.ALL_GATHER, 8192, 8, MACHINE).name.startswith("LL")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float"}, "dtype 'float' is unknown"),
        ({"n_bytes": 0}, "bytes"),
        ({"groups": ((0, 0),)}, "different devices"),
        ({"groups": ((0, 9),)}, "different devices"),
        ({"pairs": ((0, 1),)}, "belong to a"),
    ],
)
def test_an_operation_that_makes_no_sense_is_refused(change: dict[str, object], reason: str) -> None:
    valid = {"op": Collective.ALL_REDUCE, "n_bytes": 8, "dtype": "f32", "groups": ((0, 1),), "n_devices": 2}

    with pytest.raises(InputError, match=reason):
        Operation(**{**valid, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_ranks", "caution"),
    [
        (64, ""),
        (8, ""),
        (72, "all-reduce over 72 ranks in 1 NVLink domain was never measured: the most is 64 ranks in 1 domain"),
        (256, "all-reduce over 256 ranks in 4 NVLink domains was never measured: "
              "all that was is inside one domain, up to 64 ranks"),
    ],
)  # fmt: skip
def test_a_time_read_off_curves_of_smaller_groups_comes_with_a_caution(n_ranks: int, caution: str) -> None:
    nccl = options(operation(Collective.ALL_REDUCE, 64 * MiB, n_ranks), setting())[0]

    assert nccl.reason.startswith("measured on 64 ranks" if n_ranks > 8 else "measured on 8 ranks")
    assert nccl.caution == caution
    assert nccl.reason.endswith(f"; caution: {caution}" if caution else "NVLS Simple")


def test_one_rank_alone_has_nothing_to_choose() -> None:
    with pytest.raises(InputError, match="at least 2 ranks"):
        operation(Collective.ALL_REDUCE, 8, 1)
