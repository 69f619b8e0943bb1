"""Files that people name: read whole up to a size, and written whole or not at all.

Rule: only regular files are read, so that a device or a pipe can't fill memory or block; every way in which a path can be
wrong is an InputError.
"""

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from shardroute.topologies.errors import InputError

# Each file that is read, at level INFO.
READINGS: Final = logging.getLogger("shardroute.files")


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading bytes. Raises InputError for any other path, and when reading fails."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{path}: can't be read (it is {_kind(mode)}, expected a file)")
        with open(path, "rb") as file:
            READINGS.info("read %s", path)
            yield file
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror or error})") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r}: can't be read ({error})") from None  # a NUL in the name


def read_file(path: str | Path, most_bytes: int) -> bytes:
    """The file's content. Raises InputError when there is no such regular file, or when it is larger than `most_bytes`."""
    with opened(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise InputError(f"{path}: can't be read (it has more than {most_bytes} bytes, the most that such a file may have)")
    return data


def read_text(path: str | Path, most_bytes: int) -> str:
    """The file's text. Raises InputError as `read_file` does, and, with the line, for bytes that aren't UTF-8."""
    data = read_file(path, most_bytes)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{path}: line {line}: expected UTF-8 text ({error.reason} at byte {error.start})") from None


def write_file(path: str | Path, data: bytes, what: str) -> None:
    """Write bytes to a path: a plain file appears whole or not at all, and keeps what it had where that fails; a device, a pipe
    or a link may be named too. Raises InputError, which calls the content `what`.
    """
    if _can_be_replaced(path):
        with written_whole(path, what) as file:
            file.write(data)
        return
    try:
        with open(path, "wb") as file:
            file.write(data)
    except (OSError, ValueError) as error:
        raise cannot_write(path, what, error) from None


def _can_be_replaced(path: str | Path) -> bool:
    """Whether another file may take the path's place: it is a file, or nothing yet, in a folder that the user may write to."""
    try:
        if not os.access(os.path.dirname(path) or ".", os.W_OK):
            return False
        found = os.lstat(path)
        return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and os.access(path, os.W_OK)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


@contextmanager
def written_whole(path: str | Path, what: str) -> Iterator[BinaryIO]:
    """A new file to write into, which takes the place of `path` once the block ends without an error; else it is removed.

    It lies in the same folder under a name that nobody can foresee. Raises InputError, which calls the content `what`, when
    the folder isn't there or `path` is there and isn't a regular file: renaming over a device would replace it.
    """
    draft: Path | None = None
    try:
        target = Path(os.path.realpath(path))
        with suppress(FileNotFoundError):
            mode = os.stat(target).st_mode
            if not stat.S_ISREG(mode):
                raise InputError(f"can't write {what} to {str(path) or repr('')}: it is {_kind(mode)}; name a file")
        draft = target.with_name(f".{secrets.token_hex(8)}.part")
        with open(draft, "xb") as file:
            yield file
        os.replace(draft, target)
    except BaseException as error:
        if draft is not None:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        if isinstance(error, (OSError, ValueError)) and not isinstance(error, InputError):
            raise cannot_write(path, what, error) from None
        raise


def check_writable(path: str | Path, what: str) -> None:
    """Raise the InputError of `write_file` for a path that is a folder, lies in none, or isn't the user's to write."""
    try:
        folder = os.path.dirname(os.path.realpath(path))
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            code = errno.EACCES if os.path.isdir(folder) else errno.ENOENT
            raise OSError(code, os.strerror(code))
        os.lstat(path)  # says whether a name is too long, or none at all
    except FileNotFoundError as error:
        if not str(path) or not os.path.isdir(folder):
            raise cannot_write(path, what, error) from None
    except (OSError, ValueError) as error:
        raise cannot_write(path, what, error) from None


def cannot_write(path: str | Path, what: str, error: Exception) -> InputError:
    """The InputError for a path that can't be written to."""
    reason = error.strerror if isinstance(error, OSError) else None
    return InputError(f"can't write {what} to {str(path) or repr('')}: {reason or error}")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "a pipe or socket"
