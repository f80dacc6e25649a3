"""A model is scaled up, loses an instance, and is scaled down: one number, written by plain SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpustackd.demo.narration import Narration

if TYPE_CHECKING:
    from gpustackd.store.postgres.inventory import Connection

MODEL = "bge-base-en"
"""Small: there is room for more of it on any fleet."""
MORE = 4
FEWER = 3
PATIENCE = 30.0


async def scale_up_and_down(told: Narration, connection: Connection) -> None:
    """From so many instances to four more, and back by three: the broken ones first."""
    from gpustackd.demo.watch_replicas import lose, names, report, scale

    told.say("\nA number of replicas")
    start = len(await names(connection, MODEL))
    number = start + MORE
    up = await scale(connection, MODEL, number, PATIENCE)
    told.finding(
        up.reached and len(up.came) == MORE,
        f"replicas = {number} of {MODEL}, which has {start}: {', '.join(up.came)} came and had their places"
        f" {up.seconds * 1000:.0f} ms later",
    )
    there = await names(connection, MODEL)
    # what the workers say of them
    await report(connection, there, "RUNNING")
    again = await lose(connection, MODEL, there[1], PATIENCE)
    told.finding(
        again.reached and again.came == (there[1],),
        f"DELETE of {there[1]}: {', '.join(again.came) or 'none'} came in its stead after"
        f" {again.seconds * 1000:.0f} ms, by the name that was free",
    )
    # one fails, the one that came back is not up yet: both go before any that serves
    broken = there[0]
    await report(connection, [broken], "ERROR", "the engine ended with exit code 1")
    await report(connection, again.came, "STARTING")
    down = await scale(connection, MODEL, number - FEWER, PATIENCE)
    told.finding(
        down.reached and {broken, *again.came} < set(down.went) and len(down.went) == FEWER,
        f"replicas = {number - FEWER} took {broken}, which had failed, {there[1]}, which was not up yet, and"
        f" of those that ran only {', '.join(set(down.went) - {broken, there[1]})}",
    )
