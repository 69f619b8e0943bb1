"""What MkDocs asks about each page (hooks of mkdocs.yml): what our Markdown and our docstrings have that Markdown doesn't.

- A block is fenced as ```console no-run for tests/test_docs_commands.py, with a comment above that says why. The site shows it as
  any other block, with the reason as its title.
- Docstrings have columns set apart by spaces, and lines of code, both without a mark. As paragraphs they would run together.
"""

import ast
import html
import re
from typing import Final

_LEFT_OUT: Final = re.compile(r"^<!-- no-run: (?P<reason>.*?) -->\n+(?P<fence>[`~]{3,})(?P<language>\w+) no-run$", re.MULTILINE)
_PARAGRAPH: Final = re.compile(r"<p>(?P<text>[^<]*(?:<(?!/p>)[^<]*)*)</p>")
_COLUMNS: Final = re.compile(r"^\S.*\S {2,}\S", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page's text with plain fences."""
    return _LEFT_OUT.sub(r'\g<fence>\g<language> title="Not run by the tests: \g<reason>"', markdown)


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
