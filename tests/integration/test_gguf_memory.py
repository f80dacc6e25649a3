"""GGUF models on unified memory, in parts, over workers and on the CPU: whatever is committed to PostgreSQL,
RAM and VRAM together never exceed a machine. `audit` is the judge."""

from __future__ import annotations

from random import Random

import pytest

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Placed
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.ports import Proposal
from tests.fleets import GIB, model
from tests.gguf_sizes import Toy, layered
from tests.integration.world import World

pytestmark = pytest.mark.anyio
SITES = 16
EACH = 6
"""Instances that are asked for on one site."""


async def build(world: World, chance: Random) -> None:
    """Some workers: with memory of their own or the host's, with little RAM or much, without GPUs."""
    for _ in range(chance.randint(1, 4)):
        size = chance.choice((3, 5, 8, 12, 24))
        gpus = [size * GIB] * chance.choice((0, 1, 1, 2, 3, 4))
        unified = chance.random() < 0.4
        reserved = chance.choice((0, GIB))
        await world.worker(
            *gpus,
            ram_total=chance.choice((4, 10, 18, 40)) * GIB,
            unified_memory=unified,
            vram_reserved=reserved,
            ram_reserved=reserved,
        )


def asked(chance: Random, model_id: int) -> Demand:
    """A model of so many layers, with whatever its row allows."""
    layers = tuple(int(chance.choice((0.5, 1, 1, 2)) * GIB) for _ in range(chance.randint(2, 9)))
    sizes = Toy(layers, GIB // 4, GIB // 4, GIB // 8, GIB // 4, chance.choice((GIB // 2, GIB, 3 * GIB)))
    flags = [f"-ngl={chance.randint(0, len(layers))}"] if chance.random() < 0.25 else []
    spec = model(
        model_id,
        source="local_path",
        local_path="/m/x.gguf",
        cpu_offloading=chance.random() < 0.7,
        distributed_inference_across_workers=chance.random() < 0.5,
        backend_parameters=flags,
    )
    return layered(sizes, spec)


async def view(world: World) -> Fleet:
    """What a daemon sees."""
    found = await world.store.fleet_changes(None)
    on = Fleet()
    for worker in found.workers:
        on.put_worker(worker)
    for gpu in found.gpus:
        on.put_gpu(gpu)
    for booking in await world.store.bookings(None):
        on.add_booking(booking)
    return on


async def test_ram_and_vram_that_are_committed_never_exceed_a_machine(world: World) -> None:
    strategies: set[str] = set()
    for seed in range(SITES):
        chance = Random(seed)
        await build(world, chance)
        policy = Policy(strategy=chance.choice(list(Strategy)), rpc_ram=GIB // 2)
        for _ in range(EACH):
            model_id = await world.model()
            wanted = asked(chance, model_id)
            instance = await world.instance(model_id)
            outcome = decide(await view(world), wanted, Subject(instance, f"i{instance}"), policy)
            if not isinstance(outcome, Placed):
                continue
            (claim,) = await world.claims(instance)
            version = (await world.row("models", model_id))["version"]
            (result,) = await world.store.commit(world.owner, "r", [Proposal(claim, version, outcome)])
            assert result.code is None, f"seed {seed}: {result}"
            strategies.add(outcome.placement.strategy)
            await world.clean()
        await world.sql.execute("DELETE FROM models; DELETE FROM workers")
    assert strategies == {"one_gpu", "one_worker", "many_workers", "partial", "cpu"}
