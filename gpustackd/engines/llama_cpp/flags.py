"""With which flags llama-server runs a model: from `backend_parameters`, with llama.cpp's own defaults.

Names and defaults as in `common/arg.cpp` and `common/common.h` of llama.cpp. The last of equal flags wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpustackd.domain.gguf_facts import BY_NAME, F16, ElementType, GgufFacts
from gpustackd.engines.flags import COLUMN, BackendParameters
from gpustackd.errors import BadRow

CONTEXT = 8192
"""Tokens that are sized for where no flag says how many."""
SLOTS = 4
"""Parallel sequences of llama-server where no flag says how many; they share one cache then."""
BATCH = 2048
UBATCH = 512
CACHE_RAM = 8192
"""MiB of RAM that llama-server may fill with cached prompts."""
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
MAX_SLOTS = 256
IMAGE_SIDE = 1024
"""Pixels of the side of an image where no flag says how many."""
LARGEST = 2**31 - 1

ENCODERS = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
    "eurobert", "gemma-embedding", "wavtokenizer-dec", "t5encoder", "llama-embed",
})  # fmt: skip
"""Architectures that read whole texts at once, keep no cache and answer with vectors."""

FlashAttention: TypeAlias = Literal["on", "off", "auto"]

_ON = frozenset({"on", "1", "true", "yes", "enabled"})
_OFF = frozenset({"off", "0", "false", "no", "disabled"})
_LAYERS = re.compile(r"\d{1,9}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Override:
    """Tensors whose names match are kept on the host (`--override-tensor`, `--cpu-moe`, `--n-cpu-moe`), or on
    the device with that number."""

    pattern: str
    device: int | None = None

    @property
    def compiled(self) -> re.Pattern[str]:
        """The pattern, searched for anywhere in a tensor's name."""
        return re.compile(self.pattern)


@dataclass(frozen=True, slots=True)
class LlamaServing:
    """What the sizes depend on. Tokens, sequences and rows are numbers, not bytes."""

    context: int
    parallel: int
    unified: bool
    batch: int = BATCH
    ubatch: int = UBATCH
    cache_k: ElementType = F16
    cache_v: ElementType = F16
    flash_attention: FlashAttention = "auto"
    offload_cache: bool = True
    full_windows: bool = False
    embeddings: bool = False
    outputs: int = 0
    """Rows of logits that are reserved; 0 = one per slot, as llama-server does."""
    gpu_layers: int | None = None
    """None = as many as fit; else how many, the output layer counted."""
    tensor_split: tuple[float, ...] = ()
    whole_split: bool = True
    """Layers are divided over devices (`--split-mode layer`); False for rows and tensors."""
    overrides: tuple[Override, ...] = ()
    cache_ram: int = CACHE_RAM * 1024**2
    """Bytes of RAM for cached prompts."""
    projector_offload: bool = True

    @property
    def sequence_cells(self) -> int:
        """Cells of one stream of the cache: all of them where slots share it, else one slot's."""
        total = _padded(self.context, 256)
        return total if self.unified else _padded(max(total // self.parallel, 1), 256)

    @property
    def streams(self) -> int:
        """Streams of the cache: one that slots share, or one per slot (`--kv-unified`)."""
        return 1 if self.unified else self.parallel

    @property
    def cells(self) -> int:
        """Cells over all streams."""
        return self.sequence_cells * self.streams


@dataclass(frozen=True, slots=True)
class ExtraFiles:
    """Files that flags name beside the model, as they are written there."""

    projector: str | None = None
    no_projector: bool = False
    draft: str | None = None
    adapters: tuple[str, ...] = ()


def extra_files(flags: BackendParameters) -> ExtraFiles:
    """Projector, draft model and adapters; an adapter's scale (`path:scale`) is left out."""
    listed = flags.values("lora", "lora-scaled", "control-vector", "control-vector-scaled")
    return ExtraFiles(
        projector=flags.text("mmproj", "mm"),
        no_projector=flags.flag("no-mmproj"),
        draft=flags.text("model-draft", "md", "spec-draft-model"),
        adapters=tuple(_without_scale(part) for raw in listed for part in raw.split(",")),
    )


def _without_scale(adapter: str) -> str:
    path, colon, scale = adapter.rpartition(":")
    try:
        float(scale)
    except ValueError:
        return adapter
    return path if colon else adapter


@dataclass(frozen=True, slots=True)
class ImageFlags:
    """How stable-diffusion.cpp makes images. Pixels, and images of one batch."""

    width: int
    height: int
    batch: int
    flash_attention: bool
    tiled: bool
    """The autoencoder works tile by tile, of 512 x 512 pixels."""


def image_flags(flags: BackendParameters) -> ImageFlags:
    """Read the flags. Raise BadRow for what is no number."""
    return ImageFlags(
        width=flags.integer("image-width", "width", "image-max-width") or IMAGE_SIDE,
        height=flags.integer("image-height", "height", "image-max-height") or IMAGE_SIDE,
        batch=flags.integer("image-batch-count", "batch-count", "image-max-batch") or 1,
        flash_attention=flags.flag("diffusion-fa", "flash-attention", "flash-attn", "fa"),
        tiled=not flags.flag("image-no-autoencoder-tiling", "image-no-vae-tiling"),
    )


def serving_of(facts: GgufFacts, flags: BackendParameters) -> LlamaServing:
    """Read the flags. Raise BadRow for a value that llama-server would not accept."""
    trained = facts.integer("context_length") or CONTEXT
    asked = _count(flags, "ctx-size", "c")
    slots = _count(flags, "parallel", "np", "parallel-size")
    if slots is not None and slots > MAX_SLOTS:
        raise BadRow(COLUMN, f"--parallel is {slots}; llama.cpp serves at most {MAX_SLOTS} at once")
    unified = slots is None or slots < 1
    if flags.has("kv-unified", "kvu", "no-kv-unified", "no-kvu"):
        unified = flags.flag("kv-unified", "kvu")
    flash = _flash_attention(flags)
    if facts.architecture == "grok":  # llama.cpp forces it off for this one
        flash = "off"
    embeddings = facts.architecture in ENCODERS or flags.flag(
        "embedding", "embeddings", "reranking", "rerank"
    )
    ubatch = _count(flags, "ubatch-size", "ub") or UBATCH
    batch = _count(flags, "batch-size", "b") or BATCH
    if embeddings and batch > ubatch:
        batch = ubatch
    return LlamaServing(
        context=asked or (trained if asked == 0 else min(CONTEXT, trained)),
        parallel=slots if slots is not None and slots > 0 else SLOTS,
        unified=unified,
        batch=batch,
        ubatch=ubatch,
        cache_k=_cache_type(flags, "cache-type-k", "ctk"),
        cache_v=_cache_type(flags, "cache-type-v", "ctv"),
        flash_attention=flash,
        offload_cache=not flags.flag("nkvo") and not _switched_off(flags, "kv-offload"),
        full_windows=flags.flag("swa-full"),
        embeddings=embeddings,
        gpu_layers=gpu_layers(flags, facts.integer("block_count") + 1),
        tensor_split=tensor_split(flags),
        whole_split=(flags.text("split-mode", "sm") or "layer") not in {"row", "tensor"},
        overrides=_overrides(flags),
        cache_ram=_cache_ram(flags),
        projector_offload=not _switched_off(flags, "mmproj-offload"),
    )


def tensor_split(flags: BackendParameters) -> tuple[float, ...]:
    """Shares of the devices (`--tensor-split`). Raise BadRow where they are no numbers."""
    raw = flags.text("tensor-split", "ts")
    if not raw:
        return ()
    try:
        shares = tuple(float(x) for x in re.split(r"[,/]+", raw.strip()) if x)
    except ValueError:
        shares = ()
    if not shares or not all(0 <= x < 2**63 for x in shares) or not sum(shares):
        raise BadRow(COLUMN, f"--tensor-split is {raw[:60]!r}, not a list of shares", "as in 3,1")
    return shares


def _flash_attention(flags: BackendParameters) -> FlashAttention:
    if not flags.has("flash-attn", "fa", "flash-attention"):
        return "auto"
    raw = flags.text("flash-attn", "fa", "flash-attention")
    word = (raw or "on").strip().lower()
    if word in _ON:
        return "on"
    if word in _OFF:
        return "off"
    if word in {"auto", "-1"}:
        return "auto"
    raise BadRow(COLUMN, f"--flash-attn is {word[:40]!r}", "use on, off or auto")


def gpu_layers(flags: BackendParameters, total: int) -> int | None:
    """Layers on GPUs (`--gpu-layers`), the output counted, at most `total`; None = as many as fit.

    -1 and `auto` mean as many as fit, -2 and `all` mean all. Raise BadRow for anything else.
    """
    raw = flags.text("gpu-layers", "n-gpu-layers", "ngl")
    word = "auto" if raw is None else raw.strip().lower()
    if word in {"auto", "-1"}:
        return None
    if word in {"all", "-2"}:
        return total
    if not _LAYERS.match(word):
        raise BadRow(COLUMN, f"--gpu-layers is {word[:40]!r}", "use a number, auto or all")
    return min(int(word), total)


def _overrides(flags: BackendParameters) -> tuple[Override, ...]:
    found: list[Override] = []
    for raw in flags.values("override-tensor", "ot"):
        for part in raw.split(","):
            pattern, equals, buffer = part.rpartition("=")
            if not equals or not pattern:
                raise BadRow(COLUMN, f"--override-tensor is {part[:60]!r}", "as in exps=CPU")
            try:
                re.compile(pattern)
            except re.error as e:
                raise BadRow(COLUMN, f"--override-tensor: {pattern[:60]!r} is no pattern ({e})") from None
            number = re.search(r"(\d+)\Z", buffer)
            on_host = not number or buffer.upper().startswith(("CPU", "AMX"))
            found.append(Override(pattern, None if on_host or number is None else int(number[1])))
    if flags.flag("cpu-moe", "cmoe"):
        found.append(Override(EXPERTS))
    first = _count(flags, "n-cpu-moe", "ncmoe") or 0
    found += [Override(rf"blk\.{i}{EXPERTS}") for i in range(min(first, 1024))]
    return tuple(found)


EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Names of the tensors that hold the experts of a layer."""


def _cache_ram(flags: BackendParameters) -> int:
    mebibytes = flags.integer("cache-ram", "cram")
    if mebibytes is None or mebibytes < 0:
        return CACHE_RAM * 1024**2
    return min(mebibytes, LARGEST) * 1024**2


def _cache_type(flags: BackendParameters, *names: str) -> ElementType:
    raw = flags.text(*names)
    if raw is None:
        return F16
    word = raw.strip().lower()
    if word not in CACHE_TYPES:
        known = ", ".join(CACHE_TYPES)
        raise BadRow(COLUMN, f"--{names[0]} is {word[:40]!r}, which llama.cpp does not know", f"use {known}")
    return BY_NAME[word]


def _count(flags: BackendParameters, *names: str) -> int | None:
    found = flags.integer(*names)
    if found is None:
        return None
    if found > LARGEST:
        raise BadRow(COLUMN, f"--{names[0]} is {found}; llama.cpp takes at most {LARGEST}")
    return max(found, -1)


def _switched_off(flags: BackendParameters, name: str) -> bool:
    """Whether `--no-name` is the last word about it."""
    return flags.has(name, f"no-{name}") and not flags.flag(name)


def _padded(number: int, to: int) -> int:
    return -(-number // to) * to
