"""Pages of HTML as tests read them: what a parser finds, and what a script finds in a real browser."""

import html
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Tags that HTML leaves open.
VOID = {"meta", "br", "link", "input", "img", "hr"}


class Page(HTMLParser):
    """What a page is made of: ids, links, facts by key, tags that were left open or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.facts: dict[str, str | float] = {}
        self.scripts = 0
        self.open: list[str] = []
        self.key = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.update([given["id"]] if "id" in given else [])
        self.links += [given[name] for name in ("href", "src", "xlink:href", "data") if given.get(name)]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)
        if "data-key" in given:
            self.key = given["data-key"]
            if "data-value" in given:
                self.facts[self.key], self.key = float(given["data-value"]), ""

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag) if tag not in VOID else None

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.key:
            self.facts[self.key], self.key = data, ""


PROBE = """
<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, found = {};
  found.summaries = [...page.querySelectorAll("summary")].map(s => { s.click(); return s.parentElement.open; });
  found.links = [...page.querySelectorAll("nav a")].map(a => {
    const to = page.getElementById(decodeURIComponent(a.getAttribute("href").slice(1)));
    to.focus();
    return page.activeElement === to; });
  found.regions = [...page.querySelectorAll("[tabindex='0']")].map(r => { r.focus(); return page.activeElement === r; });
  found.widest = page.documentElement.scrollWidth;
  found.width = frame.clientWidth;
  found.tables = [...page.querySelectorAll("details table")].map(t => t.getBoundingClientRect().height > 0);
  found.svgs = [...page.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width > 100);
  found.paper = frame.contentWindow.getComputedStyle(page.body).backgroundColor;
  const bar = [...page.querySelectorAll("svg [fill='var(--c1)']")][0];
  found.bar = frame.contentWindow.getComputedStyle(bar).fill;
  document.title = JSON.stringify(found);
});
</script>
"""


def in_browser(path: str, folder: Path, width: int, *flags: str) -> dict:
    """What a script finds in the page, in a frame of that width: it opens every table and follows every link."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", Path(path).read_text())
    probe = folder / "probe.html"
    frame = f'<iframe style="width:{width}px;height:2000px;border:0" srcdoc="{html.escape(text)}"></iframe>'
    probe.write_text(f'<!doctype html><html><head><meta charset="utf-8"><title></title>{PROBE}</head><body>{frame}</body></html>')
    ran = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=5000", *flags, "--dump-dom", probe.as_uri(),
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", ran.stdout, re.DOTALL)
    assert title is not None, ran.stderr
    return json.loads(html.unescape(title[1]))
