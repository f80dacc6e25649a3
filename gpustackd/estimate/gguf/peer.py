"""The peer's estimate of a GGUF model, for comparison: the compatibility mode of `gguf_need`.

Rules: estimate-gguf spec sections 4 to 9, the columns REF, with what the peer passes (section 14). They
deviate from what llama.cpp allocates in known ways; nothing here is used outside compatibility mode. Bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from gpustackd.domain.gguf_facts import GgufFacts, GgufTensor
from gpustackd.domain.gguf_levels import Level, Share
from gpustackd.estimate.gguf.architecture import is_causal
from gpustackd.estimate.gguf.beside import projector_bytes
from gpustackd.estimate.gguf.peer_compute import Sizing, attention, feed_forward, graph_footprint, input_bytes
from gpustackd.estimate.gguf.peer_flags import MIB, PeerFlags

_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID = frozenset({"jamba", "falcon-h1", "granitehybrid"})
_WINDOWED = {"llama4": (4, 8192), "gemma2": (2, 4096), "gemma3": (6, 0), "cohere2": (4, 4096)}
_OUTPUT = ("cls.", "output.", "output_", "rope_factors_")
_INPUT = ("position_", "token_")


class PeerSizes:
    """A `gguf_levels.Sizes` by the peer's rules."""

    def __init__(self, facts: GgufFacts, flags: PeerFlags) -> None:
        self._facts = facts
        self._flags = flags
        self._blocks = facts.integer("block_count") or len(
            {t.name.split(".")[1] for t in facts.tensors if t.name.startswith("blk.")}
        )
        self._causal = is_causal(facts) and facts.integer("pooling_type") <= 2
        self._groups, self._inputs, self._outputs = _sorted(facts.tensors)
        self._moved = sum(t.size for t in facts.tensors if self._is_moved(t))
        self._size = self._sizing()

    @property
    def total_layers(self) -> int:
        """Blocks and the output."""
        return self._blocks + 1

    @property
    def layer_bytes(self) -> Sequence[int]:
        """Weights and cache of each entry of the peer's list of layers, the output last."""
        layers = [self._weights(group) + self._cache(i) for i, group in enumerate(self._groups)]
        return (*layers[-self._blocks :], self._output_weights())

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> Sequence[Level]:
        """All levels by their number; the last one is full."""
        return tuple(self.level(n, split, remotes) for n in range(self.total_layers + 1))

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        """One level. The first `remotes` devices are remote ones."""
        shares = tuple(map(float, split)) or (1.0,)
        full = offload_layers > self._blocks
        count = min(offload_layers, self._blocks)
        first = len(self._groups) - count
        devices: list[list[int]] = [[] for _ in shares]
        bounds = [x / sum(shares) for x in accumulate(shares)]
        for i in range(first, len(self._groups)):
            at = bisect_right(bounds, (i - first) / (count + full))
            devices[min(at, len(shares) - 1)].append(i)
        where = max((d for d, held in enumerate(devices) if held), default=0) if full else -1
        stays = self._blocks - count
        made = [
            self._device(held, d, remotes, output=d == where, stays=stays, several=len(shares) > 1)
            for d, held in enumerate(devices)
        ]
        ram = self._host(first, full=full, offloaded=count > 0)
        platform = self._flags.host_platform
        return Level(
            offload_layers if not full else self.total_layers, tuple(made), ram + platform, ram, full
        )

    # -- devices ------------------------------------------------------------------------------------------

    def _device(
        self, held: Sequence[int], number: int, remotes: int, *, output: bool, stays: int, several: bool
    ) -> Share:
        local = number - remotes
        weights = sum(self._weights(self._groups[i]) for i in held)
        cache = sum(self._cache(i) for i in held) if self._flags.offload_cache else 0
        if output:
            weights += self._output_weights()
        footprint = self._output_rows() if output else 0
        if local == 0 and self._facts.projector is not None:
            footprint += projector_bytes(self._facts.projector, flash=self._flags.flash)
        rows = self._output_rows() if output else 0
        compute = self._compute(rows, stays=stays, local=local == 0, several=several and not remotes)
        own = self._flags.device_platform + footprint + weights + cache + compute
        if local > 0 and not held:
            own -= weights + compute
        unified = footprint + weights + cache
        if self._flags.mmap:
            unified -= weights
            if local < 0 or (local > 0 and held):
                unified += weights
        return Share(len(held), own, unified)

    def _compute(self, rows: int, *, stays: int, local: bool, several: bool) -> int:
        """Buffers of a pass. `stays`: blocks in RAM; `local`: the first device that is no remote one."""
        size, one = self._size, self._one_cache()
        given = input_bytes(size, host=False)
        if self._flags.old:
            given = given + 4 * size.tokens if stays < self._blocks else 0
            return given + max(attention(size, one, partly=True), feed_forward(size), rows)
        if several:
            given *= 2 if size.experts else 4
        found = max(attention(size, one, partly=stays > 0), feed_forward(size))
        return given + max(found + (one if local and stays > 1 else 0), rows)

    # -- the host -----------------------------------------------------------------------------------------

    def _host(self, first: int, *, full: bool, offloaded: bool) -> int:
        """RAM without the platform's part."""
        facts = self._facts
        footprint = 5 * MIB + facts.metadata_bytes + 96 * facts.lengths.get("tokenizer.ggml.tokens", 0)
        if facts.text("tokenizer.ggml.model") == "gpt2":
            footprint += 104 * facts.lengths.get("tokenizer.ggml.merges", 0)
        if not full:
            footprint += self._output_rows()
        weights = sum(self._weights(group) for group in self._groups[:first])
        weights += sum(t.size for t in self._inputs) + self._output_weights(tied=False) + self._moved
        kept = range(first) if self._flags.offload_cache else range(len(self._groups))
        cache = sum(self._cache(i) for i in kept)
        compute = self._one_cache()
        if offloaded and not self._flags.old:
            compute += feed_forward(self._size)
        if not full:
            compute = max(compute, self._output_rows())
        compute += graph_footprint(len(facts.tensors), self._blocks) + input_bytes(self._size, host=True)
        ram = footprint + cache + compute
        if not self._flags.mmap and not full:
            ram += weights
        if full and not self._flags.mmap:
            ram += self._output_weights(tied=False) + self._moved
        return ram

    # -- parts --------------------------------------------------------------------------------------------

    def _weights(self, group: Sequence[GgufTensor]) -> int:
        return sum(t.size for t in group if not self._is_moved(t))

    def _is_moved(self, tensor: GgufTensor) -> bool:
        return any(p.search(tensor.name) for p in self._flags.overrides)

    def _output_weights(self, *, tied: bool = True) -> int:
        size = sum(t.size for t in self._outputs if not self._is_moved(t))
        if tied and not any(t.name == "output.weight" for t in self._outputs):
            size += sum(t.size for t in self._inputs if t.name == "token_embd.weight")
        return size

    def _output_rows(self) -> int:
        rows = 1 if self._flags.old else self._size.tokens
        width = self._size.embedding + (self._facts.vocabulary if self._causal else 0)
        return 4 * rows * width

    def _cache(self, entry: int) -> int:
        """Cache and state of one entry of the list of layers."""
        facts, size = self._facts, self._size
        block = entry - (len(self._groups) - self._blocks)
        if not self._causal or block < 0:
            return 0
        state = 4 * self._flags.slots * (size.conv_state + size.state)
        if facts.architecture in _RECURRENT:
            return state
        if facts.architecture not in _HYBRID:
            state = 0
        return state + self._cells_bytes(self._cells(block))

    def _cells(self, block: int) -> int:
        period, window = _WINDOWED.get(self._facts.architecture, (0, 0))
        window = self._facts.integer("attention.sliding_window", window)
        if not period or not window or self._flags.full_windows or block % period == 0:
            return self._size.cells
        asked = window * self._flags.slots + self._flags.batch
        return min(self._size.cells, _padded(asked, 256 if self._flags.flash else 32))

    def _cells_bytes(self, cells: int) -> int:
        size, flags = self._size, self._flags
        k = flags.cache_k.bytes_of(size.key) * cells * size.kv_heads
        return k + flags.cache_v.bytes_of(size.value) * cells * size.kv_heads

    def _one_cache(self) -> int:
        if not self._causal or self._facts.architecture in _RECURRENT:
            return 0
        return self._cells_bytes(self._size.cells)

    def _sizing(self) -> Sizing:
        facts, flags = self._facts, self._flags
        context = flags.context
        if not self._causal:
            context = min(context, facts.integer("context_length") or context)
        cells = _padded(context, 256 if flags.flash else 32)
        embedding = facts.integer("embedding_length")
        heads = facts.integer("attention.head_count") or 1
        groups, state, inner = (
            facts.integer(f"ssm.{k}") for k in ("group_count", "state_size", "inner_size")
        )
        conv = max(facts.integer("ssm.conv_kernel") - 1, 0) * (inner + 2 * groups * state)
        state *= inner
        if "rwkv" in facts.architecture:
            conv = facts.integer("token_shift_count", 2) * embedding
            state = facts.integer("wkv.head_size") * embedding
        mla = facts.value("attention.key_length_mla") and facts.value("attention.value_length_mla")
        suffix = "_mla" if mla else ""
        return Sizing(
            tokens=min(context, flags.ubatch) if self._causal else context,
            cells=cells,
            embedding=embedding,
            heads=heads,
            kv_heads=facts.integer("attention.head_count_kv", heads),
            key=facts.integer(f"attention.key_length{suffix}", embedding // heads),
            value=facts.integer(f"attention.value_length{suffix}", embedding // heads),
            experts=facts.integer("expert_count"),
            used=facts.integer("expert_used_count"),
            slots=flags.slots,
            flash=flags.flash and facts.architecture != "grok",
            conv_state=conv,
            state=state,
            inner=inner,
            recurrent=facts.architecture in _RECURRENT,
            last={t.name.split(".", 2)[2].removesuffix(".weight"): t for t in self._last() if "." in t.name},
        )

    def _last(self) -> Sequence[GgufTensor]:
        """Tensors of the last layer, which stand for all."""
        blocks = [g for g in self._groups if g[0].name.startswith("blk.")]
        return blocks[-1] if blocks else ()


def _sorted(
    tensors: Sequence[GgufTensor],
) -> tuple[list[list[GgufTensor]], list[GgufTensor], list[GgufTensor]]:
    """Layers in the order of the file (any tensor of no class is one), inputs, outputs."""
    groups: dict[str, list[GgufTensor]] = {}
    inputs, outputs = [], []
    for tensor in tensors:
        if tensor.name.startswith(_INPUT):
            inputs.append(tensor)
        elif tensor.name.startswith(_OUTPUT):
            outputs.append(tensor)
        else:
            parts = tensor.name.split(".")
            key = ".".join(parts[:2]) if parts[0] == "blk" else tensor.name
            groups.setdefault(key, []).append(tensor)
    return list(groups.values()), inputs, outputs


def _padded(number: int, to: int) -> int:
    return -(-number // to) * to
