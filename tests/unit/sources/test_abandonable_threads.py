"""Threads that may be left behind: a file system that hangs holds up neither loop, nor others, nor exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.abandonable_threads import AbandonableThreads, mount_of
from gpustackd.sources.local_files import in_time

pytestmark = pytest.mark.anyio


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Path]:
    """A FIFO that nobody writes to: opening it for reading blocks, as a dead mount does."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    yield path
    # a writer lets every reader that still waits go on
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    for thread in threading.enumerate():
        if thread.name.startswith("gpustackd-read"):
            thread.join(10)
    os.close(end)


def block(path: Path) -> int:
    with path.open("rb"):
        return 1


async def test_a_result_and_an_error_come_back() -> None:
    threads = AbandonableThreads()
    assert await threads.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert threads.busy("") == 0


async def test_the_wait_for_a_stuck_call_can_be_given_up_while_the_loop_runs_on(stuck: Path) -> None:
    threads = AbandonableThreads()
    with pytest.raises(ModelUnreadable) as raised:
        await in_time(threads, lambda: block(stuck), str(stuck), 0.1)
    assert (raised.value.code, raised.value.retryable) == ("file_system_hangs", True)
    assert threads.busy(mount_of(str(stuck))) == 1


async def test_a_group_that_hangs_takes_no_more_threads_than_its_limit_and_others_go_on(stuck: Path) -> None:
    threads = AbandonableThreads(limit=2)
    for _ in range(5):
        with anyio.move_on_after(0.05):
            await threads.run(lambda: block(stuck), group="dead")
    assert threads.busy("dead") == 2
    assert await threads.run(lambda: 3, group="alive") == 3


async def test_a_place_is_free_again_when_the_stuck_call_returns(stuck: Path) -> None:
    threads = AbandonableThreads(limit=1)
    with anyio.move_on_after(0.05):
        await threads.run(lambda: block(stuck), group="g")
    end = os.open(stuck, os.O_RDWR | os.O_NONBLOCK)
    assert await threads.run(lambda: 5, group="g") == 5
    os.close(end)


SCRIPT = """
import os, sys, anyio
from gpustackd.sources.abandonable_threads import AbandonableThreads

async def main():
    threads = AbandonableThreads()
    with anyio.move_on_after(0.1):
        await threads.run(lambda: open(sys.argv[1], 'rb'))
    print('left behind', flush=True)

anyio.run(main)
"""


def test_a_process_ends_although_a_thread_hangs(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "left behind\n"), done.stderr


def test_the_mount_of_a_path_is_told_from_text_alone(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    lines = ["/", "/mnt/nfs", "/mnt/nfs/deep", "/mnt/with\\040space"]
    table.write_text("".join(f"1 0 0:1 / {point} rw - nfs server rw\n" for point in lines) + "short\n")
    for path, mount in {
        "/etc": "/", "/mnt/nfs": "/mnt/nfs", "/mnt/nfs/a": "/mnt/nfs", "/mnt/nfsx": "/",
        "/mnt/nfs/deep/m": "/mnt/nfs/deep", "/mnt/with space/m": "/mnt/with space",
    }.items():  # fmt: skip
        assert mount_of(path, table) == mount
    assert mount_of("/mnt/nfs/a", tmp_path / "absent") == "/"
