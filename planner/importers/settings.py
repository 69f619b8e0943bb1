"""Settings of YAML files as trainers use them: nested keys with plain values, and dotted KEY=VALUE on top.

Rule: this reads settings, not all of YAML. What it can't read (aliases, tags, flow values, lists) may stand in the file; asking
for such a value is an InputError that names its line. Merge keys are refused, since they could hold anything. Nothing is ever
expanded, so that no file grows when read.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from shardroute.topologies.errors import InputError
from shardroute.topologies.files import read_text

_MAX_BYTES: Final = 2**20  # verl's generated config, with all of its keys, has some 40 kB
_MAX_DEPTH: Final = 16
_KEY: Final = re.compile(r"""(?P<indent> *)(?P<key>"[^"]*"|'[^']*'|[^\s'"#&*!\[\]{},-][^:#\[\]{},]*?)\s*:(?P<rest>\s.*|)$""")
_REFERENCE: Final = re.compile(r"\$\{([\w.]+)\}")

_Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Value:
    text: str | None  # None: something that isn't read
    where: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Values by their path ("cluster.num_nodes"), each with the file and line that it is from."""

    values: dict[_Path, _Value]

    def has(self, key: str) -> bool:
        """Whether a value stands at the key or below it."""
        path = tuple(key.split("."))
        return any(found[: len(path)] == path for found in self.values)

    def text(self, key: str, default: str | None = None) -> str:
        """The text at the key, a reference ${a.b} followed. Raises InputError where it lacks, or isn't a plain value."""
        for _ in range(_MAX_DEPTH):
            path = tuple(key.split("."))
            opaque = next((self.values[path[:n]] for n in range(1, len(path) + 1) if path[:n] in self.values), None)
            if opaque is None:
                if default is not None:
                    return default
                raise InputError(f"{key} is missing; add it to the file, or give {key}=VALUE")
            if opaque.text is None:
                raise InputError(f"{opaque.where}: can't read the value of {key}; give {key}=VALUE")
            if path not in self.values:  # a scalar above it
                return self._lacking(key, default, opaque)
            text = opaque.text
            reference = _REFERENCE.fullmatch(text)
            if reference is None:
                if "${" in text or text == "???":
                    raise InputError(f"{opaque.where}: {key} is {text!r}; give {key}=VALUE")
                return default if text in ("", "null", "~", "None") and default is not None else text
            key = reference[1]
        raise InputError(f"{key}: references lead in a circle, or through more than {_MAX_DEPTH} keys")

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number at the key. Raises InputError for anything else."""
        text = self.text(key, None if default is None else str(default))
        if re.fullmatch(r"-?\d{1,9}", text) is None:
            raise InputError(f"{self._where(key)}{key}: expected a whole number, found {text!r}")
        return int(text)

    def size(self, key: str, default: int | None = None) -> int:
        """The number from 1 at the key."""
        n = self.number(key, default)
        if n < 1:
            raise InputError(f"{self._where(key)}{key}: expected 1 or more, found {n}")
        return n

    def flag(self, key: str, default: bool) -> bool:
        """True or false at the key."""
        text = self.text(key, str(default))
        if text.lower() not in ("true", "false"):
            raise InputError(f"{self._where(key)}{key}: expected true or false, found {text!r}")
        return text.lower() == "true"

    def _where(self, key: str) -> str:
        found = self.values.get(tuple(key.split(".")))
        return "" if found is None else f"{found.where}: "

    def _lacking(self, key: str, default: str | None, above: _Value) -> str:
        if default is not None:
            return default
        raise InputError(f"{above.where}: {key} is missing: a plain value stands above it; give {key}=VALUE")


def read_settings(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Settings:
    """The settings of files, later ones over earlier ones, then of texts such as "cluster.num_nodes=4".

    A file's `defaults: base.yaml` is read first, from the file's own folder, as NeMo RL does. Raises InputError, led by the file
    and line.
    """
    values: dict[_Path, _Value] = {}
    for path in paths:
        _lay_over(values, _with_defaults(Path(path), 0).items())
    given: list[tuple[_Path, _Value]] = []
    for text in overrides:
        key, equals, value = text.lstrip("+").partition("=")
        if not equals or re.fullmatch(r"[\w.-]+", key) is None:
            raise InputError(f"{text!r}: expected KEY=VALUE, such as cluster.num_nodes=4")
        given.append((tuple(key.split(".")), _Value(_plain(value.strip()), text)))
    _lay_over(values, given)
    return Settings(values)


def _with_defaults(path: Path, depth: int) -> dict[_Path, _Value]:
    if depth > _MAX_DEPTH:
        raise InputError(f"{path}: `defaults` lead in a circle, or through more than {_MAX_DEPTH} files")
    own = _parse(read_text(path, _MAX_BYTES), str(path))
    base = own.pop(("defaults",), None)
    if base is None or base.text in (None, ""):  # Hydra's `defaults` is a list of groups, which are no files beside this one
        return own
    assert base.text is not None
    found = _with_defaults(path.parent / base.text, depth + 1)
    _lay_over(found, own.items())
    return found


def _lay_over(values: dict[_Path, _Value], others: Iterable[tuple[_Path, _Value]]) -> None:
    below: dict[_Path, set[_Path]] = {}  # by mapping, the paths of all values in it: to search for each would take n^2 steps
    for path in values:
        for prefix in _prefixes(path):
            below.setdefault(prefix, set()).add(path)
    for path, value in others:
        above = [prefix for prefix in _prefixes(path) if prefix in values]
        inside = sorted(below.get(path, ()))
        if value.text == "" and inside:  # `key:` alone, over a mapping, adds nothing to it
            continue
        for gone in (*above, *inside):
            del values[gone]
            for prefix in _prefixes(gone):
                below[prefix].discard(gone)
        values[path] = value
        for prefix in _prefixes(path):
            below.setdefault(prefix, set()).add(path)


def _prefixes(path: _Path) -> list[_Path]:
    return [path[:n] for n in range(1, len(path))]


def _parse(text: str, where: str) -> dict[_Path, _Value]:
    values: dict[_Path, _Value] = {}
    above: list[tuple[int, str]] = []  # indent and key of the mappings that the line is in
    skip_from, n_open = -1, 0  # lines indented deeper than skip_from belong to a value that isn't read; brackets still open
    for number, line in enumerate(text.splitlines(), 1):
        at = f"{where}: line {number}"
        bare = _without_comment(line)
        if n_open:
            n_open += _brackets(bare)
            continue
        if not bare.strip() or (number == 1 and bare.startswith("%")) or bare.strip() in ("---", "..."):
            if bare.strip() == "---" and values:
                raise InputError(f"{at}: a second document; give one a file")
            continue
        indent = len(bare) - len(bare.lstrip(" "))
        if bare[indent] == "\t":
            raise InputError(f"{at}: a tab in the indentation, which YAML doesn't allow; use spaces")
        if skip_from >= 0 and (indent > skip_from or (indent == skip_from and bare.lstrip().startswith("- "))):
            continue
        skip_from = -1
        if re.match(r" *-( |$)", bare):
            if key := tuple(name for depth, name in above if depth <= indent):
                values[key] = _Value(None, at)
            skip_from = indent
            continue
        if above and indent > above[-1][0] and values[within := tuple(name for _, name in above)].text != "":
            values[within], skip_from = _Value(None, values[within].where), above[-1][0]  # a value that goes on below its key
            continue
        match = _KEY.match(bare)
        if match is None:
            raise InputError(f"{at}: expected KEY: VALUE, found {bare.strip()[:60]!r}")
        key_text, rest = _plain(match["key"]), match["rest"].strip()
        if key_text == "<<":
            raise InputError(f"{at}: a merge key (<<), which isn't read; write the keys out")
        while above and above[-1][0] >= indent:
            above.pop()
        if len(above) >= _MAX_DEPTH:
            raise InputError(f"{at}: keys nested more than {_MAX_DEPTH} deep")
        path = (*(name for _, name in above), key_text)
        above.append((indent, key_text))
        if path in values:
            raise InputError(f"{at}: {'.'.join(path)} stands twice; first at {values[path].where}")
        if rest[:1] in ("|", ">"):
            values[path], skip_from = _Value(None, at), indent
        elif rest[:1] in ("[", "{", "&", "*", "!"):
            values[path], n_open, skip_from = _Value(None, at), _brackets(rest) if rest[0] in "[{" else 0, indent
        else:
            values[path] = _Value(_plain(rest), at)
    mappings = _mappings(values)
    return {path: value for path, value in values.items() if path not in mappings}


def _mappings(values: Mapping[_Path, _Value]) -> set[_Path]:
    """The paths that values stand below."""
    return {prefix for path in values for prefix in _prefixes(path)}


def _without_comment(line: str) -> str:
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (at == 0 or line[at - 1] in " :[{,"):
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip()
    return line.rstrip()


def _brackets(text: str) -> int:
    return sum((char in "[{") - (char in "]}") for char in text)


def _plain(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
