"""What the command line says of words that it can't take: the value found, what is expected, and the names that there are.

Rule: only what Typer's own messages leave out is put in; where its errors look otherwise they stay as they are. Before 0.20 it
names no command that may be meant; 0.29 reads values by pydantic, whose words don't repeat them.
"""

import difflib
import sys

import typer
from typer.core import TyperGroup

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Group(TyperGroup):
    """A group of commands whose mistakes are said in full."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # its name varies with Typer
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before Typer sees it, which up to 0.19 prints an empty line
            sys.exit(_INTERRUPTED)
        except Exception as error:
            _say_in_full(error, [*self.commands] if getattr(error, "ctx", None) is ctx else [])
            raise


def _say_in_full(error: Exception, names: list[str]) -> None:
    """Change the message of an error about what was typed; `names` are the commands of the group that it is about."""
    message = getattr(error, "message", None)
    if not isinstance(message, str) or not hasattr(error, "format_message"):
        return
    if names and message.startswith("No such command") and "Did you mean" not in message:
        near = difflib.get_close_matches(message.partition("'")[2].rpartition("'")[0], names)
        more = f". Did you mean {', '.join(map(repr, near))}?" if near else f"; there are {', '.join(sorted(names))}"
        error.message = message.rstrip(".") + more  # type: ignore[attr-defined]  # found above
    elif words := _value_words(error.__cause__):
        error.message = words  # type: ignore[attr-defined]


def _value_words(cause: BaseException | None) -> str:
    """What pydantic found wrong with a value, with the value; empty for any other cause."""
    details = getattr(cause, "errors", None)
    if not callable(details):
        return ""
    first = details()[0]
    kind, found, limits = first["type"], first["input"], first.get("ctx", {})
    match kind:
        case "int_parsing" | "int_from_float" | "int_parsing_size":
            return f"{found!r} is not a whole number"
        case "float_parsing":
            return f"{found!r} is not a number"
        case "greater_than_equal":
            return f"{found} is too small; expected {limits['ge']} or more"
        case "less_than_equal":
            return f"{found} is too large; expected {limits['le']} or less"
        case _:
            said = str(first["msg"]).removeprefix("Value error, ")
            return said if repr(found) in said else f"{said}, found {found!r}"
