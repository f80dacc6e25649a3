"""Demands of GGUF models: with the sizes that a case gives, or sized by a header that it names."""

from __future__ import annotations

from typing import Any

from gpustackd.domain.demand import Demand, Engine, Need
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.gguf_levels import GgufNeed, Level, Share
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.estimate.demand import build_demand
from tests import gguf_files
from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.oracles import layers
from tests.gpustack_reference.oracles.gguf_places import header_name


class CaseSizes:
    """Levels of a model out of the layers that a case gives."""

    def __init__(self, model: layers.LayerModel) -> None:
        self._model = model

    @property
    def total_layers(self) -> int:
        return self._model.total_layers

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        return self._model.adds

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> tuple[Level, ...]:
        return tuple(self.level(n, split, remotes) for n in range(self.total_layers + 1))

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        model = self._model
        counts = layers.shared_out(split or (1.0,), offload_layers)
        own = model.devices(counts, remotes=remotes)
        pooled = model.devices(counts, [True] * len(counts), remotes)
        full = offload_layers == model.total_layers
        shares, left = [], sum(counts)
        for count, vram, unified in zip(counts, own, pooled, strict=True):
            left -= count
            has_output = bool(count) and not left
            shares.append(Share(count - has_output, vram, unified))
        return Level(
            offload_layers, tuple(shares), model.ram[offload_layers], model.ram_unified[offload_layers], full
        )


def given_sizes(spec: ModelSpec, facts: ModelFacts, case: Case) -> Demand:
    """A demand with the sizes that the case gives."""
    return of_model(spec, facts, layers.of_case(case), case["model"].get("distributable", True))


def of_model(
    spec: ModelSpec, facts: ModelFacts, model: layers.LayerModel, distributable: bool = True
) -> Demand:
    """A demand of a model of these layers."""
    sizes = CaseSizes(model)
    full = sizes.level(sizes.total_layers)
    need = Need(full.devices[0].vram, 0, full.ram)
    return Demand(spec, facts, need, Engine.GGUF, str(hash(model)), GgufNeed(sizes, distributable))


def by_header(spec: ModelSpec, case: Case) -> Demand:
    """A demand that is sized as the daemon does it, by the header of the file that the case names."""
    return build_demand(spec, ModelFacts(0, categories=("llm",), gguf=header_of(case), digest=case["id"]))


def header_of(case: Case) -> GgufFacts:
    """What reading the file would say: its keys, with vocabularies of their true lengths, and its tensors."""
    entry = cases.fixture("gguf-metadata.json", "files", header_name(case), "model.gguf_metadata_fixture")
    values = {k: _value(v) for k, v in entry["kv"].items()}
    tensors = [(name, shape, kind) for name, shape, kind in entry["tensors"]]
    head = gguf_files.Writer().head(values, tensors)
    return gguf_files.facts_of(gguf_files.read(head, gguf_files.file_bytes(head, tensors)))


def _value(value: Any) -> Any:
    """A key's value; of an array that is given by its length so many short strings."""
    if isinstance(value, dict):
        return [str(n) for n in range(value["array_len"])]
    return value
