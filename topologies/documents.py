"""The file edge: TOML and plain dicts become checked structs, or one InputError with the key's path."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar, get_args

import msgspec

from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Figure
from shardroute.topologies.files import read_file

# The shipped TOML files have some kB.
_MAX_TOML_BYTES: Final = 2**20
# A key of more parts than this: tomllib takes time that grows with their square (a megabyte of them: minutes).
_LONG_KEY: Final = re.compile(rb"(?<![\w\"'.-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){64}")

_S = TypeVar("_S", bound=msgspec.Struct)
_C = TypeVar("_C")

_AT: Final = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_FIELD: Final = re.compile(r"Object (?P<trouble>missing required|contains unknown) field `(?P<field>[^`]*)`")
_KIND: Final = re.compile(r"Expected `(?P<expected>[^`]*)`, got `[^`]*`")
_WORDS: Final = {
    "object": "a table", "array": "a list", "str": "text", "int": "a whole number", "float": "a number",
    "bool": "true or false",
}  # fmt: skip


class FigureTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{ value = "400 Gb/s", source = "..." }` as it stands in a file."""

    value: str | int | float
    source: str


class FigureRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure as it stands in a plan or another JSON document."""

    key: str
    text: str
    value: float
    source: str

    def to_figure(self) -> Figure:
        """Return the value that the rest of the package sees."""
        return Figure(self.key, self.text, self.value, self.source)


def unknown_name(what: str, name: str, known: Sequence[str]) -> InputError:
    """The InputError for a shipped machine, calibration, ... that isn't there: it names those that are, and one that is close."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return InputError(f"unknown {what} {name!r}{hint}; known {what}s: {', '.join(known)}; or give a path that ends in .toml")


def read_toml(path: Path, kind: type[_S]) -> _S:
    """Return the file's content as a checked struct.

    Raises InputError if the file can't be read, is not TOML, or does not fit: the message leads with the
    file's name and the key.
    """
    try:
        text = read_file(path, _MAX_TOML_BYTES)
        if (found := _LONG_KEY.search(text)) is not None:
            line = text[: found.start()].count(b"\n") + 1
            raise InputError(f"{path.name}: line {line}: a key of more than 64 parts; no table is nested that deeply")
        data = tomllib.loads(text.decode())
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name}: expected UTF-8 text ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path.name}: expected TOML ({error})") from None
    return convert(data, kind, path.name)


def toml_value(value: str | int | float) -> str:
    """The value as TOML; what of a text is no Unicode (a file's name may be any bytes) becomes `?`."""
    # TOML's basic strings are JSON's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f").encode(errors="replace").decode()


def decode_json(data: bytes, where: str) -> object:
    """Return the JSON as plain data; InputError, led by `where`, if it is none, holds a key twice, or is nested too deeply."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where}: expected JSON ({error})") from None
    try:
        check_keys(data, found)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return found


def check_keys(data: bytes, decoded: object) -> None:
    """Raise InputError when an object of the JSON text holds a key twice, of which `decoded`, read by msgspec, has the last.

    What comes out as it went in, as what msgspec wrote does, holds none twice; only other texts are read once more.
    """
    if msgspec.json.encode(decoded) != data.rstrip():
        with suppress(RecursionError):  # msgspec reads what is nested a little deeper
            json.loads(data, object_pairs_hook=unique_keys)


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these keys and values, as json's `object_pairs_hook`. Raises InputError for a key that stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise InputError(f"key {twice!r} stands twice in one object; keep one of the two")
    return found


def convert(data: object, kind: type[_S], where: str) -> _S:
    """Return plain data as a checked struct; InputError, led by `where` and the key, if it doesn't fit."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {_translate(str(error), data, kind)}") from None
    except OverflowError as error:
        raise InputError(f"{where}: a number is too large ({error})") from None


def plain(value: object) -> dict[str, object]:
    """Return a frozen dataclass as plain values that JSON can hold, its fields as keys."""
    data: dict[str, object] = msgspec.json.decode(msgspec.json.encode(value))
    return data


def listed_tables(tables: Mapping[str, msgspec.Struct | None]) -> list[tuple[str, FigureTable]]:
    """Return ("nic.bandwidth", table) for every figure that the named structs hold, in field order."""
    return [
        (f"{name}.{field}", value)
        for name, table in tables.items()
        if table is not None
        for field in table.__struct_fields__
        if isinstance(value := getattr(table, field), FigureTable)
    ]


def _translate(message: str, data: object, kind: type[msgspec.Struct]) -> str:
    """Return msgspec's message in the words of a file's author: key, expected, found."""
    match = _AT.fullmatch(message)
    assert match is not None, message
    what, path = match["what"], match["path"] or ""
    if field := _FIELD.match(what):
        key = f"{path}.{field['field']}".lstrip(".")
        if field["trouble"] == "missing required":
            return f"{key}: missing; every key of {path or 'the file'} but the optional ones must be given"
        tables = _classes_in(_annotations_at(kind, path), msgspec.Struct)
        fields = [name for table in tables for name in table.__struct_encode_fields__]
        return f"{key}: unknown key; expected one of {', '.join(fields)}"
    annotations = _annotations_at(kind, path)
    expected = what
    if what.startswith("Invalid enum value"):
        members = [str(member) for enum in _classes_in(annotations, StrEnum) for member in enum]
        expected = f"expected one of {', '.join(members)}"
    elif types := _KIND.match(what):
        expected = "expected " + " or ".join(
            _WORDS.get(t.strip(), t.strip()) for t in types["expected"].split("|")
        )
        if "object" in types["expected"] and FigureTable in _classes_in(annotations, FigureTable):
            expected = 'expected a table { value = ..., source = "..." }'
    return f"{path.removesuffix('.value') or 'the whole'}: {expected}, found {_found(data, path)!r}"


def _annotations_at(kind: type[msgspec.Struct], path: str) -> list[object]:
    """Return the annotation of the field at path, one for each struct of a union on the way."""
    annotations: list[object] = [kind]
    for part in re.findall(r"[^.\[\]]+(?=[.\[]|$)", path):
        annotations = [
            field.type
            for struct in _classes_in(annotations, msgspec.Struct)
            for field in msgspec.structs.fields(struct)
            if field.encode_name == part
        ]
    return annotations


def _classes_in(annotations: Iterable[object], kind: type[_C]) -> list[type[_C]]:
    """Return the subclasses of kind that the annotations name, unions and lists opened."""
    found: list[type[_C]] = []
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, kind):
            found.append(annotation)
        else:
            found += _classes_in(get_args(annotation), kind)
    return found


def _found(data: object, path: str) -> object:
    found = data
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(found, dict):
            found = found.get(part)
        elif isinstance(found, list | tuple) and part.isdigit():
            found = found[int(part)]
    return found
