"""Secrets in files: a key's password, a login's password."""

from __future__ import annotations

from pathlib import Path

from fencepost_proxy.errors import ConfigError


def secret(where: str, file: Path) -> str:
    """The first line of a file. Raises `ConfigError` without the file's content."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {file} is not UTF-8 text") from error
    if not lines or not lines[0]:
        raise ConfigError(f"{where}: the first line of {file} is empty")
    return lines[0]
