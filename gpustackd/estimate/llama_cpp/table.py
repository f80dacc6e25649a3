"""What a GGUF model needs by the number of layers on GPUs, part by part: for people, beside the claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.flags import COLUMN, parse_flags
from gpustackd.engines.llama_cpp.devices import MOST_DEVICES
from gpustackd.engines.llama_cpp.flags import tensor_split
from gpustackd.errors import BadRow
from gpustackd.estimate.answer import common_fields
from gpustackd.estimate.llama_cpp.classify import distributable, is_image
from gpustackd.estimate.llama_cpp.division import Allowance, DeviceShare, Division, HostShare
from gpustackd.estimate.llama_cpp.image import ImageSizes
from gpustackd.estimate.llama_cpp.need import sized_for, sizer_of
from gpustackd.estimate.llama_cpp.refusal import LlamaRefusal


@dataclass(frozen=True, slots=True)
class Table:
    """The answer of `gpustackd estimate` for a GGUF file. Bytes."""

    source: str
    backend: str
    architecture: str
    categories: tuple[str, ...]
    weights: int | None
    levels: tuple[Division, ...]
    """By number of layers, or the one that was asked for; empty where the engine would not start."""
    devices: int
    distributable: bool
    refused: str = ""
    sized_for: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    warnings: tuple[str, ...] = ()

    @property
    def chosen(self) -> Division | None:
        """The level that the claim is about: as many layers on GPUs as the table has."""
        return self.levels[-1] if self.levels else None

    @property
    def claim_vram(self) -> int | None:
        """What all devices together have to offer."""
        return sum(d.claim for d in self.chosen.devices) if self.chosen else None

    @property
    def claim_ram(self) -> int:
        """What the host has to offer."""
        return self.chosen.host.claim if self.chosen else 0

    @property
    def parts(self) -> Mapping[str, int]:
        """Parts of the chosen level over devices and host; they add up to both claims."""
        return parts(self.chosen) if self.chosen else {}

    def as_json(self) -> dict[str, Any]:
        """The answer of `estimate -o json`; keys may be added, none is renamed or removed. Sizes in bytes."""
        return {
            **common_fields(self),
            "levels": [_level(level) for level in self.levels],
            "sized_for": dict(self.sized_for),
            "distributable": self.distributable,
            "refused": self.refused or None,
            "warnings": list(self.warnings),
        }


def parts(level: Division) -> dict[str, int]:
    """`overhead`: runtimes of GPUs and process; `allowance`: the margin of the claim."""
    held: Sequence[DeviceShare | HostShare] = (*level.devices, level.host)
    runtimes = Allowance().device(0)[0] * sum(d.allowance > 0 for d in level.devices)
    return {
        "weights": sum(h.weights for h in held),
        "kv_cache": sum(h.kv_cache for h in held),
        "compute": sum(h.compute for h in held),
        "output": level.host.output,
        "beside": sum(h.extras for h in held),
        "prompt_cache": level.host.prompt_cache,
        "overhead": runtimes + level.host.allowance,
        "allowance": sum(d.allowance for d in level.devices) - runtimes,
    }


def table(
    spec: ModelSpec,
    facts: ModelFacts,
    *,
    devices: int | None = None,
    split: str | None = None,
    rows: int | None = None,
) -> Table:
    """All levels of a model, or the one that `--gpu-layers` names. `devices`: how many GPUs, else as many as
    the split names, else one; `split` as in `--tensor-split`, which counts where it is None; `rows` as in
    `sizer_of`. Raise BadRow for flags that cannot be read."""
    header = facts.gguf
    if not isinstance(header, GgufFacts):
        raise BadRow("source", "the header of this GGUF file is not known")
    flags = parse_flags(spec.backend_parameters)
    shares = tensor_split(flags if split is None else parse_flags([f"--tensor-split={split}"]))
    count = devices or len(shares) or 1
    if not 1 <= count <= MOST_DEVICES:
        raise BadRow(COLUMN, f"{count} devices; llama.cpp runs 1 to {MOST_DEVICES}")
    shares = (*shares, *[0.0] * (count - len(shares)))[:count] if any(shares[:count]) else (1.0,) * count
    levels: tuple[Division, ...] = ()
    refused, warnings = "", list(facts.warnings)
    held_for: Mapping[str, Any] = MappingProxyType({})
    if is_image(header):
        images = ImageSizes(header, flags)
        levels = tuple(images.division(n, count) for n in range(2))
    else:
        try:
            sizer = sizer_of(header, spec.backend_parameters, rows=rows)
        except LlamaRefusal as e:
            refused = e.why
        else:
            asked = sizer.serving.gpu_layers
            levels = sizer.divisions(shares) if asked is None else (sizer.division(asked, shares),)
            held_for = sized_for(sizer.serving)
            warnings += sizer.warnings
            if not sizer.serving.whole_split and count > 1:
                warnings.append("sized as with --split-mode layer, which divides a model by its layers")
    return Table(
        source=spec.source.value if spec.source else "",
        backend=spec.effective_backend,
        architecture=header.architecture,
        categories=spec.categories or facts.categories,
        weights=facts.weight_bytes,
        levels=levels,
        devices=count,
        distributable=distributable(header),
        refused=refused,
        sized_for=held_for,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _level(level: Division) -> dict[str, Any]:
    host = level.host
    return {
        "offload_layers": level.offload_layers,
        "total_layers": level.total_layers,
        "devices": [
            {
                "layers": d.layers,
                "weights": d.weights,
                "kv_cache": d.kv_cache,
                "compute": d.compute,
                "beside": d.extras,
                "claim": d.claim if d.used else 0,
            }
            for d in level.devices
        ],
        "host": {
            "weights": host.weights,
            "kv_cache": host.kv_cache,
            "compute": host.compute,
            "output": host.output,
            "beside": host.extras,
            "prompt_cache": host.prompt_cache,
            "claim": host.claim,
        },
    }
