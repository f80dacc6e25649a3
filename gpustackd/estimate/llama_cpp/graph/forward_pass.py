"""One forward pass under construction: the tape, the sizes of the network, and where its weights and caches
lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gpustackd.domain.gguf_facts import F16, F32, I32, I64, TYPES, ElementType, GgufFacts, GgufTensor
from gpustackd.estimate.llama_cpp.architecture import Dimensions
from gpustackd.estimate.llama_cpp.graph.tape import Node, Tape, new_input, new_stored, pointwise
from gpustackd.estimate.llama_cpp.tensors import ModelTensors


@dataclass(frozen=True, slots=True)
class Workload:
    """What one pass has to do: tokens, sequences, rows of logits; cells and element types of the cache."""

    tokens: int
    sequences: int
    outputs: int
    flash: bool
    streams: int
    cells: int
    window_cells: int
    cache_k: ElementType = F16
    cache_v: ElementType = F16
    embeddings: bool = False
    slots: int = 1
    """Sequences whose states are held."""


@dataclass(frozen=True, slots=True)
class TensorDevices:
    """Devices by number, the host being the last: of each layer's weights, its cache, and the output."""

    layers: Sequence[int]
    caches: Sequence[int]
    output: int
    host: int
    full: bool
    """Everything is on devices: each layer's norms are held to the layer's device then."""
    cache_on_host: bool = False
    moved: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Tensors that a flag puts elsewhere."""


class ForwardPass:
    """A pass over some layers. `order` names them; the last layer of the network has to be among them."""

    def __init__(
        self,
        facts: GgufFacts,
        dims: Dimensions,
        tensors: ModelTensors,
        load: Workload,
        homes: TensorDevices,
        order: Sequence[int],
    ) -> None:
        self.facts = facts
        self.dims = dims
        self.tensors = tensors
        self.load = load
        self.homes = homes
        self.order = order
        self.tape = Tape()
        self.last = order[-1] if order else -1
        self._weights: dict[tuple[str, int], Node] = {}
        self._inputs: dict[str, Node] = {}
        self._caches: dict[tuple[str, int], Node] = {}
        self.looks: dict[str, Node] = {}
        """Views that several layers share."""

    # -- what is given ---------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens of the pass, over all sequences."""
        return self.load.tokens

    def input(self, name: str, elem: ElementType, *ne: int) -> Node:
        """An input by name, made at its first use."""
        if name not in self._inputs:
            self._inputs[name] = new_input(elem, *ne)
        return self._inputs[name]

    @property
    def positions(self) -> Node:
        """Position numbers of the tokens."""
        return self.input("positions", I32, self.tokens * self.dims.positions)

    @property
    def temperatures(self) -> Node:
        """A factor for the queries of each token."""
        return self.input("temperatures", F32, 1, 1, self.tokens)

    @property
    def output_ids(self) -> Node:
        """Which tokens logits are asked for."""
        return self.input("output ids", I32, self.load.outputs)

    def mask(self, windowed: bool) -> Node:
        """Which cells each token sees; as narrow as the attention kernel takes it."""
        cells = self.load.window_cells if windowed else self.load.cells
        streams = self.load.streams
        elem = F16 if self.load.flash else F32
        return self.input(f"mask {windowed}", elem, cells, self.tokens // streams, 1, streams)

    def cell_ids(self, which: str, windowed: bool, count: int) -> Node:
        """Where new keys or values are written."""
        return self.input(f"{which} ids {windowed}", I64, count)

    # -- what is stored ----------------------------------------------------------------------------------

    def has(self, layer: int, name: str) -> bool:
        """Whether a layer has this tensor."""
        return name in self.tensors.layers[layer]

    def weight(self, layer: int, name: str) -> Node:
        """A tensor of a layer. Raise KeyError where it has none."""
        key = (name, layer)
        if key not in self._weights:
            tensor = self.tensors.layers[layer][name]
            home = self.homes.moved.get(tensor.name, self.homes.layers[layer])
            self._weights[key] = new_stored(_elem(tensor), tensor.shape, home)
        return self._weights[key]

    def maybe(self, layer: int, name: str) -> Node | None:
        """A tensor of a layer, or None."""
        return self.weight(layer, name) if name in self.tensors.layers[layer] else None

    def other(self, name: str, home: int) -> Node | None:
        """A tensor outside the layers, or None."""
        tensor = self.tensors.others.get(name)
        if tensor is None:
            return None
        key = (name, -1 - home)
        if key not in self._weights:
            self._weights[key] = new_stored(_elem(tensor), tensor.shape, self.homes.moved.get(name, home))
        return self._weights[key]

    def maybe_factors(self, layer: int) -> Node | None:
        """Factors of the rotation by position, a copy on the device of each layer."""
        home = self.homes.layers[layer]
        for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
            if (found := self.other(name, home)) is not None:
                return found
        return None

    @property
    def table(self) -> Node:
        """The token embeddings, always on the host."""
        found = self.other("token_embd.weight", self.homes.host)
        if found is None:
            found = new_stored(F16, (self.dims.embedding, self.dims.vocabulary), self.homes.host)
            self._weights["token_embd.weight", -1 - self.homes.host] = found
        return found

    @property
    def head(self) -> Node:
        """The output matrix; where there is none, a second copy of the token embeddings."""
        found = self.other("output.weight", self.homes.output)
        if found is None:
            table = self.table
            key = ("head", 0)
            if key not in self._weights:
                self._weights[key] = new_stored(table.elem, table.ne, self.homes.output)
            found = self._weights[key]
        return found

    def cache(self, which: str, layer: int, elem: ElementType, *ne: int) -> Node:
        """Part of the cache or state of a layer."""
        key = (which, layer)
        if key not in self._caches:
            self._caches[key] = new_stored(elem, ne, self.homes.caches[layer], weight=False)
        return self._caches[key]

    # -- norms -------------------------------------------------------------------------------------------

    def norm(
        self, x: Node, weight: Node | None, bias: Node | None = None, *, layer: int = -1, rms: bool = True
    ) -> Node:
        """Normalise each row, then scale and shift. Held to the layer's device where the whole model is on
        devices, so that it does not wander to the one before."""
        x = pointwise(x) if rms else Node(x.elem, x.ne, (x,))
        if (weight is not None or bias is not None) and layer >= 0 and (self.homes.full or self.tokens < 32):
            x.pin = self.homes.layers[layer]
        if weight is not None:
            x = pointwise(x, weight)
        if bias is not None:
            x = pointwise(x, bias)
        return x

    def layer_norm(self, x: Node, layer: int, name: str, *, rms: bool = True) -> Node:
        """The norm of a layer with that name; none where it has no such tensors."""
        weight, bias = self.maybe(layer, f"{name}.weight"), self.maybe(layer, f"{name}.bias")
        if weight is None and bias is None:
            return x
        return self.norm(x, weight, bias, layer=layer, rms=rms)


def _elem(tensor: GgufTensor) -> ElementType:
    return TYPES.get(tensor.type, F16)
