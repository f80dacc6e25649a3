"""The command line `gpustackd`: one file per command, a clear word for every mistake."""

from gpustackd.cli.program import main

__all__ = ["main"]
