"""`report`: pictures whose numbers are those of `show --json`, in one page that loads nothing and that a real browser opens."""

import html
import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages_in_browsers import CHROMIUM, Page, in_browser
from pages_in_firefox import FIREFOX, firefox

from shardroute.executors.cli import main
from shardroute.planner import make_plan, one_tensor, predict
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.critical_paths import critical_path
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.plan_files import save_plan
from shardroute.planner.problems import Problem
from shardroute.planner.reporting import charts
from shardroute.planner.reporting.chapters import WORDS
from shardroute.planner.reporting.contest_pictures import what_ifs
from shardroute.planner.reporting.layout_pictures import layout_section
from shardroute.planner.reporting.machine_pictures import load_section, machine_section
from shardroute.planner.reporting.time_pictures import gpu_section, link_section, path_section, united
from shardroute.planner.reports import PlanReport
from shardroute.planner.timelines import Timeline, save_timeline
from shardroute.planner.traces import fullness
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import InputError

COSTS = default_calibration("dgx-h100")
EVIL = "w<script>alert('1')</script>&\"x\""


def needs_charts():
    pytest.importorskip("vl_convert", reason="charts need the extra `report`")


@pytest.fixture(scope="module")
def plan():
    mesh, serving = Mesh.of({"x": 8}), Mesh.of({"dp": 2, "tp": 8}, ranks=range(8, 24))
    source = place((4096, 4096), mesh, [Shard(0)])
    target = place((4096, 4096), serving, [Replicate(), Shard(1)])
    problem = one_tensor((4096, 4096), "bf16", source, target, name=EVIL)
    return make_plan(problem, build_topology(load_machine("dgx-h100"), 3), "m2n-pack")


@pytest.fixture(scope="module")
def prediction(plan):
    return predict(plan, COSTS)


@pytest.fixture(scope="module")
def files(plan, prediction, tmp_path_factory):
    """A plan file, a measured timeline of it (half as fast again as predicted), and the page of both."""
    needs_charts()
    folder = tmp_path_factory.mktemp("report")
    paths = {name: str(folder / name) for name in ("t.plan", "t.json", "t.html")}
    save_plan(plan, paths["t.plan"])
    timeline = prediction.timeline
    save_timeline(
        Timeline("measured", plan.digest, "a test", timeline.start_s * 1.5, timeline.end_s * 1.5), paths["t.json"]
    )  # fmt: skip
    given = ["-s", "direct", "-s", "greedy", "--measured", paths["t.json"], "-o", paths["t.html"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["shardroute", "report", paths["t.plan"], *given])
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code
    return paths


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=12)


@given(spans, st.integers(0, 5))
def test_united_spans_cover_the_same_moments_and_keep_wider_gaps(rows, gap) -> None:
    begin = np.array([a for a, _ in rows], dtype=float)
    end = np.array([a + n for a, n in rows], dtype=float)

    starts, ends = united(begin, end, gap)

    covered = {x for a, n in rows for x in range(2 * a, 2 * (a + n) + 1)}  # half units, so that touching spans are one
    drawn = {x for a, b in zip(starts.tolist(), ends.tolist(), strict=True) for x in range(int(2 * a), int(2 * b) + 1)}
    assert covered <= drawn
    assert all(b - a > gap for a, b in zip(ends[:-1].tolist(), starts[1:].tolist(), strict=True))
    if gap == 0:
        assert drawn == covered


@given(spans, st.integers(1, 30))
def test_what_flows_in_all_parts_of_time_is_what_all_spans_carry(rows, n_parts) -> None:
    begin = np.array([a for a, _ in rows], dtype=float)
    end = np.array([a + n for a, n in rows], dtype=float)
    amount = np.arange(1.0, len(rows) + 1)
    edges = np.linspace(-1.0, 60.0, n_parts + 1)

    rates = fullness(begin, end, amount, edges)

    assert (rates * np.diff(edges)).sum() == pytest.approx(amount.sum())


def test_every_gpu_is_drawn_once_with_its_role(plan) -> None:
    section = machine_section(plan)

    assert section.table is not None
    counts = [[cell.value for cell in row[3:7]] for row in section.table.rows]
    assert counts == [[8, 0, 0, 0], [0, 8, 0, 0], [0, 8, 0, 0]]
    roles = Counter(cell["role"] for cell in section.chart["data"]["values"])
    assert roles == {"source": 8, "destination": 16}


def test_the_heat_map_is_the_seconds_that_each_link_is_busy(plan, prediction) -> None:
    section = load_section(plan, prediction)

    busy = {resource.name: resource.busy_s for resource in prediction.resources}
    words = {"NIC in": "NIC into", "NIC out": "NIC out of", "NVLink in": "NVLink into", "NVLink out": "NVLink out of"}
    cells = section.chart["data"]["values"]
    assert len(cells) == 4 * plan.topology.n_gpus
    for cell in cells:
        seconds = busy.get(f"{words[cell['kind']]} GPU {cell['row'] * 8 + cell['column']}", 0.0)
        assert cell["share"] == pytest.approx(seconds / prediction.predicted_s, abs=1e-4)


def test_of_very_many_gpus_the_heat_map_has_a_cell_a_domain_and_the_table_all_domains(plan) -> None:
    wide = make_plan(plan.problem, build_topology(load_machine("dgx-h100"), 200), "direct")
    prediction = predict(wide, COSTS)

    section, machine = load_section(wide, prediction), machine_section(wide)

    cells = {(cell["kind"], cell["row"] + cell["column"]): cell["share"] for cell in section.chart["data"]["values"]}
    busy = {resource.name: resource.busy_s / prediction.predicted_s for resource in prediction.resources}
    assert len(cells) == 4 * 200
    assert cells["NIC out", 0] == pytest.approx(max(busy[f"NIC out of GPU {g}"] for g in range(8)), abs=1e-4)
    assert cells["NIC in", 2] == pytest.approx(max(busy[f"NIC into GPU {g}"] for g in range(16, 24)), abs=1e-4)
    assert cells["NIC in", 150] == 0
    assert len(machine.table.rows) == 200
    assert len({cell["domain"] for cell in machine.chart["data"]["values"]}) == 40


def test_where_the_time_goes_adds_up_to_the_prediction(plan, prediction) -> None:
    section = path_section(plan, prediction, critical_path(plan, prediction))

    assert sum(row[1].value for row in section.table.rows) == pytest.approx(prediction.predicted_s)


def test_time_lines_end_with_the_prediction_and_have_all_steps_of_a_gpu(plan, prediction) -> None:
    by_gpu, by_link = gpu_section(plan, prediction.timeline), link_section(plan, prediction)

    assert max(row[4].value for row in by_gpu.table.rows) == pytest.approx(prediction.predicted_s)
    sent = [row[1].value for row in by_gpu.table.rows if row[0].text.startswith("GPU 0,") and "barrier" not in row[0].text]
    assert sum(sent) >= int((plan.steps.src == 0).sum())
    full = {row[0].text: row[3].value for row in by_link.table.rows}
    for resource in prediction.resources[:5]:
        assert full[resource.name] == pytest.approx(resource.busy_s / prediction.predicted_s, rel=1e-6)


def test_the_layout_picture_has_each_box_with_the_ranks_that_hold_it(plan) -> None:
    rows = layout_section(plan.problem, None).table.rows

    found = {(row[0].text, row[1].text): row[3].text for row in rows}
    assert found["before", "[0:512, 0:4096]"] == "0"
    assert found["after", "[0:4096, 512:1024]"] == "9,17"
    assert len(found) == 16


def test_a_tensor_that_is_not_there_is_refused_with_some_that_are(plan) -> None:
    with pytest.raises(InputError, match="no such tensor; it has w<script>"):
        layout_section(plan.problem, "other")


def test_a_plan_without_tensors_is_refused_in_words() -> None:
    nothing = Problem((), Layout((), ()), Layout((), ()), n_ranks=1)

    with pytest.raises(InputError, match="no tensors, so there is nothing to draw"):
        layout_section(nothing, None)


def test_what_ifs_are_the_plans_own_strategy_on_changed_machines(plan) -> None:
    found = what_ifs(plan, COSTS)

    same = next(row for row in found if row.change.startswith("NICs 1 x"))
    assert same.predicted_s == pytest.approx(predict(make_plan(plan.problem, plan.topology, "m2n-pack"), COSTS).predicted_s)
    bounds = [row.bound_s for row in found if row.change.startswith("NICs")]
    assert bounds[0] == pytest.approx(2 * bounds[1])
    assert bounds == sorted(bounds, reverse=True)
    assert any(row.change == "NVLink domains of 72 GPUs" and row.predicted_s for row in found)


def test_no_what_if_is_made_up_for_processes() -> None:
    problem = tensor_problem("64,96", "f32", "x=2", "S0", "y=2", "S1")

    assert what_ifs(make_plan(problem, build_topology(load_machine("cpu-processes"), 4), "direct"), COSTS) == []


def test_without_the_package_that_draws_the_error_names_the_extra(plan, cli, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    save_plan(plan, tmp_path / "t.plan")

    code, _, err = cli("report", str(tmp_path / "t.plan"), "-o", str(tmp_path / "t.html"))

    assert code == 2
    assert "shardroute[report]" in err
    assert not (tmp_path / "t.html").exists()


def test_a_measurement_of_another_plan_is_refused(files, cli, tmp_path) -> None:
    other = tmp_path / "other.json"
    save_timeline(Timeline("measured", "0" * 64, "x", np.zeros(1), np.ones(1)), other)

    code, _, err = cli("report", files["t.plan"], "--measured", str(other), "-o", str(tmp_path / "t.html"))

    assert code == 2
    assert "none of those given" in err


def test_the_numbers_of_the_page_are_those_of_show(files, cli) -> None:
    page = Page(Path(files["t.html"]).read_text())
    _, out, _ = cli("show", files["t.plan"], "--json")

    shown = json.loads(out)
    named = {key for key, value in shown.items() if isinstance(value, int | float | str)}
    assert {*page.facts} == named
    assert all(page.facts[key] == shown[key] for key in named)


def test_every_number_of_a_plan_has_words_that_a_reader_uses(files) -> None:
    page = Path(files["t.html"]).read_text()

    assert set(WORDS) == set(PlanReport.__struct_fields__)
    assert "packing, peak a rank" in page
    assert "packing bytes" not in page


def test_the_page_is_whole_and_its_links_lead_somewhere(files) -> None:
    page = Page(Path(files["t.html"]).read_text())

    assert page.open == []
    assert [name for name, n in page.ids.items() if n > 1] == []
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)


def test_the_page_loads_nothing_and_runs_nothing(files) -> None:
    text = Path(files["t.html"]).read_text()

    page = Page(text)
    assert page.scripts == 0
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\((?!#)", text)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)


def test_names_are_text_wherever_they_stand(files) -> None:
    text = Path(files["t.html"]).read_text()

    assert "<script" not in text
    assert html.escape(EVIL) in text


def test_every_picture_has_its_table_and_can_be_reached(files) -> None:
    text = Path(files["t.html"]).read_text()

    sections = re.findall(r"<section .*?</section>", text, re.DOTALL)
    pictures = [section for section in sections if "<svg" in section]
    assert len(pictures) >= 9
    assert all('tabindex="0" role="img" aria-label="' in section for section in pictures)
    assert all("<details><summary>Table: " in section and "<tbody><tr>" in section for section in pictures)


def test_charts_of_one_page_share_no_names() -> None:
    needs_charts()
    clipped = {"data": {"values": [{"x": 1}]}, "mark": {"type": "bar", "clip": True}, "encoding": {"x": {"field": "x"}}}

    first, second = charts.svg_of(clipped, "one"), charts.svg_of(clipped, "two")

    names = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (first, second)]
    assert all(names)
    assert not names[0] & names[1]
    assert all(f"url(#{name})" in first for name in names[0])


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_opens_the_page_on_a_phones_width_and_every_table_and_link_of_it(files, tmp_path) -> None:
    found = in_browser(files["t.html"], tmp_path, 390)

    assert len(found["summaries"]) >= 9
    assert all(found["summaries"])
    assert len(found["links"]) >= 10
    assert all(found["links"])
    assert all(found["regions"])
    assert all(found["tables"])
    assert all(found["svgs"])
    assert found["width"] == 390
    assert found["widest"] <= 390


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_dark_desktop_gets_dark_paper_and_other_bars(files, tmp_path) -> None:
    light = in_browser(files["t.html"], tmp_path, 1000)

    dark = in_browser(files["t.html"], tmp_path, 1000, "--blink-settings=preferredColorScheme=0")

    assert light["paper"] == "rgb(255, 255, 255)"
    assert dark["paper"] == "rgb(20, 23, 27)"
    assert light["bar"] == "rgb(0, 114, 178)"
    assert dark["bar"] == "rgb(86, 180, 233)"


@pytest.fixture(scope="module")
def fox(files, tmp_path_factory):
    """A headless Firefox, and the page as a file beside nothing else."""
    if FIREFOX is None:
        pytest.skip("needs Firefox")
    page = tmp_path_factory.mktemp("opened") / "t.html"
    page.write_bytes(Path(files["t.html"]).read_bytes())
    with firefox(tmp_path_factory.mktemp("firefox")) as window:
        yield window, page


def test_firefox_opens_the_page_from_the_file_system_and_its_keyboard_reaches_every_link_table_and_picture(fox) -> None:
    window, page = fox
    tab, enter = "\ue004", "\ue007"
    window.be_dark(False)
    window.open(page, 390)
    n_stops = window.run("return document.querySelectorAll('a[href], summary, [tabindex=\"0\"]').length")

    found = []
    for _ in range(n_stops):
        window.press(tab)
        found.append(
            window.run(
                "const at = document.activeElement;"
                "return [at.tagName, [...document.querySelectorAll('*')].indexOf(at), at.getBoundingClientRect().width > 0]"
            )
        )
        if found[-1][0] == "SUMMARY":
            window.press(enter)
    opened = window.run("return [...document.querySelectorAll('details table')].map(t => t.getBoundingClientRect().height > 0)")
    widths = window.run("return [innerWidth, document.documentElement.scrollWidth]")
    drawn = window.run("return [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width > 100)")

    assert [at for _, at, _ in found] == sorted({at for _, at, _ in found})
    assert all(shown for *_, shown in found)
    assert {"A", "SUMMARY", "DIV"} <= {tag for tag, *_ in found}
    assert len(opened) >= 9
    assert all(opened)
    assert len(drawn) >= 9
    assert all(drawn)
    assert widths[0] == 390
    assert widths[1] <= 390


def test_firefox_follows_the_links_of_the_page(fox) -> None:
    window, page = fox
    window.open(page, 1000)
    n_links = window.run("return document.querySelectorAll('nav a').length")

    found = []
    for i in range(n_links):
        link = f"document.querySelectorAll('nav a')[{i}]"
        window.run(f"{link}.focus()")
        window.press("\ue007")
        found.append(window.run(f"return '#' + document.querySelector(':target')?.id === decodeURIComponent({link}.hash)"))

    assert len(found) >= 10
    assert all(found)


def test_firefox_draws_the_charts_in_their_colours_on_light_and_on_dark_paper(fox) -> None:
    window, page = fox

    shown = {}
    for dark in (False, True):
        window.be_dark(dark)
        window.open(page, 1000)
        found, n = np.unique(window.picture("svg")[..., :3].reshape(-1, 3), axis=0, return_counts=True)
        by_use = [tuple(colour) for colour in found[np.argsort(-n)].tolist()]
        shown[dark] = by_use[0], set(by_use[:20])

    assert shown[False][0] == (255, 255, 255)
    assert shown[True][0] == (20, 23, 27)
    assert (0, 114, 178) in shown[False][1]
    assert (86, 180, 233) in shown[True][1]
