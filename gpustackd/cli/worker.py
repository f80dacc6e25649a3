"""`gpustackd worker`: this host, or simulated hosts, as workers that send heartbeats."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from gpustackd.cli.options import ConfigOption, DatabaseOption, LogFormatOption, LogLevelOption, load_settings
from gpustackd.errors import UsageError

if TYPE_CHECKING:
    from gpustackd.agent.simulated import SimulatedBehavior
    from gpustackd.observe.logging import Log
    from gpustackd.settings import Settings
    from gpustackd.store.postgres.connect import Connection


def worker(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Name of the worker; several with --simulate. [default: the hostname]"
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Report what is placed on NAME as running; nothing is started."),
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="With --simulate: register workers that do not exist.")
    ] = False,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="8x80GiB", help="With --create: its GPUs. [default: none]")
    ] = None,
    ram: Annotated[
        str | None, typer.Option("--ram", metavar="SIZE", help="With --create: its RAM. [default: 256GiB]")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", help="Cluster to register the worker in."),
    ] = None,
    ip: Annotated[
        str | None,
        typer.Option(
            "--ip", metavar="ADDRESS", help="Address of this host. [default: the one its default route uses]"
        ),
    ] = None,
    delay: Annotated[
        float | None,
        typer.Option(
            "--delay", metavar="SECONDS", help="With --simulate: time between two states. [default: 0.5]"
        ),
    ] = None,
    fail_rate: Annotated[
        float | None,
        typer.Option(
            "--fail-rate", metavar="0..1", help="With --simulate: share of starts that fail. [default: 0]"
        ),
    ] = None,
    fail_message: Annotated[
        str | None,
        typer.Option("--fail-message", metavar="TEXT", help="With --simulate: message of starts that fail."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="NUMBER", help="With --simulate: makes the same starts fail again."),
    ] = None,
    config: ConfigOption = None,
    database_url: DatabaseOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Run this host as a worker, or simulate workers.

    Runs until SIGTERM or SIGINT. Registers this host's RAM, CPU architecture and NVIDIA GPUs and sends its
    heartbeats; it starts no engines. With --simulate it sends the heartbeats of workers that exist (or that
    --create makes up) and reports the instances placed there as INITIALIZING, DOWNLOADING, STARTING and
    RUNNING, or as failed.

    Example: gpustackd worker --simulate node-1 node-2 --create --gpus 8x80GiB
    """
    given = list(dict.fromkeys(names or []))
    only_simulated = {
        "--create": create or None, "--delay": delay, "--fail-rate": fail_rate,
        "--fail-message": fail_message, "--seed": seed,
    }  # fmt: skip
    if simulate:
        _check_simulated(given, create, {"--gpus": gpus, "--ram": ram, "--cluster": cluster}, ip)
    else:
        _refuse(
            {**only_simulated, "--gpus": gpus, "--ram": ram}, "--simulate", "this host is registered as it is"
        )
        if len(given) > 1:
            raise UsageError("this host is only one worker", "give one NAME, or add --simulate")
    if delay is not None and not (math.isfinite(delay) and delay >= 0):
        raise UsageError(f"--delay {delay:g} is not a duration", "give seconds, such as --delay 0.5")
    if fail_rate is not None and not 0 <= fail_rate <= 1:
        raise UsageError(
            f"--fail-rate {fail_rate:g} is not a share", "give a number from 0 to 1, such as 0.1"
        )
    settings = load_settings(config, database_url, log_level=log_level, log_format=log_format)
    settings.require_database()
    if not simulate:
        anyio.run(_host, settings, given[0] if given else socket.gethostname(), cluster, ip)
        return
    from gpustackd.agent.register import parse_gpus, simulated_document
    from gpustackd.agent.simulated import SimulatedBehavior

    script = SimulatedBehavior(
        0.5 if delay is None else delay,
        fail_rate or 0.0,
        "simulated failure" if fail_message is None else fail_message,
        random.randrange(2**32) if seed is None else seed,
    )
    made = parse_gpus(gpus or "")
    documents = [simulated_document(name, ram or "256GiB", made, cluster) for name in given] if create else []
    anyio.run(_simulate, settings, given, documents, script)


def _check_simulated(
    given: Sequence[str], create: bool, made_up: dict[str, str | None], ip: str | None
) -> None:
    if not given:
        raise UsageError("--simulate needs the name of a worker", "gpustackd worker --simulate NAME")
    if ip is not None:
        raise UsageError("--ip is for this host, not for simulated workers", "leave out --ip or --simulate")
    if not create:
        _refuse(made_up, "--create", "workers that exist keep what they have")


def _refuse(options: dict[str, Any], needed: str, why: str) -> None:
    if wrong := [name for name, value in options.items() if value is not None]:
        verb = "go" if len(wrong) > 1 else "goes"
        raise UsageError(f"{', '.join(wrong)} {verb} with {needed}", f"add {needed}, or leave it out: {why}")


async def _simulate(
    settings: Settings, names: list[str], documents: list[dict[str, Any]], script: SimulatedBehavior
) -> None:
    from gpustackd.agent import register
    from gpustackd.store.postgres import worker_reports

    async def setup(connection: Connection, log: Log) -> Sequence[str]:
        there = await worker_reports.worker_states(connection, names)
        for document in documents:
            if document["name"] not in there:
                action, note = await register.register(connection, document)
                log.info("worker.registered", worker=document["name"], action=action, note=note or None)
        await register.require_workers(connection, names)
        return names

    await _live(settings, setup, script)


async def _host(settings: Settings, name: str, cluster: str | None, ip: str | None) -> None:
    from gpustackd.agent import host, register

    async def setup(connection: Connection, log: Log) -> Sequence[str]:
        gpus = await anyio.to_thread.run_sync(host.nvidia_gpus)
        document = host.host_document(name, gpus, ip=ip) | ({"cluster": cluster} if cluster else {})
        action, note = await register.register(connection, document)
        log.info(
            "worker.registered",
            worker=name,
            action=action,
            note=note or None,
            ram=document["ram_total"],
            cpu_arch=document["cpu_arch"],
            gpus_found=len(gpus.documents),
        )
        if gpus.problem:
            log.warning("worker.without_gpus", worker=name, reason=gpus.problem)
        return [name]

    await _live(settings, setup, None)


async def _live(settings: Settings, setup: Any, script: SimulatedBehavior | None) -> None:
    from gpustackd.agent.agent import WorkerAgent
    from gpustackd.observe.logging import start_logging

    logging = start_logging(level=settings.log_level, form=settings.log_format)
    try:
        agent = WorkerAgent(
            settings.require_database(), logging.log, settings.worker_heartbeat_interval, script
        )
        await agent.run(lambda connection: setup(connection, logging.log))
    finally:
        logging.close()
