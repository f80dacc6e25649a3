"""`gpustackd demo`: the main job on real input, everything included."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from gpustackd.cli.demo_summary import summary, waiting_words
from gpustackd.cli.output import console
from gpustackd.demo.narration import Narration

if TYPE_CHECKING:
    from gpustackd.demo.replica_processes import Replica
    from gpustackd.store.embedded import EmbeddedPostgres
    from gpustackd.store.postgres.inventory import Connection

REPLICAS = 3
LEASE = 2
"""Seconds; short, so that what a killed replica held is taken over while one watches."""
PATIENCE = 45.0
CANNOT_FIT = ("deepseek-r1", "llama-3.1-8b", "mixtral-8x7b")
"""Models of the example that no worker can take, each for another reason."""
BURST_OF_THE_KILL = 3
TROUBLE = ("daemon.error", "daemon.failed", "database.error", "rescan.failed")
"""Log events that must not occur, whatever is killed."""
AT_ONCE = 1.0
"""Seconds within which a freed card must be taken (contract section 5)."""


def demo(
    directory: Annotated[
        Path | None,
        typer.Argument(help="Keep database, models and logs here. [default: a temporary folder, removed]"),
    ] = None,
) -> None:
    """The main job on real input, everything included.

    Places sixty instances of public models on an example fleet, with three daemons, one of them killed.

    Needs nothing: brings its own PostgreSQL, writes the models as sparse files with real headers, and ends
    with a picture of the fleet, the reasons of what has to wait, and an audit. Exit 0 where all of it held.

    Example: gpustackd demo
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job ignores it
    signal.signal(signal.SIGTERM, _interrupt)
    told = Narration(console())
    with _place(directory) as where:
        told.say(f"gpustackd demo, in {where}", style="bold")
        _set_the_stage_and_play(told, where)
    if told.failures:
        told.say(f"\nfailed after {told.elapsed:.0f} s: {'; '.join(told.failures)}", style="red")
        raise typer.Exit(1)
    told.say(f"\nall of it held, in {told.elapsed:.0f} s", style="green")


def _interrupt(*_: object) -> None:
    """SIGTERM ends it as Ctrl-C does: everything that was started is stopped."""
    signal.raise_signal(signal.SIGINT)


@contextmanager
def _place(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory.resolve()
        return
    temporary = Path(tempfile.mkdtemp(prefix="gpustackd-demo-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_the_stage_and_play(told: Narration, where: Path) -> None:
    from gpustackd.demo.models.catalogue import write_models
    from gpustackd.store.embedded import EmbeddedPostgres

    told.say("\nSetting up")
    sizes: list[int] = []
    with told.step("fourteen public models as sparse directories") as notes:
        models = write_models(where / "models", tell=lambda _, size: sizes.append(size))
        notes.append(f"{sum(sizes) / 1e9:.0f} GB of weights, of which only the headers are on this disk")
    server = EmbeddedPostgres(where / "postgres", report=lambda text: told.say(f"          {text}"))
    with told.step("PostgreSQL"):
        server.start()
    try:
        anyio.run(_play, told, where, server, models)
    finally:
        server.stop()


async def _play(told: Narration, where: Path, server: EmbeddedPostgres, models: Path) -> None:
    from gpustackd.demo import watch
    from gpustackd.demo.lost_worker import SETTINGS, lose_a_worker
    from gpustackd.demo.models import folder
    from gpustackd.demo.replica_processes import replicas
    from gpustackd.demo.scaling import scale_up_and_down
    from gpustackd.store.postgres.inventory import connected
    from gpustackd.store.postgres.migrate import migrate

    url = server.url()
    with told.step("schema") as notes:
        notes.append(f"at {(await migrate(url))[1]}")
    async with connected(url, "gpustackd demo") as connection:
        await watch.clear(connection)  # of an earlier run in the same folder
        with told.step("fleet and models") as notes:
            notes.append(await _apply(connection, [folder() / "fleet.yaml", models]))
        settings = {"GPUSTACKD_DATABASE_URL": url, "GPUSTACKD_LEASE": str(LEASE), **SETTINGS}
        async with replicas(REPLICAS, where, settings) as made:
            with told.step(f"{REPLICAS} daemons") as notes:
                for replica in made:
                    await replica.ready()
                notes.append("processes " + ", ".join(str(r.pid) for r in made))
            told.say(f"  connect with {server.psql()}", style="dim")
            await _storm(told, connection, made)
            await _look(told, connection)
            await _free(told, connection)
            await scale_up_and_down(told, connection)
            await lose_a_worker(told, connection)
            await _audit(told, connection)
            await _stop(told, made)


async def _apply(connection: Connection, files: Sequence[Path]) -> str:
    from gpustackd.store.documents.apply import apply_documents
    from gpustackd.store.documents.reading import read_documents
    from gpustackd.store.postgres.inventory import InventoryReads

    kinds: Counter[str] = Counter()
    for file in files:
        text = await anyio.Path(file).read_text("utf-8")
        kinds.update(a.kind for a in await apply_documents(connection, read_documents(text, file.name)))
    cards = len(await InventoryReads(connection).rows("gpus"))
    return f"{kinds['Worker']} workers with {cards} GPUs, {kinds['Model']} models"


async def _storm(told: Narration, connection: Connection, made: Sequence[Replica]) -> None:
    """All instances, in bursts of plain SQL; one daemon is killed while it works on a burst."""
    from gpustackd.demo import watch
    from gpustackd.demo.models import folder
    from gpustackd.demo.replica_processes import KillFirstToWork
    from gpustackd.store.postgres.inventory import InventoryReads
    from gpustackd.store.postgres.statements import statements

    told.say("\nSixty instances by plain SQL, in bursts")
    for number, burst in enumerate(statements(folder() / "instances.sql"), 1):
        trap = KillFirstToWork(made, PATIENCE) if number == BURST_OF_THE_KILL else None
        count = await watch.run_sql(connection, burst)
        with told.step(f"burst {number}, {count} instances") as notes:
            if trap is not None:
                victim = await trap.sprung()
                held = await watch.under_lease(connection)
                notes.append(f"{victim.name} killed with SIGKILL while it worked on {held} of them")
                if held:
                    notes.append(f"taken over when their lease of {LEASE} s was over")
            await watch.decided(connection, PATIENCE)
            counts = await InventoryReads(connection).counts()
            notes.append(", ".join(f"{n} {state}" for state, n in sorted(counts.items(), reverse=True)))
    found = await watch.speeds(connection)
    told.say(
        f"  INSERT to SCHEDULED over {found['n']} placements: median {found['p50']:.0f} ms,"
        f" 90 % within {found['p90']:.0f} ms, slowest {found['worst']:.0f} ms"
    )
    shares = await watch.placed_by(connection)
    told.say("  placed by " + ", ".join(f"{name}: {n}" for name, n in shares.items()))


async def _look(told: Narration, connection: Connection) -> None:
    """The models in a table, the fleet in a picture, the waiting instances with their reasons."""
    from gpustackd.cli.picture import WIDTH, legend, picture
    from gpustackd.store.postgres.inventory import InventoryReads

    inventory = InventoryReads(connection)
    instances = await inventory.rows("instances")
    gpus = await inventory.rows("gpus")
    told.say("\nWhat became of them")
    summary(told, instances)
    told.say(f"\nThe fleet: {legend(gpus)}")
    width = min(told.out.width, WIDTH)
    told.out.print(picture(await inventory.rows("workers"), gpus, width), end="")
    told.say("\nWhy the others wait")
    for line in waiting_words(instances):
        told.say(f"  {line}")
    told.say()
    waiting = [i for i in instances if i["state"] == "PENDING"]
    placed = len(instances) - len(waiting)
    well = all(i["state"] in ("PENDING", "SCHEDULED") for i in instances)
    told.finding(
        well and placed >= len(instances) // 2,
        f"{placed} of {len(instances)} instances are placed, none is in error",
    )
    told.finding(all(i["reasons"] and i["state_message"] for i in waiting), "every waiting instance says why")
    hopeless = [i for i in instances if i["model"] in CANNOT_FIT]
    told.finding(
        all(i["state"] == "PENDING" for i in hopeless),
        f"the {len(hopeless)} that fit nowhere were put nowhere",
    )


async def _free(told: Narration, connection: Connection) -> None:
    """Give a card back and see how soon a waiting instance has it."""
    from gpustackd.demo import watch

    told.say("\nA card is given back")
    freed = await watch.free_a_card(connection)
    if freed is None:
        told.finding(False, "an instance waits for a card like one that is taken")
        return
    words = f"DELETE of {freed.before} freed {freed.card}"
    if freed.after is None:
        told.finding(False, f"{words}; nobody took it within {freed.seconds:.0f} s")
    else:
        took = f"{freed.after} had it {freed.seconds * 1000:.0f} ms later"
        told.finding(freed.seconds <= AT_ONCE, f"{words}; {took}")


async def _audit(told: Narration, connection: Connection) -> None:
    from gpustackd.store.audit.audit import audit_on

    found = await audit_on(connection)
    told.finding(found.clean, "audit: every rule holds" if found.clean else "audit: rules are broken")
    for breach in found.breaches[:10]:
        told.say(f"       rule {breach.rule}, {breach.what}: {breach.how}", style="red")


async def _stop(told: Narration, made: Sequence[Replica]) -> None:
    survivors = [r for r in made if r.running]
    codes = [await r.stop() for r in survivors]
    failed = sum(r.events[event] for r in made for event in TROUBLE)
    told.finding(failed == 0, f"{failed or 'no'} errors in the logs of the daemons")
    told.finding(
        len(survivors) == len(made) - 1 and codes == [0] * len(codes),
        f"the {len(survivors)} other daemons ran on and stopped on SIGTERM with exit codes {codes}",
    )
