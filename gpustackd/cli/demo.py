"""`gpustackd demo`: the main job on real input, everything included."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import anyio
import typer

from gpustackd.cli.output import console
from gpustackd.demo.narration import Narration


def demo(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Keep database, models and logs here. [default: a temporary directory, removed]",
        ),
    ] = None,
) -> None:
    """Show the main job on real input, everything included.

    Places sixty instances of public models on an example fleet, with three daemons, one of them killed.

    Needs nothing else: brings its own PostgreSQL, writes the models as sparse files with real headers, and
    ends with a picture of the fleet, the reasons of instances that wait, and an audit. Exit 1 where a check
    does not hold.

    Example: gpustackd demo
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job ignores it
    signal.signal(signal.SIGTERM, _interrupt)
    narration = Narration(console())
    with _kept_or_temporary(directory) as where:
        narration.say(f"gpustackd demo, in {where}", style="bold")
        _set_up_and_play(narration, where)
    if narration.failures:
        failed = "; ".join(narration.failures)
        narration.say(f"\nfailed after {narration.elapsed:.0f} s: {failed}", style="red")
        raise typer.Exit(1)
    narration.say(f"\nevery check held, in {narration.elapsed:.0f} s", style="green")


def _interrupt(*_: object) -> None:
    """SIGTERM ends it as Ctrl-C does: everything that was started is stopped."""
    signal.raise_signal(signal.SIGINT)


@contextmanager
def _kept_or_temporary(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory.resolve()
        return
    temporary = Path(tempfile.mkdtemp(prefix="gpustackd-demo-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_up_and_play(narration: Narration, directory: Path) -> None:
    from gpustackd.cli.demo_summary import show_fleet
    from gpustackd.demo.models.examples import write_models
    from gpustackd.demo.play import play
    from gpustackd.store.embedded import EmbeddedPostgres

    narration.say("\nSetting up")
    sizes: list[int] = []
    with narration.step("fourteen public models as sparse directories") as notes:
        models = write_models(directory / "models", tell=lambda _, size: sizes.append(size))
        notes.append(f"{sum(sizes) / 1e9:.0f} GB of weights, of which only the headers are on this disk")
    server = EmbeddedPostgres(directory / "postgres", report=lambda text: narration.say(f"          {text}"))
    with narration.step("PostgreSQL"):
        server.start()
    try:
        anyio.run(play, narration, directory, server, models, show_fleet)
    finally:
        server.stop()
