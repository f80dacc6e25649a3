"""Compute buffers of every device for a division of the layers: a pass is laid out and its peaks are taken.

Layers of one kind need the same, so that a pass over a few of each stands for all; divisions that differ in
nothing else share one result.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpustackd.domain.gguf_facts import F32, GgufFacts
from gpustackd.engines.llama_cpp.flags import LlamaServing
from gpustackd.estimate.llama_cpp.architecture import Dimensions
from gpustackd.estimate.llama_cpp.graph.allocate import peaks
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass, TensorDevices, Workload
from gpustackd.estimate.llama_cpp.graph.networks import is_known, network_of
from gpustackd.estimate.llama_cpp.graph.schedule import COPIES, split_over_devices
from gpustackd.estimate.llama_cpp.graph.upper_bound import bounded_buffers
from gpustackd.estimate.llama_cpp.memory import ubatch_of, window_cells
from gpustackd.estimate.llama_cpp.tensors import ModelTensors

KEPT = 512
SOME = 3
"""Layers of one kind that stand for all on a device."""
SHALLOW = 16
"""Layers of a network of several kinds that are all laid out, since few of them are alike."""


def workload_of(dims: Dimensions, serving: LlamaServing) -> Workload:
    """The largest pass that llama.cpp makes room for."""
    tokens = min(serving.cells, ubatch_of(dims, serving))
    batch = min(serving.cells, serving.batch) if dims.causal else serving.batch
    rows = serving.outputs or (batch if serving.embeddings else serving.parallel)
    outputs = min(tokens, rows)
    tokens = -(-tokens // serving.parallel) * serving.parallel
    return Workload(
        tokens=tokens,
        sequences=serving.parallel,
        outputs=outputs,
        flash=serving.flash_attention != "off",
        streams=serving.streams,
        cells=serving.sequence_cells,
        window_cells=window_cells(dims, serving),
        cache_k=serving.cache_k,
        cache_v=serving.cache_v,
        embeddings=serving.embeddings,
        slots=serving.parallel,
    )


class ComputeBuffers:
    """Compute buffers of one model under one set of flags."""

    def __init__(
        self, facts: GgufFacts, dims: Dimensions, tensors: ModelTensors, serving: LlamaServing
    ) -> None:
        self._facts = facts
        self._dims = dims
        self._tensors = tensors
        self._serving = serving
        self._load = workload_of(dims, serving)
        self._network = network_of(facts)
        self._moved = _moved(tensors, serving)
        self._kinds = _kinds(dims, tensors, self._moved)
        self._shallow = self._dims.layers <= SHALLOW and len(set(self._kinds)) > 1
        self._kept: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.warnings: tuple[str, ...] = ()
        self._known = is_known(facts)
        if not self._known:
            self.warnings = (_unknown(facts, ""),)

    def of(self, places: Sequence[int], devices: int) -> tuple[int, ...]:
        """Bytes on each device and, last, on the host. `places`: device of each block and of the output."""
        order, here, output, groups = self._short(places, devices)
        full = all(p != devices for p in places)
        pipelined = self.pipelined(places, devices)  # also where one of them holds everything
        key = (tuple(self._kinds[i] for i in order), tuple(here), output, full, pipelined)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = self._kept[key] = self._laid_out(
                order, here, output, max(groups, default=-1) + 1, pipelined=pipelined
            )
        host = found[-1]
        return (*(found[g] if g >= 0 else 0 for g in groups), host)

    def pipelined(self, places: Sequence[int], devices: int) -> bool:
        """Whether several batches are under way at once: everything is on devices, and there are several."""
        serving = self._serving
        free = serving.offload_cache and serving.whole_split and not serving.overrides
        return devices > 1 and free and all(p != devices for p in places)

    @property
    def activation_copies(self) -> int:
        """Bytes of what goes from layer to layer, as often as inputs are held; 0 where no norm is first."""
        normed = "attn_norm.weight" in self._tensors.layers[0] if self._tensors.layers else False
        return COPIES * F32.size * self._dims.embedding * self._load.tokens if normed else 0

    def _short(self, places: Sequence[int], devices: int) -> tuple[list[int], list[int], int, list[int]]:
        """Layers that stand for all, their devices under new numbers, the output's, and for each device of
        the question the number under which it was looked at (-1: it holds nothing)."""
        runs: list[tuple[int, list[int]]] = []
        for i in range(self._dims.layers):
            if not runs or runs[-1][0] != places[i]:
                runs.append((places[i], []))
            runs[-1][1].append(i)
        output = places[-1]
        seen: dict[tuple[object, ...], int] = {}
        number: dict[int, int] = {}
        order: list[int] = []
        here: list[int] = []
        on_devices = [r for r in runs if r[0] != devices]
        for place, run in runs:
            few = run if self._shallow else _standing_for(run, self._kinds)
            if place == devices:
                order += few
                here += [-1] * len(few)
                continue
            inner = on_devices.index((place, run)) not in {0, len(on_devices) - 1} and place != output
            signature = tuple(self._kinds[i] for i in few)
            if inner and signature in seen:
                number[place] = seen[signature]
                continue
            number.setdefault(place, len(set(number.values())))
            if inner:
                seen[signature] = number[place]
            order += few
            here += [number[place]] * len(few)
        if output != devices and output not in number:
            number[output] = len(set(number.values()))
        groups = [number.get(d, -1) for d in range(devices)]
        return order, here, number.get(output, -1), groups

    def _laid_out(
        self, order: Sequence[int], here: Sequence[int], output: int, devices: int, *, pipelined: bool
    ) -> tuple[int, ...]:
        host = devices
        at = [host if h < 0 else h for h in here]
        layers = [host] * self._dims.all_layers
        for i, place in zip(order, at, strict=True):
            layers[i] = place
        on_host = not self._serving.offload_cache
        homes = TensorDevices(
            layers=layers,
            caches=[host] * len(layers) if on_host else layers,
            output=host if output < 0 else output,
            host=host,
            full=output >= 0 and all(h >= 0 for h in here),
            cache_on_host=on_host,
            moved={
                name: host if device is None else min(device, host) for name, device in self._moved.items()
            },
        )
        copies = COPIES if pipelined else 1
        a_pass = ForwardPass(self._facts, self._dims, self._tensors, self._load, homes, order)
        try:
            self._network(a_pass)
        except (KeyError, ZeroDivisionError) as e:
            return self._bounded(order, at, homes.output, devices, str(e), copies=copies)
        found = tuple(peaks(split_over_devices(a_pass.tape, host, pipelined=pipelined), devices + 1))
        if self._known:
            return found
        bound = self._bounded(order, at, homes.output, devices, "", copies=copies)
        return tuple(map(max, found, bound))

    def _bounded(
        self, order: Sequence[int], at: Sequence[int], output: int, devices: int, lacking: str, *, copies: int
    ) -> tuple[int, ...]:
        """For a network that is not laid out like any known one."""
        self.warnings = (_unknown(self._facts, lacking),)
        layers: list[list[int]] = [[] for _ in range(devices + 1)]
        for layer, place in zip(order, at, strict=True):
            layers[place].append(layer)
        return bounded_buffers(
            self._facts,
            self._dims,
            self._tensors,
            self._load,
            layers,
            output,
            copies=copies,
            cache_on_host=not self._serving.offload_cache,
        )


def _unknown(facts: GgufFacts, lacking: str) -> str:
    because = f" ({lacking[:60]})" if lacking else ""
    said = f"the network of architecture {facts.architecture} is not known{because}"
    return f"{said}: its compute buffers are bounded, not exact"


def _standing_for(run: Sequence[int], kinds: Sequence[int]) -> list[int]:
    """A few layers of a run of neighbours on one device that need what all of them need: some of each kind,
    in turns, since kinds that take turns hold each other's masks; and its last one. Until the gaps of the
    buffer repeat takes up to three layers; from then on they may depend on whether the number is even."""
    first: dict[int, list[int]] = {}
    for i in run:
        met = first.setdefault(kinds[i], [])
        if len(met) < SOME:
            met.append(i)
    few = [met[turn] for turn in range(SOME) for met in first.values() if turn < len(met)]
    few = [*(i for i in few if i != run[-1]), run[-1]]
    if (len(run) - len(few)) % 2:
        few.insert(-1, next(i for i in run if i not in few))
    return few


def _moved(tensors: ModelTensors, serving: LlamaServing) -> dict[str, int | None]:
    """Tensors that a flag puts elsewhere: name -> device, None for the host."""
    if not serving.overrides:
        return {}
    found: dict[str, int | None] = {}
    patterns = [(o.compiled, o.device) for o in serving.overrides]
    for layer in tensors.layers:
        for tensor in layer.values():
            for pattern, device in patterns:
                if pattern.search(tensor.name):
                    found[tensor.name] = device
                    break
    return found


def _kinds(dims: Dimensions, tensors: ModelTensors, moved: dict[str, int | None]) -> list[int]:
    """A number per layer, equal for layers that need the same."""
    numbers: dict[object, int] = {}
    found = []
    for i in range(dims.all_layers):
        shapes = frozenset((name, t.shape, moved.get(t.name, -1)) for name, t in tensors.layers[i].items())
        key = (shapes, dims.windowed[i], dims.recurrent[i], dims.cached[i], dims.heads[i], dims.kv_heads[i])
        found.append(numbers.setdefault(key, len(numbers)))
    return found
