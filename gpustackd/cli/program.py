"""The program: its commands, and how an error ends it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, NoReturn

import typer

from gpustackd import __version__
from gpustackd.cli import failure
from gpustackd.cli.apply import apply
from gpustackd.cli.audit import audit
from gpustackd.cli.check import check
from gpustackd.cli.demo import demo
from gpustackd.cli.estimate import estimate
from gpustackd.cli.explain import explain
from gpustackd.cli.get import get
from gpustackd.cli.migrate import migrate
from gpustackd.cli.plan import plan
from gpustackd.cli.run import run
from gpustackd.cli.worker import worker

app = typer.Typer(
    name="gpustackd",
    help="Decides on which workers and GPUs the instances of AI models run.",
    epilog="Set the database by GPUSTACKD_DATABASE_URL or the PG* variables. Every command has --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"gpustackd {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    failure.show_tracebacks(debug)


for command in (run, migrate, check, apply, get, explain, plan, estimate, audit, worker, demo):
    app.command()(command)


def main() -> NoReturn:
    """Run the command line of this process and exit with its code: 0 done or yes, 1 the answer is no, 2
    wrong usage or settings, 3 no usable database."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path of this host need not be text
            stream.reconfigure(errors="backslashreplace")
    try:
        app(list(_arguments(sys.argv[1:])))
    except BrokenPipeError:
        # Whoever read our output has gone (`gpustackd get … | head`); let nothing be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        sys.exit(failure.report(error))
    sys.exit(0)


def _arguments(given: Iterable[str]) -> Iterator[str]:
    """`--embedded=DIR` as the two words that `run` takes."""
    for word in given:
        option, equals, value = word.partition("=")
        if option == "--embedded" and equals:
            yield from (option, value)
        else:
            yield word
