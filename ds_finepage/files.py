"""Reads and writes whole files; a failure is an error of the user's, with the path."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ds_finepage.errors import ConfigError


def cause_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be used, without its path: messages name the path once."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a file.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"cannot read {os.fspath(path)}: {cause_of(error)}") from error


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file at once: a reader finds the old contents or the new ones, never a part.

    Args:
        path: The file; an existing one is replaced.
        content: Its new contents; text is written as UTF-8.

    Raises:
        ConfigError: The file cannot be written; an existing one keeps its contents.
    """
    target = Path(path)
    # A rename is atomic only within one file system, so the temporary file is in the same folder.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {os.fspath(path)}: {cause_of(error)}") from error
