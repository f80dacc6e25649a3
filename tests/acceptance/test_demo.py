"""`gpustackd demo`, as a person runs it: it holds, and leaves nothing behind, however it ends."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_MS = 60_000


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demonstration as a process, its two streams in one; killed if the test does not wait for it."""
    command = [sys.executable, "-u", "-m", "gpustackd", "demo", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line in which `pattern` is found."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"{pattern!r} was not said:\n{''.join(seen)}")


def handles(pids: Sequence[int]) -> list[int]:
    """File descriptors that become readable when these processes end."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("this system has no pidfd")
    return [os.pidfd_open(pid) for pid in pids]


def assert_all_end(fds: Sequence[int]) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    left = set(fds)
    while left:
        ended = poll.poll(PATIENCE_MS)
        assert ended, f"{len(left)} of {len(fds)} processes still run"
        for fd, _ in ended:
            poll.unregister(fd)
            left.discard(fd)
            os.close(fd)


def postmaster(folder: Path) -> int:
    return int((folder / "postgres" / "data" / "postmaster.pid").read_text().split()[0])


def test_the_demonstration_holds_and_leaves_nothing_behind() -> None:
    with demo() as process:
        folder = Path(read_until(process, r"^gpustackd demo, in (.+)$")[1])
        pids = [int(p) for p in read_until(process, r"processes ([\d, ]+)$")[1].split(",")]
        fds = handles([*pids, postmaster(folder)])
        said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "killed with SIGKILL while it worked on" in said
    assert "FAIL" not in said
    assert "audit: every rule holds" in said
    assert re.search(r"DELETE of \S+ freed .+; \S+ had it \d+ ms later", said)
    for reason in ("are MAINTENANCE|is MAINTENANCE", "accelerator=h200", r"771\.56 GiB"):
        assert re.search(reason, said)
    picture = re.search(r"The fleet: .*?\n(.*?)\n\n", said, re.DOTALL)
    assert picture is not None
    assert max(len(line) for line in picture[1].splitlines()) <= 100
    assert "\x1b" not in said
    assert not folder.exists()
    assert_all_end(fds)


@pytest.mark.skipif(sys.platform != "linux", reason="ties between the lives of processes are Linux's")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_demonstration_that_is_cut_short_leaves_no_process_behind(
    how: signal.Signals, tmp_path: Path
) -> None:
    with demo(str(tmp_path)) as process:
        pids = [int(p) for p in read_until(process, r"processes ([\d, ]+)$")[1].split(",")]
        fds = handles([*pids, postmaster(tmp_path)])
        process.send_signal(how)
        said, _ = process.communicate()
        assert_all_end(fds)
    assert process.returncode != 0
    assert "Traceback" not in said
