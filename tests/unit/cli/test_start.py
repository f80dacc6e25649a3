"""The entry point answers signals before the program is loaded."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpustackd.cli.apply import read_file
from gpustackd.errors import UsageError

# The signal comes while the program is being imported, which is where a busy start spends its time.
EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == "gpustackd.cli.program":
            os.kill(os.getpid(), int(sys.argv.pop()))
sys.meta_path.insert(0, Sender())
from gpustackd.cli import main
main()
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_daemon_is_being_loaded_ends_it_in_order(sent: signal.Signals, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY, "run", str(int(sent))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")


def test_a_file_of_documents_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="larger than 32 MiB"):
        read_file(Path("/dev/zero"))
