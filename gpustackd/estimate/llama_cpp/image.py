"""Image models (stable-diffusion.cpp): one to three devices, nothing is divided by layers.

Formulas fitted to measurements of running pipelines. Bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.gguf_levels import Level
from gpustackd.engines.flags import BackendParameters
from gpustackd.engines.llama_cpp.flags import image_flags
from gpustackd.estimate.llama_cpp.division import MIB, Allowance, DeviceShare, Division, HostShare, level_of

_CONDITIONERS = ("cond_stage_model.", "conditioner.", "text_encoders.", "text_model.", "te.")
_AUTOENCODER = ("first_stage_model.", "vae.", "decoder.", "encoder.")
_DIFFUSION = {
    "sd1": ((7876368.5672, 161.4230198633, 0.0078124893), None),
    "sd2": ((-355043979.0562, -1193.3271458642, 0.0054023818), (3780681.28078, 513.2102510935)),
    "sdxl": ((55541290.3893, 138.3196116655, 0.0006109455), (-5958802.78052, 500.0687898915)),
    "sd3": ((16529921.3700, 234.6656247718, 0.0014648995), None),
    "flux": ((46511668.6742, 997.7758807792, 0.0014573393), None),
}
_CONDITIONING = {
    "flux": ((768, 77), (4096, 256)),
    "sd3": ((768, 77), (1280, 77), (4096, 77)),
    "sdxl": ((768, 77), (1280, 77)),
    "sd1": ((768, 77),),
    "sd2": ((768, 77),),
}


class ImageSizes:
    """A `gguf_levels.Sizes` with one level that counts: everything on devices."""

    def __init__(
        self, facts: GgufFacts, flags: BackendParameters, allowance: Allowance | None = None
    ) -> None:
        self._facts = facts
        self._asked = image_flags(flags)
        self._allowance = allowance or Allowance()
        self._pixels = self._asked.width * self._asked.height

    @property
    def total_layers(self) -> int:
        """One: the model as a whole."""
        return 1

    @property
    def layer_bytes(self) -> Sequence[int]:
        """All weights."""
        return (sum(t.size for t in self._facts.tensors),)

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> Sequence[Level]:
        """Nothing on devices, and everything."""
        return tuple(self.level(n, split, remotes) for n in range(2))

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        """Everything on devices, or on the host."""
        del remotes
        return level_of(self.division(offload_layers, max(len(split), 1)))

    def division(self, offload_layers: int, devices: int = 1) -> Division:
        """Part by part: the diffusion network on the last of the devices, text encoders on the first."""
        conditioner, autoencoder, diffusion = self._parts()
        parts = [conditioner, autoencoder, diffusion]
        if offload_layers <= 0:
            placed: list[list[tuple[int, int]]] = [[] for _ in range(devices)]
        elif devices == 1:
            placed = [parts]
        elif devices == 2:
            placed = [parts[:2], parts[2:]]
        else:
            placed = [*([p] for p in parts), *([] for _ in range(devices - 3))]
        runtime, unified = self._allowance.device(0)
        shares = tuple(
            DeviceShare(
                layers=int(diffusion in held),
                output=False,
                weights=sum(weights for weights, _ in held),
                kv_cache=0,
                compute=sum(compute for _, compute in held),
                allowance=runtime if held else 0,
                unified_allowance=unified if held else 0,
            )
            for held in placed
        )
        host = HostShare(
            weights=0 if offload_layers > 0 else sum(weights for weights, _ in parts),
            kv_cache=0,
            compute=0 if offload_layers > 0 else sum(compute for _, compute in parts),
            output=self._output(),
            allowance=10 * MIB + self._facts.metadata_bytes + self._allowance.process,
        )
        return Division(min(max(offload_layers, 0), 1), 1, shares, host)

    def _parts(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Text encoders, autoencoder and diffusion network: weights and buffers of each."""
        conditioner = autoencoder = diffusion = 0
        for tensor in self._facts.tensors:
            if tensor.name.startswith(_CONDITIONERS):
                conditioner += tensor.size
            elif tensor.name.startswith(_AUTOENCODER):
                autoencoder += tensor.size
            else:
                diffusion += tensor.size
        kind = self._kind()
        pixels = self._pixels
        plain, fused = _DIFFUSION[kind]
        if fused is not None and self._asked.flash_attention:
            compute = fused[0] + fused[1] * pixels
        else:
            compute = plain[0] + plain[1] * pixels + plain[2] * pixels**2
        return (
            (conditioner, sum(8 * width * tokens for width, tokens in _CONDITIONING[kind])),
            (autoencoder, self._autoencoding()),
            (diffusion, max(int(compute), 0)),
        )

    def _autoencoding(self) -> int:
        pixels = min(self._pixels, 512**2) if self._asked.tiled else self._pixels
        first = next(
            (t.shape for t in self._facts.tensors if t.name.endswith("decoder.conv_in.weight")),
            (3, 3, 4, 512),
        )
        return 100 * MIB + 13 * pixels * max(first[0], first[-1])

    def _output(self) -> int:
        channels = 16 if self._kind() in {"flux", "sd3"} else 4
        return self._asked.batch * (128 * MIB + 12 * self._pixels * channels)

    def _kind(self) -> str:
        names = [t.name for t in self._facts.tensors]
        if any("double_blocks." in n for n in names):
            return "flux"
        if any("joint_blocks." in n for n in names):
            return "sd3"
        if any(n.startswith("conditioner.embedders.1") for n in names):
            return "sdxl"
        if any("cond_stage_model.model." in n for n in names):
            return "sd2"
        return "sd1"
