"""Machines from NCCL's dumps, nvidia-smi, ibstat, ibnetdiscover, tables of rails and lists of hosts."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.topologies import load_machine
from shardroute.topologies.errors import InputError
from shardroute.topologies.importers import (
    Inputs,
    NicChoice,
    expand_hosts,
    import_machines,
    machine_to_toml,
    parse_ibnetdiscover,
    parse_ibstat,
    parse_nccl_dump,
    parse_nvidia_smi,
    parse_rail_table,
)

DATA = Path(__file__).parent / "data" / "clusters"
COMPUTE = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8")


def text(name: str) -> str:
    return (DATA / name).read_text()


def dump(name: str = "dgx-h100.xml", **changes: str):
    """The hosts of a dump, with words of its XML replaced."""
    data = text(name)
    for old, new in changes.values():
        assert old in data
        data = data.replace(old, new)
    return parse_nccl_dump(data.encode(), name)


def test_a_dump_of_a_dgx_h100_is_the_shipped_machine() -> None:
    shipped = load_machine("dgx-h100")

    (made,) = import_machines(Inputs(dump()), "pod").machines

    same = {"name": shipped.name, "title": shipped.title, "figures": shipped.figures}
    assert replace(made.machine, **same) == shipped
    assert {figure.key for figure in made.machine.figures} == {figure.key for figure in shipped.figures}
    assert made.n_units == 1


def test_an_ethernet_port_is_left_out_though_its_name_stands_between_the_others() -> None:
    (host,) = dump()

    imported = import_machines(Inputs((host,)), "pod")

    assert [nic.name for nic in host.nics if nic.ethernet] == ["mlx5_3"]
    nic = next(figure for figure in imported.machines[0].machine.figures if figure.key == "nic.per_gpu")
    assert ", ".join(COMPUTE) in nic.source
    assert "mlx5_3" not in nic.source
    assert "mlx5_3: left out, Ethernet" in imported.notes


def test_a_fabric_of_ethernet_is_taken_only_when_the_user_says_so() -> None:
    hosts = dump(kind=("0x020700", "0x020000"))

    with pytest.raises(InputError, match=r"every NIC is Ethernet .*say --ethernet"):
        import_machines(Inputs(hosts), "pod")
    taken = import_machines(Inputs(hosts, nics=NicChoice(ethernet=True)), "pod")

    assert taken.machines[0].machine.nics_per_gpu == 1
    assert "mlx5_3: left out, nearest to no GPU (--nics takes them)" in taken.notes


def test_the_nearest_nics_share_the_deepest_pcie_switch() -> None:
    (host,) = dump()

    assert [gpu.near for gpu in host.gpus] == [(name,) for name in COMPUTE]


def test_the_hosts_of_one_dump_are_one_domain_because_nccl_fuses_a_clique() -> None:
    (made,) = import_machines(Inputs(dump("gb200-two-hosts.xml")), "rack").machines

    machine = made.machine
    assert (machine.gpus_per_host, machine.hosts_per_domain, machine.nvlink_Bps, machine.gpu_nic_Bps) == (4, 2, 900e9, 50e9)


def test_two_cliques_of_one_rack_are_two_domains_whatever_the_hosts_are_called() -> None:
    hosts = tuple(parse_nvidia_smi(text(f"gb200-host{i}.txt"), f"host{i}") for i in (0, 2, 1, 3))

    (made,) = import_machines(Inputs(hosts, names=("rack1-a", "rack1-b", "rack1-c", "rack1-d")), "rack").machines

    assert (made.machine.hosts_per_domain, made.n_units) == (2, 2)
    assert made.hosts == ("rack1-a", "rack1-c", "rack1-b", "rack1-d")


def test_the_hosts_of_one_domain_stand_for_those_of_others() -> None:
    (made,) = import_machines(Inputs(dump("gb200-two-hosts.xml"), names=expand_hosts("r[1-6]")), "rack").machines

    assert (made.machine.hosts_per_domain, made.n_units, made.hosts) == (2, 3, expand_hosts("r[1-6]"))
    with pytest.raises(InputError, match="--hosts names 5 hosts, the files show 2"):
        import_machines(Inputs(dump("gb200-two-hosts.xml"), names=expand_hosts("r[1-5]")), "rack")


def test_cliques_of_unlike_size_are_machines_of_their_own() -> None:
    hosts = tuple(parse_nvidia_smi(text(f"gb200-host{i}.txt"), f"host{i}") for i in (0, 1, 2))

    made = import_machines(Inputs(hosts), "rack").machines

    assert [(m.machine.name, m.machine.hosts_per_domain, m.n_units) for m in made] == [("rack", 2, 1), ("rack-2", 1, 1)]


def test_one_host_of_a_rack_does_not_say_how_far_its_domain_goes() -> None:
    host = parse_nvidia_smi(text("gb200-host0.txt"), "host0")

    with pytest.raises(InputError, match=r"goes beyond this host.*--domain-hosts 18"):
        import_machines(Inputs((host,)), "rack")
    names = expand_hosts("r[01-36]")
    (made,) = import_machines(Inputs((host,), names, hosts_per_domain=18), "rack").machines

    assert (made.machine.gpus_per_domain, made.n_units) == (72, 2)


def test_a_fabric_uuid_of_zeros_ends_at_the_host() -> None:
    zeros = text("gb200-host0.txt").replace("5b1c9a52-73d0-4d3e-9c0f-2f6f0c6d8e11", "00000000-0000-0000-0000-000000000000")

    host = parse_nvidia_smi(zeros, "host0")

    assert not host.spans


def test_a_gpu_that_has_not_joined_its_fabric_is_refused_by_its_line() -> None:
    broken = text("gb200-host0.txt").replace(": Completed", ": In Progress")

    with pytest.raises(InputError, match=r"host0: line \d+: the fabric of this GPU is In Progress"):
        parse_nvidia_smi(broken, "host0")


def test_a_fabric_that_ends_at_the_host_is_refused_where_it_is_not_up() -> None:
    down = text("gb200-host0.txt").replace("5b1c9a52-73d0-4d3e-9c0f-2f6f0c6d8e11", "00000000-0000-0000-0000-000000000000")
    down = down.replace(": Success", ": Insufficient Resources", 1)

    with pytest.raises(InputError, match=r"host0: line \d+: the fabric of this GPU is Completed, Insufficient Resources"):
        parse_nvidia_smi(down, "host0")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("Summary                       : Unhealthy", "Summary: Unhealthy"),
        ("Route Unhealthy               : True", "Route Unhealthy: True"),
    ],
)
def test_a_gpu_that_its_fabric_does_not_carry_is_refused_by_its_line(row: str, words: str) -> None:
    sick = text("gb200-host0.txt").replace("Bandwidth                     : Full", row, 1)

    with pytest.raises(InputError, match=rf"host0: line \d+: the fabric of this GPU is not healthy \({words}\).*leave the host"):
        parse_nvidia_smi(sick, "host0")


@pytest.mark.parametrize(
    ("word", "refused"), [("Unhealthy", True), ("Healthy", False), ("N/A", False), ("[Not Supported]", False)]
)
def test_a_driver_that_says_health_in_one_line_is_heeded_too(word: str, refused: bool) -> None:
    lines = text("gb200-host0.txt").splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip() == "Health")
    rows = 1 + next(i for i, line in enumerate(lines[at + 1 :]) if len(line) - len(line.lstrip()) <= 8)
    flat = "\n".join([*lines[:at], f"        Health                            : {word}", *lines[at + rows :]])

    if refused:
        with pytest.raises(InputError, match=r"host0: line \d+: the fabric of this GPU is not healthy \(Health: Unhealthy\)"):
            parse_nvidia_smi(flat, "host0")
    else:
        assert parse_nvidia_smi(flat, "host0").troubles == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("Bandwidth                     : Degraded", "Bandwidth: Degraded"),
        ("Summary                       : Limited Capacity", "Summary: Limited Capacity"),
        ("Incorrect Configuration       : Insufficient Nvlinks", "Incorrect Configuration: Insufficient Nvlinks"),
        ("Access Timeout Recovery       : True", "Access Timeout Recovery: True"),
    ],
)
def test_a_fabric_that_carries_less_than_it_should_is_told_with_the_gpus_that_have_it(row: str, words: str) -> None:
    lesser = text("gb200-host0.txt").replace("Bandwidth                     : Full", row, 2)
    host = parse_nvidia_smi(lesser, "host0")

    (note,) = [n for n in import_machines(Inputs((host,), hosts_per_domain=1), "rack").notes if "fabric" in n]

    assert note.startswith(f"host0: NVLink fabric of GPU 0, GPU 1: {words}; it is planned as if it were whole")


def test_a_fabric_of_which_the_driver_says_nothing_or_only_good_is_not_told_of() -> None:
    rows = ("Summary : Healthy", "Bandwidth : N/A", "Route Unhealthy : false", "Incorrect Configuration : [Not Supported]")
    sound = text("gb200-host0.txt").replace("Bandwidth                     : Full", "\n            ".join(rows))

    assert parse_nvidia_smi(sound, "host0").troubles == ()
    assert parse_nvidia_smi(text("gb200-host0.txt"), "host0").troubles == ()


def test_the_matrix_gives_the_links_and_the_nearest_nics_by_the_names_of_its_legend() -> None:
    host = parse_nvidia_smi(text("dgx-h100-topo.txt"), "topo.txt")

    assert [gpu.near for gpu in host.gpus] == [(name,) for name in COMPUTE]
    assert {gpu.n_nvlinks for gpu in host.gpus} == {18}
    assert {gpu.model for gpu in host.gpus} == {"NVIDIA H100 80GB HBM3"}


def test_gpus_without_a_model_need_a_machine_to_take_memory_from() -> None:
    matrix = text("dgx-h100-topo.txt").partition("GPU 0: ")[0]
    host = parse_nvidia_smi(matrix, "topo.txt")

    with pytest.raises(InputError, match=r"no model of its GPUs.*--like, one of dgx-b200, dgx-h100"):
        import_machines(Inputs((host,)), "pod")
    (made,) = import_machines(Inputs((host,), like=load_machine("dgx-b200")), "pod").machines

    assert made.machine.memory_bytes == 180e9
    assert made.machine.nvlink_Bps == 900e9


def test_ibstat_says_what_a_nic_is_and_how_fast() -> None:
    host = parse_nvidia_smi(text("dgx-h100-topo.txt"), "topo.txt")
    listed = parse_ibstat(text("ibstat.txt").replace("Rate: 400", "Rate: 200"), "ibstat.txt")

    imported = import_machines(Inputs((host,), nics=NicChoice(listed=listed)), "pod")

    assert imported.machines[0].machine.nic_Bps == 25e9
    assert imported.notes == ("mlx5_3: left out, Ethernet",)


def test_a_port_that_is_down_is_left_out() -> None:
    down = text("ibstat.txt").replace("State: Active", "State: Down", 1)

    listed = parse_ibstat(down, "ibstat.txt")

    assert [nic.name for nic in listed][:2] == ["mlx5_1", "mlx5_2"]


def test_a_rail_is_the_leaf_that_the_cable_leads_to_not_the_number_of_the_nic() -> None:
    fabric = parse_ibnetdiscover(text("ibnetdiscover.txt"), "fabric.txt")
    inputs = Inputs(dump(), names=("node001", "node002"), nics=NicChoice(fabric=fabric))

    imported = import_machines(inputs, "pod")

    leaf = {(rail.host, rail.nic): rail.rail for rail in imported.rails}
    assert leaf["node001", "mlx5_1"] == "MF0;leaf-1:MQM9700/U1"
    assert leaf["node002", "mlx5_1"] == "MF0;leaf-2:MQM9700/U1"
    assert leaf["node002", "mlx5_2"] == "MF0;leaf-1:MQM9700/U1"
    assert any(note.startswith("node002: mlx5_1 hangs on MF0;leaf-2") for note in imported.notes)
    assert len(leaf) == 16
    assert not any(nic == "mlx5_3" for _, nic in leaf)


def test_a_file_of_any_host_of_the_list_may_stand_for_all() -> None:
    fabric = parse_ibnetdiscover(text("ibnetdiscover.txt"), "fabric.txt")
    inputs = Inputs(dump(), names=("node002", "node001"), nics=NicChoice(fabric=fabric))  # the dump's GUIDs are node001's

    imported = import_machines(inputs, "pod")

    leaf = {(rail.host, rail.nic): rail.rail for rail in imported.rails}
    assert (leaf["node001", "mlx5_1"], leaf["node002", "mlx5_1"]) == ("MF0;leaf-1:MQM9700/U1", "MF0;leaf-2:MQM9700/U1")


def test_a_guid_finds_the_host_that_nobody_named() -> None:
    fabric = parse_ibnetdiscover(text("ibnetdiscover.txt"), "fabric.txt")

    imported = import_machines(Inputs(dump(), nics=NicChoice(fabric=fabric)), "pod")

    assert len(imported.rails) == 8


def test_oversubscription_is_what_a_leaf_carries_down_over_up_without_sharps_own_adapters() -> None:
    fabric = parse_ibnetdiscover(text("ibnetdiscover.txt"), "fabric.txt")

    assert fabric.oversubscription == 2.0  # 4 adapters and 2 uplinks a leaf, all 4xNDR
    assert {port.bandwidth_Bps for port in fabric.ports} == {50e9}
    assert len(fabric.ports) == 16


def test_a_table_of_rails_says_which_nics_count() -> None:
    rows = "\n".join(f"n1,{nic},rail-{i},200 Gb/s" for i, nic in enumerate(COMPUTE[:4]))
    fabric = parse_rail_table(f"host,nic,rail,rate\n{rows}\n", "rails.csv")

    (made,) = import_machines(Inputs(dump(), names=("n1",), nics=NicChoice(fabric=fabric)), "pod").machines

    assert (made.machine.nics_per_gpu, made.machine.nic_Bps) == (1, 12.5e9)  # four of 200 Gb/s for eight GPUs


def test_a_host_that_the_fabric_does_not_know_is_refused_with_those_it_knows() -> None:
    fabric = parse_rail_table("host,nic,rail\nn1,mlx5_0,a\n", "rails.csv")

    with pytest.raises(InputError, match=r"no NIC of x9 is on the fabric.*has the hosts n1"):
        import_machines(Inputs(dump(), names=("x9",), nics=NicChoice(fabric=fabric)), "pod")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("host,nic\n", "line 1: expected the columns host,nic,rail"),
        ("host,nic,rail\n", "no row below the columns"),
        ("host,nic,rail\nn1,mlx5_0\n", "line 2: expected host,nic,rail, found 'n1,mlx5_0'"),
        ("host,nic,rail\nn1,a,r\nn1,a,r\n", "line 3: a of n1 stands twice"),
        ("host,nic,rail,rate\nn1,a,r,fast\n", "line 2: rate: 'fast' is not a bandwidth"),
    ],
)
def test_a_wrong_table_of_rails_is_refused_by_its_line(table: str, words: str) -> None:
    with pytest.raises(InputError, match=f"rails.csv: {words}"):
        parse_rail_table(table, "rails.csv")


def test_gpus_of_a_host_in_two_domains_are_refused() -> None:
    hosts = dump(switches=('tclass="0x068000"', 'tclass="0x030200"'))

    with pytest.raises(InputError, match=r"8 GPUs are 8 NVLink domains, or none"):
        import_machines(Inputs(hosts), "pod")


def test_nics_of_unlike_rates_are_refused_until_some_are_named() -> None:
    hosts = dump(one=('name="mlx5_0" dev="0" latency="0" speed="400000"', 'name="mlx5_0" dev="0" latency="0" speed="200000"'))

    with pytest.raises(InputError, match=r"unlike rates .*mlx5_0 200 Gb/s, mlx5_1 400 Gb/s.*--nics"):
        import_machines(Inputs(hosts), "pod")


def test_an_xml_bomb_is_refused_before_it_expands() -> None:
    bomb = b'<!DOCTYPE a [<!ENTITY b "bbbb">' + b'<!ENTITY c "&b;&b;&b;&b;">' + b"]><system>&c;</system>"

    with pytest.raises(InputError, match=r"bomb.xml: line 1: a DOCTYPE or an entity is declared"):
        parse_nccl_dump(bomb, "bomb.xml")


def test_a_document_type_from_elsewhere_is_refused_too() -> None:
    with pytest.raises(InputError, match=r"t\.xml: line 2: a DOCTYPE"):
        parse_nccl_dump(b'<?xml version="1.0"?>\n<!DOCTYPE system SYSTEM "http://example.com/x.dtd"><system/>', "t.xml")


def test_a_machine_with_other_gpus_than_the_file_shows_is_said() -> None:
    imported = import_machines(Inputs(dump(), like=load_machine("hgx-h200")), "pod")

    assert any("shows NVIDIA H100 SXM5 80 GB, --like hgx-h200 has NVIDIA H200" in note for note in imported.notes)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "expected XML"),
        (b"<system version='1'>", "expected XML"),
        (b"<system>" + b"<pci>" * 100, "64 in each other"),
        (b"<system>" + b"<pci/>" * 100_001, "more than 100000 elements"),
        (b"<graphs/>", "expected NCCL's <system>, found <graphs>"),
        (b"<system/>", "no <gpu>"),
        (b"<system>\n<cpu>\n<gpu dev='x'/></cpu></system>", "line 3: <gpu dev='x'>: expected a whole number"),
        (b"<system>\n<cpu>\n<gpu/></cpu></system>", "line 3: <gpu> has no dev"),
        (b"<?xml version='1.0' encoding='nonsense'?><system/>", "expected XML"),
    ],
)
def test_xml_that_is_no_dump_is_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=f"topo.xml: .*{words}"):
        parse_nccl_dump(data, "topo.xml")


@given(st.integers(0, 9000), st.integers(0, 20))
def test_a_dump_cut_short_is_refused_never_misread(at: int, n: int) -> None:
    data = (DATA / "dgx-h100.xml").read_bytes()

    with pytest.raises(InputError, match=r"topo\.xml: "):
        parse_nccl_dump(data[:at] + b"<" * n, "topo.xml")


@given(st.integers(10, 2200))
def test_a_matrix_cut_short_is_refused_or_lacks_only_its_legend(at: int) -> None:
    whole = parse_nvidia_smi(text("dgx-h100-topo.txt"), "t")

    try:
        host = parse_nvidia_smi(text("dgx-h100-topo.txt")[:at], "t")
    except InputError:
        return
    assert [gpu.n_nvlinks for gpu in host.gpus] == [gpu.n_nvlinks for gpu in whole.gpus]


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("a", ("a",)),
        ("n[001-003,7],login1", ("n001", "n002", "n003", "n7", "login1")),
        ("r[1-2]n[08-10]", ("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10")),
        ("gpu-[3]-x", ("gpu-3-x",)),
    ],
)
def test_a_slurm_list_is_expanded(listed: str, names: tuple[str, ...]) -> None:
    assert expand_hosts(listed) == names


@pytest.mark.parametrize(
    "listed", ["", "a,", "n[1-", "n[3-1]", "n[a]", "n1]", "n[[1]]", "a,a", "n[1-999999999]", "n[0-9999]x[0-9999]"]
)
def test_a_list_that_is_none_is_refused(listed: str) -> None:
    with pytest.raises(InputError, match=r"hosts "):
        expand_hosts(listed)


def test_what_is_written_is_read_back_equal(tmp_path) -> None:
    (made,) = import_machines(Inputs(dump()), "pod").machines
    path = tmp_path / "pod.toml"

    path.write_text(machine_to_toml(made.machine))

    assert load_machine(str(path)) == made.machine


def test_a_source_may_have_any_characters() -> None:
    odd = 'a "b"\\ \x7f\n\U0001f4e6'
    (made,) = import_machines(Inputs(parse_nccl_dump((DATA / "dgx-h100.xml").read_bytes(), odd)), "pod").machines

    file = tomllib.loads(machine_to_toml(made.machine))

    assert file["gpu"]["per_host"]["source"] == f"{odd}: GPUs of a host"


def test_a_name_that_is_no_unicode_can_be_written(tmp_path) -> None:
    (made,) = import_machines(Inputs(dump(), nics=NicChoice(names=COMPUTE)), "pod").machines
    figures = tuple(replace(figure, source="a\udcff.xml") for figure in made.machine.figures)

    written = machine_to_toml(replace(made.machine, figures=figures)).encode()

    assert b'source = "a?.xml"' in written


def test_plan_takes_what_import_wrote(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    code, out, err = cli(
        "machines", "import", "--nvidia-smi", str(DATA / "dgx-h100-topo.txt"), "--hosts", "node[001-002]", "-o", "pod.toml"
    )

    assert code == 0
    assert '--machine "./pod.toml x 2"' in out
    assert "--calibration dgx-h100 (until" in out
    assert "mlx5_3: left out" in err
    asked = ["--model", "qwen3-0.6b", "--from", "TP4", "--to", "TP8", "--machine", "./pod.toml x 2", "--calibration", "dgx-h100"]
    assert cli("plan", *asked, "--strategy", "direct")[0] == 0


def test_without_an_output_the_machine_goes_to_standard_output(cli) -> None:
    code, out, err = cli("machines", "import", str(DATA / "dgx-h100.xml"))

    assert code == 0
    assert tomllib.loads(out)["kind"] == "gpu"
    assert err == "note: mlx5_3: left out, Ethernet\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to import"),
        (["none.xml"], "none.xml: can't be read"),
        ([str(DATA / "dgx-h100.xml"), "-o", "pod.json"], "ends in .toml"),
        ([str(DATA / "dgx-h100.xml"), "--nics", "mlx5_9"], "has no mlx5_9"),
        (["--nvidia-smi", str(DATA / "dgx-h100.xml")], "no matrix"),
        ([str(DATA / "dgx-h100.xml"), "--ibnetdiscover", "a", "--rails", "b"], "don't go together"),
        ([str(DATA / "dgx-h100.xml"), "--domain-hosts", "0"], "expected 1 or more, found 0"),
        ([str(DATA / "dgx-h100.xml"), "--domain-hosts", "2", "--hosts", "a,b,c"], "3 hosts aren't whole NVLink domains of 2"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(cli, arguments: list[str], words: str) -> None:
    code, out, err = cli("machines", "import", *arguments)

    assert code == 2
    assert out == ""
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dgx-h100-topo.txt"], "is a matrix of `nvidia-smi topo -m`: give it with --nvidia-smi "),
        (["--nvidia-smi", "dgx-h100.xml"], "is XML that NCCL wrote: give it without an option"),
        (["ibstat.txt"], "is the output of `ibstat`: give it with --ibstat "),
        (["dgx-h100.xml", "--ibstat", "ibnetdiscover.txt"], "is the output of `ibnetdiscover`: give it with --ibnetdiscover "),
        (["dgx-h100.xml", "--rails", "ibstat.txt"], "is the output of `ibstat`: give it with --ibstat "),
        (["dgx-h100.xml", "--ibnetdiscover", "gb200-host0.txt"], "give it with --nvidia-smi "),
    ],
)
def test_a_file_of_another_option_is_told_which(cli, arguments: list[str], words: str) -> None:
    paths = [name if name.startswith("--") else str(DATA / name) for name in arguments]

    code, out, err = cli("machines", "import", *paths)

    assert (code, out) == (2, "")
    assert words in err


def test_a_file_that_says_nothing_of_hosts_is_called_what_it_is(cli, tmp_path) -> None:
    (tmp_path / "x.toml").write_text('name = "x"\n')
    (tmp_path / "notes.md").write_text("# notes\n")

    assert "which says nothing of hosts" in cli("machines", "import", str(tmp_path / "x.toml"))[2]
    assert "notes.md is" not in cli("machines", "import", str(tmp_path / "notes.md"))[2]
