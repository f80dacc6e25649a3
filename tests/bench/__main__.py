"""`make bench`: every figure with its bound, measured in one run and printed as one table.

Nothing here asserts a time: absolute figures swing with the disk and with who else uses the machine. Ratios
are taken turn about, and the table says what each is worth beside its bound.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from time import monotonic

import anyio
from rich.console import Console

from tests.bench import machine, rows
from tests.bench.figure import as_json, as_table

PIPED_WIDTH = 200
"""Columns where the output is no terminal: wide enough that no cell is cut."""


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the short form, below a minute")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument(
        "--only", nargs="+", choices=rows.NAMES, metavar="ROW", help=f"of {', '.join(rows.NAMES)}"
    )
    options = parser.parse_args()
    cores = machine.pin()
    err = Console(stderr=True, highlight=False)
    began = monotonic()

    def tell(text: str) -> None:
        err.print(f"{monotonic() - began:6.1f} s  {text}", style="dim")

    Path(".bench").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=".bench")).resolve()
    try:
        found, figures = anyio.run(rows.measure, folder, options.quick, options.only, cores, tell)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    command = " ".join(("make bench", *([f'ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])))
    if options.output == "json":
        print(as_json(figures, found, command))
        return
    out = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    out.print(as_table(figures))
    out.print(f"\n{machine.line(found)}\n{command}, {monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
