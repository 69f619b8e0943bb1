"""What MkDocs asks about each page (hooks of mkdocs.yml): what our Markdown and our docstrings have that Markdown doesn't.

- For tests/test_docs_commands.py a fence says how its block is run, as in ```console needs torch or ```console exits 0 1. The
  site shows it as any other block, with what it needs as its title.
- Docstrings have columns set apart by spaces, and lines of code, both without a mark. As paragraphs they would run together.
"""

import ast
import html
import re
from typing import Final

_FENCE: Final = re.compile(r"^(?P<fence>[`~]{3,})(?P<language>\w+) (?P<words>(?:needs|exits|in|of) [\w -]+)$", re.MULTILINE)
_NEEDED: Final = re.compile(r"needs ((?:(?!(?:exits|in|of)\b)[\w-]+ ?)+)")
_SPOKEN: Final = {"gpus": "GPUs", "slurm": "Slurm", "jax": "JAX", "mpi": "MPI"}
_PARAGRAPH: Final = re.compile(r"<p>(?P<text>[^<]*(?:<(?!/p>)[^<]*)*)</p>")
_COLUMNS: Final = re.compile(r"^\S.*\S {2,}\S", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page's text with plain fences."""
    return _FENCE.sub(_with_needs, markdown)


def _with_needs(fence: re.Match[str]) -> str:
    """The fence with what a reader must have as its title; what must not be there (no-gpu) is for the tests alone."""
    needed = _NEEDED.search(fence["words"])
    names = [] if needed is None else needed[1].split()
    wanted = ", ".join(_SPOKEN.get(name, name) for name in names if not name.startswith("no-"))
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
