"""Reading one directory tree of this host: sizes and beginnings of regular files, nothing else is opened.

The functions block and are run in threads that can be abandoned. Paths come from rows of a table, so they are
data: a FIFO, a device or a socket is refused by its type before it is opened (and opened without blocking, in
case it was exchanged in between); symlink loops and files beyond their limit are errors that name them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import anyio

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.abandonable_threads import AbandonableThreads, mount_of
from gpustackd.sources.formats.bounded_json import too_large

T = TypeVar("T")

MAX_ENTRIES = 20_000
"""Files of one tree that are listed."""
MAX_LEVELS = 4
"""Levels of directories below the root that are listed for pipelines."""
CONFIGURATIONS = ("config.json", "model_index.json")


class PathAbsent(ModelUnreadable):
    """This process can read nothing at the path; a worker may."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What lies under one directory: relative path -> bytes, and a fingerprint of names, sizes and times."""

    root: str
    sizes: dict[str, int]
    fingerprint: str


def real_directory(path: str) -> str:
    """Resolve a model's `local_path`. Raise ModelUnreadable (PathAbsent where it is not on this host)."""
    if "\0" in path or not path.startswith("/"):
        raise ModelUnreadable(
            "bad_path", f"local_path {path!r} is not absolute", "give the path from the root"
        )
    try:
        real = os.path.realpath(path, strict=True)
        mode = Path(real).stat().st_mode
    except OSError as e:
        raise _of(e, path) from None
    if not stat.S_ISDIR(mode):
        raise ModelUnreadable("not_a_directory", f"local_path {path} is {_kind(mode)}, not a directory")
    return real


def scan(path: str, *, deep: bool = False) -> Tree:
    """List the regular files of a model directory (`deep`: those of a pipeline's directories too), symlinks
    followed for files (hub caches consist of them) and never for directories below the root. Something else
    under the name of a configuration is listed with 0 bytes; reading it says what it is."""
    root = real_directory(path)
    entries: dict[str, tuple[int, int]] = {}

    def look(levels: int) -> None:
        for name, info in _walk(root, "", levels):
            if len(entries) >= MAX_ENTRIES:
                raise ModelUnreadable("too_many_files", f"{path} has more than {MAX_ENTRIES} files")
            entries[name] = (info.st_size, info.st_mtime_ns)

    try:
        look(0)
        for name in CONFIGURATIONS:  # anything else under such a name is refused when it is read
            if name not in entries and os.path.lexists(f"{root}/{name}"):
                entries[name] = (0, 0)
        if deep and "model_index.json" in entries:
            look(MAX_LEVELS)
    except OSError as e:
        raise _of(e, path) from None
    text = "\n".join(f"{n}\0{s}\0{t}" for n, (s, t) in sorted(entries.items()))
    digest = sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return Tree(root, {n: s for n, (s, _) in entries.items()}, digest)


def read(root: str, name: str, limit: int) -> bytes:
    """A whole small file below a scanned root. Raise ModelUnreadable when it is longer than `limit` bytes."""
    handle, size = _open(root, name)
    with os.fdopen(handle, "rb") as file:
        if size > limit:
            raise too_large(f"{root}/{name}", size, limit)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise too_large(f"{root}/{name}", len(data), limit)
    return data


def read_range(root: str, name: str, start: int, length: int) -> bytes:
    """At most `length` bytes from `start` on; fewer at the end of the file."""
    handle, _ = _open(root, name)
    with os.fdopen(handle, "rb") as file:
        file.seek(start)
        return file.read(length)


def _open(root: str, name: str) -> tuple[int, int]:
    path = f"{root}/{name}"
    try:
        _require_regular(Path(path).stat().st_mode, path)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as e:
        raise _of(e, path) from None
    try:
        info = os.fstat(handle)
        _require_regular(info.st_mode, path)
    except BaseException:
        os.close(handle)
        raise
    return handle, info.st_size


def _walk(root: str, below: str, levels: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(f"{root}/{below}" if below else root) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                if levels and not entry.name.startswith("."):
                    yield from _walk(root, name, levels - 1)
                continue
            try:
                info = entry.stat()
            except OSError as e:
                if e.errno in {errno.ENOENT, errno.ELOOP}:
                    continue  # a link to nothing, or to itself, is no file
                raise
            if stat.S_ISREG(info.st_mode):
                yield name, info


def _require_regular(mode: int, path: str) -> None:
    if not stat.S_ISREG(mode):
        raise ModelUnreadable("not_a_file", f"{path} is {_kind(mode)}, not a regular file")


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISFIFO, "a FIFO"), (stat.S_ISCHR, "a character device"), (stat.S_ISBLK, "a block device"),
        (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a directory"), (stat.S_ISREG, "a file"),
    )  # fmt: skip
    return next((name for test, name in kinds if test(mode)), "of an unknown kind")


def _of(e: OSError, path: str) -> ModelUnreadable:
    if e.errno in {errno.ENOENT, errno.ENOTDIR}:
        return PathAbsent("path_absent", f"{path} does not exist on this host", retryable=True)
    if e.errno in {errno.EACCES, errno.EPERM}:
        return PathAbsent("no_permission", f"this process has no permission to read {path}", retryable=True)
    if e.errno == errno.ELOOP:
        return ModelUnreadable("symlink_loop", f"{path} is a loop of symbolic links")
    if e.errno == errno.ENAMETOOLONG:
        return ModelUnreadable("bad_path", f"local_path of {len(path)} characters is too long")
    return ModelUnreadable("io_error", f"{path}: {os.strerror(e.errno or 0)}", retryable=True)


class LocalFiles:
    """A scanned directory as `contents.ModelFiles`."""

    def __init__(self, tree: Tree, label: str, threads: AbandonableThreads, seconds: float) -> None:
        self._tree = tree
        self._threads = threads
        self._seconds = seconds
        self._mount = mount_of(tree.root)
        self.key = f"local_path:{tree.root}@{tree.fingerprint}"
        self.label = label
        self.sizes: Mapping[str, int] = tree.sizes
        self.is_local = True

    @classmethod
    async def open(
        cls, path: str, threads: AbandonableThreads, seconds: float, *, deep: bool = False
    ) -> LocalFiles:
        """Scan a model's directory. Raise PathAbsent where this host does not have it."""
        tree = await in_time(threads, lambda: scan(path, deep=deep), path, seconds)
        return cls(tree, path, threads, seconds)

    async def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""
        return await self._in_time(lambda: read(self._tree.root, name, limit))

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on."""
        return await self._in_time(lambda: read_range(self._tree.root, name, start, length))

    async def _in_time(self, call: Callable[[], T]) -> T:
        return await in_time(self._threads, call, self._tree.root, self._seconds, self._mount)


async def in_time(
    threads: AbandonableThreads, call: Callable[[], T], path: str, seconds: float, mount: str | None = None
) -> T:
    """Run a blocking call on a path (on a `mount`, if that is known); raise ModelUnreadable (retryable) where
    its file system hangs."""
    try:
        with anyio.fail_after(seconds):
            return await threads.run(call, group=mount if mount is not None else mount_of(path))
    except TimeoutError:
        problem = (
            f"the file system at {mount_of(path)} did not answer within {seconds:g} s while reading {path}"
        )
        raise ModelUnreadable("file_system_hangs", problem, "check the mount", retryable=True) from None
