"""The report's page: sections as HTML with inline SVG, one style sheet, no script, nothing loaded from anywhere.

Rule: every text that comes from a plan, a file or a name is escaped here, once.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardroute.planner.reporting.charts import svg_of
from shardroute.planner.reporting.sections import Cell, Section, Table

# Colours by Okabe and Ito (https://jfly.uni-koeln.de/color/), told apart by people who are colour-blind; lighter on dark paper.
_STYLE: Final = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1f24; --faint: #5b626c; --line: #d5d9df; --box: #f5f6f8;
  --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #cc79a7; --c5: #b58900; --c6: #3a8fc0; --c7: #6b4fa0; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e6e8eb; --faint: #a2a9b3; --line: #3c434c; --box: #1d2126;
    --c1: #56b4e9; --c2: #ff9248; --c3: #2fc79b; --c4: #e6a3c6; --c5: #f0e442; --c6: #8fd0f5; --c7: #b8a1e6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main, header, nav { max-width: 56rem; margin: 0 auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 1.2rem 0 .3rem; } h2 { font-size: 1.35rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.1rem; margin: 2rem 0 .4rem; } h1, h2, h3, p, li, td, summary { overflow-wrap: anywhere; }
article nav { padding: 0; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: .3rem 0; list-style: none; }
a { color: var(--c1); } .skip { position: absolute; left: -100rem; } .skip:focus { left: 1rem; top: .5rem; }
:focus-visible { outline: 3px solid var(--c2); outline-offset: 2px; }
.caution { border-left: 4px solid var(--c2); background: var(--box); padding: .5rem .8rem; }
.scroll { overflow-x: auto; margin: .5rem 0; } figure { margin: 0; }
.picture svg { display: block; margin-left: -1rem; max-width: 100%; height: auto; }
@media screen and (max-width: 48rem) { .picture svg { max-width: none; } }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; white-space: nowrap; } th { color: var(--faint); font-weight: 600; }
tbody th { color: var(--ink); font-weight: 400; min-width: 7rem; } summary { cursor: pointer; color: var(--c1); }
footer { max-width: 56rem; margin: 3rem auto 1rem; padding: 0 1rem; color: var(--faint); font-size: .9rem; }
@media print {
  :root { --paper: #fff; --ink: #000; --faint: #444; --line: #bbb; --box: #fff;
    --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #cc79a7; --c5: #b58900; --c6: #3a8fc0; --c7: #6b4fa0; }
  nav, .skip, summary { display: none; } .scroll { overflow: visible; }
  details::details-content { content-visibility: visible; display: block; block-size: auto; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } table { font-size: .7rem; }
}
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Chapter:
    """What the page says of one plan: a title, what must be said aloud first (or nothing), and its sections."""

    title: str
    caution: str
    sections: tuple[Section, ...]


def page(title: str, first: Sequence[Section], chapters: Sequence[Chapter], drawn: Callable[[], None]) -> str:
    """The page as HTML; `drawn` is called after each section. Raises InputError where the package that draws isn't installed."""
    body, links = [], []
    for section in first:
        body.append(_section(section, section.name, "h2"))
        links.append((section.name, section.title))
        drawn()
    for number, chapter in enumerate(chapters, 1):
        name = f"plan{number}"
        links.append((name, chapter.title))
        body.append(f'<article aria-labelledby="{name}"><h2 id="{name}" tabindex="-1">{_text(chapter.title)}</h2>')
        if chapter.caution:
            body.append(f'<p class="caution" role="note">{_text(chapter.caution)}</p>')
        inner = [(f"{name}-{section.name}", section.title) for section in chapter.sections]
        body.append(_navigation(f"Sections of {chapter.title}", inner))
        for section in chapter.sections:
            body.append(_section(section, f"{name}-{section.name}", "h3"))
            drawn()
        body.append("</article>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{_text(title)}</title>'
        f'<style>{_STYLE}</style></head><body><a class="skip" href="#content">To the content</a>\n'
        f"<header><h1>{_text(title)}</h1></header>\n{_navigation('Contents', links)}\n"
        f'<main id="content" tabindex="-1">{"".join(body)}</main>\n'
        f"<footer>Written by shardroute. Every picture has its table under it.</footer></body></html>\n"
    )


def _navigation(label: str, links: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><a href="#{_text(name)}">{_text(text)}</a></li>' for name, text in links)
    return f'<nav aria-label="{_text(label)}"><ul>{items}</ul></nav>'


def _section(section: Section, name: str, heading: str) -> str:
    words = "".join(f"<p>{_text(line)}</p>" for line in section.words)
    picture = ""
    if section.chart is not None:
        picture = (
            f'<figure><div class="scroll picture" tabindex="0" role="img" aria-label="{_text(section.about)}">'
            f"{svg_of(section.chart, name)}</div></figure>"
        )
    cells = "" if section.table is None else _table(section.table, section.title)
    if picture and cells:
        cells = f"<details><summary>Table: {_text(section.title)}</summary>{cells}</details>"
    head = f'<{heading} id="{_text(name)}" tabindex="-1">{_text(section.title)}</{heading}>'
    return f'<section aria-labelledby="{_text(name)}">{head}{words}{picture}{cells}</section>\n'


def _table(found: Table, label: str) -> str:
    n_columns = len(found.columns)
    # A column is set to the right when all that it has are numbers.
    right = [i > 0 and all(row[i].value is not None or row[i].text in ("", "-") for row in found.rows) for i in range(n_columns)]
    heads = "".join(
        f'<th scope="col"{_right(right[i])}>{_text(column)}</th>' for i, column in enumerate(found.columns)
    )  # fmt: skip
    rows = "".join(
        "<tr>" + "".join(_cell(cell, first=i == 0, right=right[i]) for i, cell in enumerate(row)) + "</tr>" for row in found.rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(label)}, table">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell, *, first: bool, right: bool) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    key = "" if not cell.key else f' data-key="{_text(cell.key)}"'
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    return f"<{tag}{scope}{_right(right)}{key}{value}>{_text(cell.text)}</{tag}>"


def _right(right: bool) -> str:
    return ' class="number"' if right else ""


def _text(text: str) -> str:
    return html.escape(text)
