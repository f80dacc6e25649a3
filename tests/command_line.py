"""The command line, run in this process: what it says and how it exits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gpustackd.cli import failure
from gpustackd.cli.program import main


@dataclass
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str


Command = Callable[..., Answer]


def command_in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `gpustackd …` with no database set. Not from within an event loop: it starts one of its own."""
    for name in ("GPUSTACKD_DATABASE_URL", "PGHOST", "PGDATABASE", "PGUSER", "PGPORT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(failure, "_tracebacks", False)

    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["gpustackd", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return Answer(int(caught.value.code or 0), said.out, said.err)

    return run
