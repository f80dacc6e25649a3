"""The command line `gpustackd`: one file per command; `…_text` files print its answer for people."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """The entry point. Loading all parts takes a second or more on a busy machine, so a signal that arrives
    meanwhile is handled here: no work has begun, so it ends the process in order."""
    try:
        if "run" in sys.argv[1:2]:
            signal.signal(signal.SIGTERM, _exit)
        from gpustackd.cli.program import main as program

        program()
    except KeyboardInterrupt:
        sys.exit(130)


def _exit(_: int, __: FrameType | None) -> None:
    sys.exit(0)


__all__ = ["main"]
