"""The cache on disk of what was read from hubs: survives restarts, expires, and every entry is checked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

MAGIC = b"gpustackd-cache-1"


class DiskCache:
    """Key -> bytes, one file each, at most `limit` bytes in all. Blocking. An IO error counts as a miss: a
    full or read-only disk makes reading slower, never wrong. `clock` is the wall clock in seconds."""

    def __init__(self, directory: Path, clock: Callable[[], float], limit: int = 256 * 1024**2) -> None:
        self._directory = directory
        self._clock = clock
        self._limit = limit
        self._written = 0

    def get(self, key: str) -> bytes | None:
        """The bytes put under this key, unless expired, damaged or gone."""
        try:
            data = self._path(key).read_bytes()
        except OSError:
            return None
        head, newline, rest = data.partition(b"\n")
        fields = head.split(b" ")
        if not newline or len(fields) != 3 or fields[0] != MAGIC:
            return None
        try:
            until = float(fields[1])
        except ValueError:
            return None
        stored, newline, body = rest.partition(b"\n")
        if until <= self._clock() or stored != _line(key) or fields[2].decode() != _digest(body):
            return None
        return body

    def put(self, key: str, body: bytes, seconds: float) -> None:
        """Keep for that long. Written aside and renamed, so that a reader sees all of it or none."""
        head = f"{self._clock() + seconds:.0f} {_digest(body)}".encode()
        data = b"%s %s\n%s\n%s" % (MAGIC, head, _line(key), body)
        path = self._path(key)
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                Path(aside).replace(path)
            except OSError:
                Path(aside).unlink(missing_ok=True)
                raise
            self._written += len(data)
            if self._written > self._limit // 8:
                self._written = 0
                self._trim()

    def _trim(self) -> None:
        """Remove the oldest files beyond the limit."""
        files = []
        for path in self._directory.glob("*/*"):
            with suppress(OSError):
                info = path.stat()
                files.append((info.st_mtime, info.st_size, path))
        excess = sum(size for _, size, _ in files) - self._limit
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size

    def _path(self, key: str) -> Path:
        name = sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        return self._directory / name[:2] / name


def _line(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape").replace(b"\n", b" ")


def _digest(body: bytes) -> str:
    return sha256(body).hexdigest()
