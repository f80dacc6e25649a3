"""The need of a GGUF model as placement reads it: booked bytes for every number of layers on devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from gpustackd.domain.demand import Need
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.gguf_levels import GgufNeed, Level
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.llama_cpp.flags import LlamaServing, serving_of
from gpustackd.estimate.llama_cpp.classify import distributable, is_image
from gpustackd.estimate.llama_cpp.division import level_of
from gpustackd.estimate.llama_cpp.image import ImageSizes
from gpustackd.estimate.llama_cpp.refusal import LlamaRefusal, refusal
from gpustackd.estimate.llama_cpp.sizer import Sizer

KEPT = 2048


class LayerSizes:
    """A `gguf_levels.Sizes` over a sizer."""

    def __init__(self, sizer: Sizer) -> None:
        self._sizer = sizer
        self._kept: dict[tuple[int, tuple[float, ...]], Level] = {}

    @property
    def total_layers(self) -> int:
        """Repeating layers and the output."""
        return self._sizer.total_layers

    @property
    def layer_bytes(self) -> Sequence[int]:
        """What each layer adds to the device that runs it, the output last."""
        memory = self._sizer.memory
        cache = memory.cache if self._sizer.serving.offload_cache else 0 * memory.cache
        return (*(memory.layers + cache).tolist(), memory.output)

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> Sequence[Level]:
        """All levels by their number."""
        return tuple(self.level(n, split, remotes) for n in range(self.total_layers + 1))

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        """One level. Remote devices take what local ones do."""
        del remotes  # llama.cpp treats them alike
        shares = tuple(map(float, split)) or (1.0,)
        found = self._kept.get((offload_layers, shares))
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = level_of(self._sizer.division(offload_layers, shares))
            self._kept[offload_layers, shares] = found
        return found


def gguf_need(spec: ModelSpec, facts: ModelFacts) -> tuple[Need, GgufNeed | None]:
    """Size a model of whose file the header is known. Raise BadRow for flags that llama.cpp refuses."""
    header = facts.gguf
    if not isinstance(header, GgufFacts):
        because = facts.unknown_because or "the header of the GGUF file is not known"
        return Need(vram=None, unknown_because=because), None
    if is_image(header):
        images = ImageSizes(header, parse_flags(spec.backend_parameters))
        full = images.level(images.total_layers)
        need = Need(vram=sum(d.vram for d in full.devices), ram=0, ram_static=full.ram)
        return need, GgufNeed(images, image=True)
    sizer = sizer_of(header, spec.backend_parameters)
    full = level_of(sizer.division(sizer.total_layers))
    need = Need(
        vram=sum(d.vram for d in full.devices),
        ram=0,  # how much RAM is needed depends on the level: the search checks each
        ram_static=full.ram,
        warnings=tuple(dict.fromkeys((*header.warnings, *sizer.warnings))),
    )
    return need, GgufNeed(LayerSizes(sizer), distributable(header), sized_for=sized_for(sizer.serving))


def sizer_of(header: GgufFacts, parameters: Sequence[str], *, rows: int | None = None) -> Sizer:
    """The sizer of a model under its flags, kept for equal questions. `rows`: logits that are reserved; None
    = one per slot, as llama-server does, 0 = one per token of a batch. Raise BadRow."""
    return _sizer(_Identity(header), tuple(parameters), rows)


class _Identity:
    """A header by what it says, so that equal headers share one sizer."""

    __slots__ = ("_digest", "header")

    def __init__(self, header: GgufFacts) -> None:
        self.header = header
        self._digest = header_digest(header)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._digest == other._digest


@lru_cache(maxsize=256)
def _sizer(identity: _Identity, parameters: tuple[str, ...], rows: int | None) -> Sizer:
    header = identity.header
    serving = serving_of(header, parse_flags(parameters))
    if rows is not None:
        serving = replace(serving, outputs=rows or serving.batch)
    sizer = Sizer(header, serving)
    if (why := refusal(header, sizer.dims, serving)) is not None:
        raise LlamaRefusal(why)
    return sizer


def header_digest(header: GgufFacts) -> str:
    """Equal for headers that say the same."""
    said: list[Any] = [
        header.architecture, header.kind, sorted(header.values.items(), key=lambda kv: kv[0]),
        sorted(header.lengths.items()), [(t.name, t.shape, t.type, t.size) for t in header.tensors],
        header.file_bytes, header.data_bytes, header.warnings,
        [header_digest(h) for h in (header.projector, header.draft, *header.adapters) if h is not None],
        header.projector is None, header.draft is None,
    ]  # fmt: skip
    return sha256(repr(said).encode()).hexdigest()


def sized_for(serving: LlamaServing) -> Mapping[str, Any]:
    """What the engine has to be started with, so that it takes what was booked."""
    return MappingProxyType({
        "context": serving.context,
        "parallel": serving.parallel,
        "kv_unified": serving.unified,
        "ubatch": serving.ubatch,
        "cache_type_k": serving.cache_k.name.lower(),
        "cache_type_v": serving.cache_v.name.lower(),
        "flash_attention": serving.flash_attention,
    })  # fmt: skip
