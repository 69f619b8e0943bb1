import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.layouts import Axis, ParallelSpec, parse_spec
from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.topologies.errors import InputError

SIZES = st.dictionaries(st.sampled_from([a for a in Axis if a is not Axis.HSDP]), st.integers(1, MAX_RANKS), min_size=1)


@pytest.mark.parametrize(
    "text",
    ["TP4 x PP8 x EP16", "tp4xpp8xep16", "TP4*PP8*EP16", "TP4, PP8,EP16", "TP4 PP8  EP16", " Tp4 × pp8 x Ep16 "],
)  # fmt: skip
def test_every_usual_way_to_write_a_layout_is_read(text: str) -> None:
    spec = parse_spec(text)

    assert spec.axes == ((Axis.TP, 4), (Axis.PP, 8), (Axis.EP, 16))
    assert spec.stage_layers is None


def test_an_axis_that_is_not_named_has_size_1() -> None:
    spec = parse_spec("TP4")

    assert (spec.size(Axis.TP), spec.size(Axis.DP)) == (4, 1)
    assert (spec.names(Axis.TP), spec.names(Axis.DP)) == (True, False)


def test_pp_takes_the_layers_of_each_stage() -> None:
    spec = parse_spec("tp2 x pp4[7, 8, 8, 7]")

    assert spec.stage_layers == (7, 8, 8, 7)
    assert str(spec) == "TP2 x PP4[7,8,8,7]"


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("FSDP64", {Axis.FSDP: 64}),
        ("hsdp8x4", {Axis.HSDP: 8, Axis.FSDP: 4}),
        ("HSDP8x8 x TP2", {Axis.HSDP: 8, Axis.FSDP: 8, Axis.TP: 2}),
        ("TP2 x CP2 x EP8 x ETP2 x PP4", {Axis.TP: 2, Axis.CP: 2, Axis.EP: 8, Axis.ETP: 2, Axis.PP: 4}),
        ("TP32 x DP8", {Axis.TP: 32, Axis.DP: 8}),
        ("PP4 x VPP2", {Axis.PP: 4, Axis.VPP: 2}),
    ],
)
def test_sharded_data_and_virtual_stages_are_read(text: str, axes: dict[Axis, int]) -> None:
    spec = parse_spec(text)

    assert dict(spec.axes) == axes
    assert str(spec).lower() == text.lower()
    assert parse_spec(str(spec)) == spec


def test_virtual_stages_may_have_their_layers_listed() -> None:
    spec = parse_spec("PP2[3,2,2,3] x VPP2")

    assert spec.stage_layers == (3, 2, 2, 3)


@pytest.mark.parametrize("text", ["TP2 x PP2 order=tp-pp-dp", "TP2 x PP2, ORDER = tp-pp-dp"])
def test_a_rank_order_comes_last_and_is_shown(text: str) -> None:
    spec = parse_spec(text)

    assert spec.rank_order == (Axis.TP, Axis.PP, Axis.DP)
    assert str(spec) == "TP2 x PP2 order=tp-pp-dp"
    assert spec != parse_spec("TP2 x PP2")


def test_order_is_kept_for_display_and_has_no_meaning() -> None:
    one, other = parse_spec("PP8 x TP4"), parse_spec("tp4 pp8 cp1")

    assert one == other
    assert hash(one) == hash(other)
    assert (str(one), str(other)) == ("PP8 x TP4", "TP4 x PP8 x CP1")


def test_layouts_that_mean_different_things_differ() -> None:
    assert parse_spec("TP4") != parse_spec("TP8")
    assert parse_spec("TP4 x DP1") != parse_spec("TP4")  # a convention may infer a DP that isn't named
    assert parse_spec("PP2[1,2]") != parse_spec("PP2[2,1]")
    assert parse_spec("PP2[1,2]") != parse_spec("PP2")


@given(SIZES, st.sampled_from([" x ", "x", "*", ",", " "]))
def test_what_is_shown_reads_back_as_the_same(sizes: dict[Axis, int], separator: str) -> None:
    spec = ParallelSpec(tuple(sizes.items()))

    assert parse_spec(str(spec)) == spec
    assert parse_spec(separator.join(f"{axis}{size}" for axis, size in sizes.items())) == spec


@given(st.text(alphabet="tpecdxTPX0123456789[], *-.=", max_size=24))
def test_any_text_is_either_read_or_refused_with_an_input_error(text: str) -> None:
    try:
        spec = parse_spec(text)
    except InputError:
        return

    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "layout '' is empty; write axes with sizes, such as \"TP4 x PP8 x EP16\""),
        ("TP4 x TP8", "TP4 x TP8: TP is given as TP4 and TP8; an axis may be named once"),
        ("TP0", "TP0: TP0 has no ranks; use TP1 or more, or leave TP out"),
        ("EP-2", "EP-2: EP-2 has no ranks; use EP1 or more, or leave EP out"),
        ("DP1048577", "DP1048577: DP1048577 is above 1048576, the most ranks that are accepted"),
        ("PP4[7,8,8]", "PP4[7,8,8]: 3 stages are listed, but PP is 4; list the layers of each stage, or write PP3"),
        ("PP3[4,0,4]", "PP3[4,0,4]: a stage needs at least 1 layer; only the first and the last"),
        ("TP2[1,1]", "layout 'TP2[1,1]': TP2[1,1]: only PP takes a list, the layers of each of its stages"),
        ("PP2[1;1]", "layout 'PP2[1;1]': [1;1] must list the layers of each stage, such as PP4[7,8,8,7]"),
        ("PP2[]", "layout 'PP2[]': [] must list the layers of each stage, such as PP4[7,8,8,7]"),
        ("hsdp8 x tp2", "HSDP8 x TP2: HSDP takes its replicas and the shards of each, such as HSDP8x8"),
        ("TP8x4", "layout 'TP8x4': can't read 'x4'; write axes with sizes and x between, such as"),
        ("HSDP2x4 x FSDP8", "HSDP2 x FSDP4 x FSDP8: FSDP is given as FSDP4 and FSDP8"),
        ("PP2[3,3] x VPP2", "PP2[3,3] x VPP2: 2 stages are listed, but PP2 x VPP2 has 4 virtual ones; list the layers of each"),
        ("TP2 order=tp-dp-tp", "TP2 order=tp-dp-tp: an axis is in the rank order twice; name each once"),
        ("TP2 order=tp-xx", "layout 'TP2 order=tp-xx': axis 'xx' is unknown"),
        ("TPP4", "layout 'TPP4': axis 'TPP' is unknown; did you mean TP? The axes are TP (tensor)"),
        ("zz4", "layout 'zz4': axis 'zz' is unknown; the axes are TP (tensor)"),
        ("TP", "layout 'TP': can't read 'TP'; write axes with sizes and x between, such as"),
        ("TP=4", "layout 'TP=4': can't read 'TP=4'; write axes with sizes and x between, such as"),
        ("TP4 x", "layout 'TP4 x': can't read ' x'; write axes with sizes and x between, such as"),
        ("TP4PP8", "layout 'TP4PP8': can't read 'PP8'; write axes with sizes and x between, such as"),
        ("TP4 x x PP8", "layout 'TP4 x x PP8': can't read 'x PP8'; write axes with sizes and x between"),
        ("TP4.5", "layout 'TP4.5': can't read '.5'; write axes with sizes and x between, such as"),
    ],
)  # fmt: skip
def test_a_layout_that_says_nothing_sensible_is_refused_with_the_rule(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_spec(text)

    assert str(caught.value).startswith(message)


def test_a_size_of_thousands_of_digits_is_refused_and_not_computed() -> None:
    with pytest.raises(InputError, match="is above 1048576, the most ranks that are accepted"):
        parse_spec("TP" + "9" * 5000)


def test_the_first_and_the_last_stage_may_hold_no_layer() -> None:
    assert parse_spec("PP3[0,4,0]").stage_layers == (0, 4, 0)
