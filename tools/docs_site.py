"""What MkDocs asks about each page (hooks of mkdocs.yml): what our Markdown and our docstrings have that Markdown doesn't.

- For tests/test_docs_commands.py a block is fenced as ```console no-run, with a comment above that says why, or as ```console
  needs torch. The site shows it as any other block, with the reason, or what it needs, as its title.
- Docstrings have columns set apart by spaces, and lines of code, both without a mark. As paragraphs they would run together.
"""

import ast
import html
import re
from typing import Final

_LEFT_OUT: Final = re.compile(r"^<!-- no-run: (?P<reason>.*?) -->\n+(?P<fence>[`~]{3,})(?P<language>\w+) no-run$", re.MULTILINE)
_NEEDS: Final = re.compile(r"^(?P<fence>[`~]{3,})(?P<language>\w+) needs (?P<needs>[\w -]+)$", re.MULTILINE)
_PARAGRAPH: Final = re.compile(r"<p>(?P<text>[^<]*(?:<(?!/p>)[^<]*)*)</p>")
_COLUMNS: Final = re.compile(r"^\S.*\S {2,}\S", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page's text with plain fences."""
    run = _LEFT_OUT.sub(r'\g<fence>\g<language> title="Not run by the tests: \g<reason>"', markdown)
    return _NEEDS.sub(_with_needs, run)


def _with_needs(fence: re.Match[str]) -> str:
    """The fence with what a reader must have as its title; what must not be there (no-gpu) is for the tests alone."""
    wanted = ", ".join(name for name in fence["needs"].split() if not name.startswith("no-"))
    return f"{fence['fence']}{fence['language']}" + (f' title="Needs {wanted}"' if wanted else "")


def on_page_content(content: str, **_: object) -> str:
    """The page's HTML with paragraphs of docstrings that are columns or code set line by line."""
    if 'class="doc ' not in content:
        return content
    return _PARAGRAPH.sub(_line_by_line, content)


def _line_by_line(paragraph: re.Match[str]) -> str:
    text = paragraph["text"]
    if _COLUMNS.search(text) or is_code(html.unescape(re.sub(r"<[^>]*>", "", text))):
        return f'<pre class="docstring">{text}</pre>'
    return paragraph[0]


def is_code(text: str) -> bool:
    """Whether a paragraph is Python that calls or assigns something; prose all but never parses."""
    try:
        lines = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(line, ast.Assign) or isinstance(getattr(line, "value", None), ast.Call) for line in lines)
