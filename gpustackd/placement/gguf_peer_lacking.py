"""Compatibility mode: the facts of the peer's diagnostics (section 12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpustackd.domain.gguf_levels import Level
from gpustackd.domain.outcome import Reason
from gpustackd.placement.fit.gguf_peer import MOST_ELIGIBLE, Host, by_memory
from gpustackd.placement.gguf_peer_parts import main_worker, remote_cards
from gpustackd.placement.names import gib, gib_number

if TYPE_CHECKING:
    from gpustackd.placement.gguf_peer import View


def before(view: View) -> list[Reason]:
    """What keeps the peer from any search (P1 to P6)."""
    if view.layers is not None and 0 < view.layers < view.total and not view.asked.cpu_offloading:
        text = f"{view.layers} of {view.total} layers on GPUs need cpu_offloading, which is off"
        return [_reason("layers", text, layers=view.layers, total_layers=view.total)]
    if not view.hosts:
        return [_reason("no_resources", "no worker has memory to offer: look at their VRAM and RAM")]
    free = any(c.free for h in view.picked for c in h.cards)
    if view.manual:
        if not free:
            text = f"the selected GPUs need at least {gib(view.prepared.layer)} free"
            return [_reason("selected_full", text, need_bytes=view.prepared.layer)]
        return selection(view)
    if not free and any(h.cards for h in view.hosts):
        return [_reason("no_vram", "no GPU memory is free on any worker")]
    return []


def selection(view: View) -> list[Reason]:
    """Selected workers that are not there, selected GPUs that are too small (P5, P6)."""
    names = {h.name: h for h in view.picked}
    for gpu in view.ids:
        host = names.get(gpu.worker)
        if host is None:
            text = f"the selected worker {gpu.worker} is not there"
            return [_reason("selected_worker", text, worker=gpu.worker)]
        name = f"{gpu.worker}:{gpu.type}:{gpu.index}"
        layer = view.prepared.one_layer(host)
        if any(c.id == name and c.free < layer for c in host.cards):
            text = f"the selected GPU {name} is too small: one layer needs {gib(layer)}"
            return [_reason("selected_small", text, gpu_id=name, needs_gib=gib_number(layer))]
    return []


def _one_gpu(view: View) -> list[Reason]:
    level = view.prepared.full
    cards = [(c, h) for h in view.picked for c in h.cards]
    if not cards:
        return []
    card, host = max(cards, key=lambda x: x[0].free)
    text = (
        f"{_needs(level)}; the largest free GPU is {card.id}: {gib(card.free)}, with {gib(host.ram)} of RAM"
    )
    return [
        _reason(
            "one_gpu",
            text,
            **_facts(level),
            free_gib=gib_number(card.free),
            free_ram_gib=gib_number(host.ram),
        )
    ]


def _one_worker(view: View) -> list[Reason]:
    host = next((h for h in by_memory(view.picked) if len(h.cards) > 1), None)
    if host is None:
        return []
    levels = view.asked.sizes.levels(tuple(float(c.free) for c in host.largest_first))
    return [_summed("one_worker", levels[-1] if levels else view.prepared.full, host)]


def _over_workers(view: View) -> list[Reason]:
    main = main_worker(view)
    if main is None:
        text = f"no worker can be the main one: one layer needs {gib(view.prepared.layer)}"
        return [_reason("no_main", text, need_bytes=view.prepared.layer)]
    remotes = remote_cards(view, main)
    least = view.prepared.remote_layer
    if not remotes:
        text = f"no GPU of another worker can serve: one layer needs {gib(least)} there"
        return [_reason("no_remote", text, need_bytes=least)]
    if len(remotes) > MOST_ELIGIBLE and not view.manual:
        text = (
            f"{len(remotes)} GPUs of other workers are too many to search ({MOST_ELIGIBLE}): "
            "select some by hand"
        )
        return [_reason("too_many", text, gpus=len(remotes), most=MOST_ELIGIBLE)]
    return []


def _partial(view: View) -> list[Reason]:
    hosts = by_memory(view.picked)
    if view.layers is None or not hosts or view.layers >= len(view.prepared.levels):
        return []
    levels = view.asked.sizes.levels(tuple(float(c.free) for c in hosts[0].largest_first))
    level = levels[view.layers] if view.layers < len(levels) else view.prepared.levels[view.layers]
    return [_summed("partial", level, hosts[0], f" for {view.layers} layers; fewer would need less")]


def _cpu(view: View) -> list[Reason]:
    if not view.hosts:
        return []
    host = max(view.hosts, key=lambda h: h.ram)
    need = host.memory(view.prepared.levels[0])
    text = f"without a GPU {gib(need)} of RAM are needed; the most is free on {host.name}: {gib(host.ram)}"
    return [_reason("cpu", text, need_bytes=need, free_bytes=host.ram)]


def _summed(code: str, level: Level, host: Host, more: str = "") -> Reason:
    vram = sum(d.vram for d in level.devices)
    text = f"{_needs(level)}{more}; worker {host.name} has {gib(host.vram)} on its GPUs"
    text += f" and {gib(host.ram)} of RAM"
    if vram <= host.vram and level.ram <= host.ram:
        text += ", but layers are whole, and no set of its GPUs holds them"
    return _reason(
        code, text, **_facts(level), free_gib=gib_number(host.vram), free_ram_gib=gib_number(host.ram)
    )


def _needs(level: Level) -> str:
    return f"{gib(sum(d.vram for d in level.devices))} of GPU memory and {gib(level.ram)} of RAM are needed"


def _facts(level: Level) -> dict[str, float]:
    vram = sum(d.vram for d in level.devices)
    return {
        "vram_gib": gib_number(vram),
        "ram_gib": gib_number(level.ram),
        "offload_layers": level.offload_layers,
    }


def _reason(code: str, text: str, **params: object) -> Reason:
    return Reason(f"fit.{code}", "fit", text, params)


LACKING: Mapping[int, Callable[[View], list[Reason]]] = {
    1: _one_gpu, 2: _one_worker, 3: _over_workers, 4: _partial, 5: _cpu,
}  # fmt: skip
