"""shardroute.topologies.topologies: columns of GPUs, and the names that the package offers."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardroute.topologies as package
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import Topology, build_topology, join_topologies, topology_from_dict, topology_to_dict


def test_the_package_offers_these_names() -> None:
    assert sorted(package.__all__) == list(package.__all__)
    assert set(package.__all__) == {
        *("Calibration", "Figure", "Machine", "MachineKind", "PathCost", "Topology"),
        *("InfeasibleError", "InputError", "PlanError", "RunError", "ShardrouteError"),
        *("build_topology", "join_topologies", "topology_from_dict", "topology_to_dict"),
        *("load_machine", "machine_from_dict", "machine_names", "machine_to_dict", "parse_machine"),
        *("calibration_figure", "calibration_from_figures", "calibration_names"),
        *("calibration_to_dict", "check_calibration", "default_calibration", "load_calibration"),
        *("nominal_calibration", "save_calibration"),
        *("format_bandwidth", "format_bytes", "format_seconds"),
        *("parse_bandwidth", "parse_bytes", "parse_seconds"),
    }
    assert all(hasattr(package, name) for name in package.__all__)


def test_a_dgx_is_a_host_and_a_domain_of_eight() -> None:
    topology = build_topology(load_machine("dgx-h100"), 2)

    assert topology.n_gpus == 16
    assert topology.host.tolist() == [0] * 8 + [1] * 8
    assert topology.domain.tolist() == topology.host.tolist()
    assert (topology.n_units, topology.n_hosts, topology.n_domains) == (2, 2, 2)


def test_an_nvl72_domain_spans_eighteen_hosts() -> None:
    topology = build_topology(load_machine("gb200-nvl72"), 2)

    assert (topology.n_gpus, topology.n_hosts, topology.n_domains) == (144, 36, 2)
    assert topology.host[71:73].tolist() == [17, 18]
    assert topology.domain[71:73].tolist() == [0, 1]


def test_processes_share_one_host_and_one_domain() -> None:
    topology = build_topology(load_machine("cpu-processes"), 5)

    assert topology.host.tolist() == topology.domain.tolist() == [0] * 5
    assert not topology.nvlink_Bps.any()
    assert not topology.nic_Bps.any()
    assert (topology.n_units, topology.n_hosts, topology.n_domains) == (5, 1, 1)


def test_the_nic_column_sums_a_gpus_nics() -> None:
    machine = replace(load_machine("dgx-h100"), nics_per_gpu=2, figures=())

    topology = build_topology(machine, 1)

    assert topology.nic_Bps.tolist() == [100e9] * 8
    assert topology.nvlink_Bps.tolist() == [450e9] * 8


def test_columns_have_their_types_and_are_read_only() -> None:
    topology = build_topology(load_machine("dgx-h100"), 1)

    columns = (topology.host, topology.domain, topology.nvlink_Bps, topology.nic_Bps)

    assert [column.dtype.name for column in columns] == ["int32", "int32", "float64", "float64"]
    for column in columns:
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


@given(st.sampled_from(["dgx-h100", "gb200-nvl72", "cpu-processes"]), st.integers(1, 2000))
def test_without_a_count_as_few_units_as_hold_the_gpus_are_built(name: str, min_gpus: int) -> None:
    machine = load_machine(name)

    topology = build_topology(machine, min_gpus=min_gpus)

    assert topology.n_gpus >= min_gpus
    assert topology.n_gpus - machine.gpus_per_unit < min_gpus


def test_too_few_units_are_refused_with_both_numbers_and_the_count_that_fits() -> None:
    with pytest.raises(InputError, match="dgx-h100 x 2 has 16 GPUs, but 20 are needed; use 'dgx-h100 x 3'"):
        build_topology(load_machine("dgx-h100"), 2, min_gpus=20)


def test_more_units_than_needed_are_kept() -> None:
    assert build_topology(load_machine("dgx-h100"), 4, min_gpus=20).n_gpus == 32


@pytest.mark.parametrize("n_units", [0, -1, 10**9])
def test_a_count_that_no_cluster_has_is_refused(n_units: int) -> None:
    with pytest.raises(InputError, match="dgx-h100"):
        build_topology(load_machine("dgx-h100"), n_units)


def test_a_part_of_a_unit_is_refused() -> None:
    with pytest.raises(InputError, match="whole units of 8, found 12"):
        Topology(load_machine("dgx-h100"), 12)


def test_topologies_are_equal_and_hash_equal_by_content() -> None:
    one, same = (
        build_topology(load_machine("dgx-h100"), 2),
        build_topology(load_machine("dgx-h100"), min_gpus=9),
    )
    larger, other = build_topology(load_machine("dgx-h100"), 3), build_topology(load_machine("hgx-h200"), 2)

    assert one == same
    assert len({one, same, larger, other}) == 3


def test_a_topology_survives_json_and_pickle() -> None:
    topology = build_topology(load_machine("gb200-nvl72"), 2)

    from_json = topology_from_dict(json.loads(json.dumps(topology_to_dict(topology))))
    from_pickle = pickle.loads(pickle.dumps(topology))

    assert from_json == topology == from_pickle
    assert not from_pickle.host.flags.writeable
    assert np.array_equal(from_json.domain, topology.domain)


def test_a_topology_dict_that_does_not_fit_is_refused_with_the_key() -> None:
    data = topology_to_dict(build_topology(load_machine("dgx-h100"), 2))

    with pytest.raises(InputError, match="topology: n_units: expected a whole number, found '2'"):
        topology_from_dict({**data, "n_units": "2"})
    with pytest.raises(InputError, match="topology: machine: missing"):
        topology_from_dict({"n_units": 2})
    with pytest.raises(InputError, match="expected a count from 1"):
        topology_from_dict({**data, "n_units": 0})


def test_gpus_can_have_nics_of_their_own_and_keep_them_through_a_file() -> None:
    plain = build_topology(load_machine("dgx-h100"), 2)

    slow = replace(plain, own_nic_Bps=((9, 25e9), (3, 0.0)))

    assert slow.nic_Bps[[3, 8, 9]].tolist() == [0.0, 50e9, 25e9]
    assert slow != plain
    assert topology_from_dict(json.loads(json.dumps(topology_to_dict(slow)))) == slow
    assert pickle.loads(pickle.dumps(slow)).nic_Bps[9] == 25e9
    assert "own_nic_Bps" not in topology_to_dict(plain)


@pytest.mark.parametrize("own", [((16, 1e9),), ((1, 1e9), (1, 2e9)), ((0, -1.0),), ((0, float("nan")),)])
def test_impossible_nics_are_refused(own) -> None:
    with pytest.raises(InputError, match="dgx-h100"):
        replace(build_topology(load_machine("dgx-h100"), 2), own_nic_Bps=own)


def test_more_gpus_than_any_cluster_has_are_refused_before_a_column_is_made() -> None:
    with pytest.raises(InputError, match="expected 1 to 1048576 GPUs in whole units of 8, found 8000000"):
        build_topology(load_machine("dgx-h100"), 10**6)

def test_machines_of_several_kinds_are_numbered_one_after_the_other() -> None:
    h100, gb200 = load_machine("dgx-h100"), load_machine("gb200-nvl72")

    joined = join_topologies([build_topology(h100, 2), build_topology(gb200, 1)])

    assert joined.n_gpus == 16 + 72
    assert joined.domain.tolist() == [0] * 8 + [1] * 8 + [2] * 72
    assert joined.host.tolist()[14:22] == [1, 1, 2, 2, 2, 2, 3, 3]
    assert joined.nvlink_Bps[15] == h100.nvlink_Bps
    assert joined.nvlink_Bps[16] == gb200.nvlink_Bps
    assert joined.hbm_Bps[[15, 16]].tolist() == [h100.hbm_Bps, gb200.hbm_Bps]
    assert joined.nic_Bps[[0, 87]].tolist() == [h100.gpu_nic_Bps, gb200.gpu_nic_Bps]
    assert joined.title == "dgx-h100 x 2 + gb200-nvl72 x 1"


def test_joining_keeps_own_nics_and_folds_equal_neighbours() -> None:
    h100 = load_machine("dgx-h100")
    slow = replace(build_topology(h100, 1), own_nic_Bps=((2, 1e9),))

    joined = join_topologies([slow, slow])

    assert joined == replace(build_topology(h100, 2), own_nic_Bps=((2, 1e9), (10, 1e9)))
    assert hash(joined) == hash(replace(build_topology(h100, 2), own_nic_Bps=((2, 1e9), (10, 1e9))))


def test_a_joined_topology_survives_a_file_and_a_pickle() -> None:
    joined = join_topologies([build_topology(load_machine("dgx-h100"), 1), build_topology(load_machine("gb200-nvl72"), 2)])

    for copy in (topology_from_dict(json.loads(json.dumps(topology_to_dict(joined)))), pickle.loads(pickle.dumps(joined))):
        assert copy == joined
        assert copy.domain.tolist() == joined.domain.tolist()


@pytest.mark.parametrize("parts", [("dgx-h100", "cpu-processes"), ("cpu-processes", "dgx-h100")])
def test_machines_that_share_no_fabric_are_not_joined(parts) -> None:
    with pytest.raises(InputError, match="don't go together"):
        join_topologies([build_topology(load_machine(name), 1) for name in parts])


def test_one_fabric_has_one_oversubscription() -> None:
    h100 = load_machine("dgx-h100")
    thin = replace(h100, name="thin", oversubscription=2.0, figures=())

    with pytest.raises(InputError, match=r"oversubscription 1.*thin.*2"):
        join_topologies([build_topology(h100, 1), build_topology(thin, 1)])
