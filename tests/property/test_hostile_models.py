"""Models from strangers: whatever the bytes are, the answer is facts or an error that names the file, and
memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.errors import BadRow, ModelUnreadable
from gpustackd.estimate.breakdown import breakdown
from gpustackd.estimate.demand import build_demand
from gpustackd.estimate.evaluate import evaluate
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.sources.formats import bounded_json, config_json, safetensors_header, weight_files
from gpustackd.sources.reader import Reader
from tests.exploring import explored
from tests.fleets import fleet
from tests.safetensors_files import data_bytes, encode
from tests.specs import a_model

MIB = 1024**2
LIMITED = explored(100)

numbers = st.one_of(
    st.integers(-5, 200),
    st.integers(-(2**80), 2**80),
    st.sampled_from([0, 1, 2**31, 2**63, 2**64, -1, 10**30]),
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.floats(allow_nan=True, allow_infinity=True), st.text(max_size=8)
)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
tensors = st.lists(
    st.tuples(st.sampled_from(sorted(safetensors_header.BITS)), st.lists(st.integers(0, 9), max_size=3)),
    max_size=8,
).map(lambda pairs: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(pairs)])


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the error of this model; anything else fails the test."""
    try:
        found = call()
    except ModelUnreadable as e:
        found = e
    assert not isinstance(found, ModelUnreadable) or len(str(found)) < 600
    return found


# -- safetensors headers ------------------------------------------------------------------------------


@LIMITED
@given(st.binary(max_size=300), st.none() | st.integers(0, 2**45))
def test_any_bytes_are_a_header_or_an_error(data: bytes, size: int | None) -> None:
    found = outcome(lambda: safetensors_header.header_length(data[:8], size, "m"))
    assert isinstance(found, ModelUnreadable) or 2 <= found <= safetensors_header.MAX_HEADER
    found = outcome(lambda: safetensors_header.parse(data, size, "m"))
    assert isinstance(found, (ModelUnreadable, safetensors_header.SafetensorsHeader))


@LIMITED
@given(tensors)
def test_what_is_encoded_is_read_back_whole(told: Any) -> None:
    head = encode(told)
    size = len(head) + data_bytes(told)
    found = safetensors_header.parse(head[8:], size, "m")
    assert found.tensors == len(told)
    assert found.header_bytes + found.data_bytes == size
    assert sum(found.bytes_by_dtype.values()) == data_bytes(told)


@LIMITED
@given(tensors.filter(bool), st.data())
def test_a_header_cut_off_anywhere_is_refused(told: Any, data: st.DataObject) -> None:
    body = encode(told)[8:].rstrip()
    cut = data.draw(st.integers(0, len(body) - 1))
    assert isinstance(outcome(lambda: safetensors_header.parse(body[:cut], None, "m")), ModelUnreadable)


entry = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F4", "NEW"]) | scalars,
        "shape": st.lists(numbers, max_size=3) | scalars,
        "data_offsets": st.lists(st.integers(-1, 60), min_size=2, max_size=2) | documents,
    },
)


@LIMITED
@given(st.dictionaries(st.text(max_size=4), entry | documents, max_size=6), st.integers(0, 400))
def test_an_accepted_header_has_tensors_that_lie_inside_the_file_without_overlap(
    told: dict[str, Any], size: int
) -> None:
    body = json.dumps(told).encode()
    found = outcome(lambda: safetensors_header.parse(body, size, "m"))
    if isinstance(found, ModelUnreadable):
        return
    ranges = sorted(tuple(v["data_offsets"]) for k, v in told.items() if k != "__metadata__")
    inside = [(b, e) for b, e in ranges if e > b]
    assert all(0 <= b <= e <= size - 8 - len(body) for b, e in ranges)
    assert all(first[1] <= second[0] for first, second in pairwise(inside))


# -- configurations -----------------------------------------------------------------------------------

KEYS = sorted(
    {k for names in config_json.ALIASES.values() for k in names} | set(config_json.LENGTHS)
    | set(config_json.EXPERTS) | {
        "architectures", "vision_config", "text_config", "llm_config", "thinker_config", "rope_scaling",
        "quantization_config", "torch_dtype", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
        "sliding_window", "layer_types", "sliding_window_pattern", "use_sliding_window", "max_window_layers",
        "hybrid_override_pattern", "attn_layer_indices", "full_attention_interval", "num_experts_per_tok",
        "moe_intermediate_size", "num_kv_shared_layers", "quantize", "model_type", "auto_map",
    }
)  # fmt: skip
flat = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 300) | documents, max_size=10)
configs = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 300) | documents | flat, max_size=12)


@LIMITED
@given(configs)
@example(
    {
        "num_attention_heads": 2**40,
        "num_hidden_layers": 2**40,
        "head_dim": 2**40,
        "num_key_value_heads": 2**40,
    }
)
@example({"rope_scaling": {"type": "yarn", "factor": 1e308, "original_max_position_embeddings": 1e308}})
@example({"rope_scaling": {"type": "linear", "factor": float("nan")}})
@example({"max_position_embeddings": float("inf")})
def test_any_configuration_gives_dimensions_or_an_error_and_estimates_follow(config: dict[str, Any]) -> None:
    hyper = outcome(lambda: config_json.hyper_parameters(config))
    if isinstance(hyper, ModelUnreadable):
        assert not hyper.retryable
        return
    for size in (hyper.num_hidden_layers, hyper.hidden_size, hyper.vocab_size, hyper.num_attention_heads):
        assert size is None or 0 < size <= config_json.LARGEST
    assert 1 <= hyper.max_sequence_length <= config_json.LARGEST or hyper.max_sequence_length == 0
    facts = ModelFacts(weight_bytes=10**9, config=config, hyper=hyper)
    for backend in ("vLLM", "SGLang", "MindIE", "Custom"):
        spec = a_model(backend=backend)
        need = build_demand(spec, facts).need
        assert need.vram is None or 0 <= need.vram < 2**63
        assert json.dumps(breakdown(spec, facts).as_json())
        evaluate(spec, facts)


@LIMITED
@given(st.binary(max_size=400))
def test_any_bytes_are_a_document_or_an_error(data: bytes) -> None:
    outcome(lambda: bounded_json.parse_object(data, "config.json"))


@LIMITED
@given(st.lists(st.text(max_size=40), max_size=6), st.sampled_from(["vLLM", "SGLang", "MindIE", "Custom"]))
@example(["--max-model-len", "99999999999999999999k"], "vLLM")
@example(["--tensor-parallel-size=-1"], "vLLM")
@example(["--hf-overrides={"], "vLLM")
@example(['--served-model-name "a\nb'], "SGLang")
def test_any_parameters_give_a_decision_or_an_error_of_the_row(parameters: list[str], backend: str) -> None:
    facts = ModelFacts(weight_bytes=10**9, hyper=config_json.hyper_parameters({"num_attention_heads": 8}))
    spec = a_model(backend=backend, backend_parameters=parameters)
    evaluate(spec, facts)
    answer: Any = None
    try:
        wanted = build_demand(spec, facts)
        on = fleet("1x4xA-80 + 1x4xN-64[type=cann]")
        answer = decide(on, wanted, Subject(1, "x"), Policy())
    except BadRow as e:
        answer = e
    assert isinstance(answer, (Placed, NoFit)) or answer.field == "backend_parameters"


@LIMITED
@given(documents)
def test_any_model_index_is_a_pipeline_or_is_not(document: Any) -> None:
    weight_files.is_diffusers_index(document)
    outcome(lambda: weight_files.components_of(document))


@LIMITED
@given(st.dictionaries(st.text(max_size=4), st.text(max_size=12) | scalars, max_size=4))
def test_an_index_never_names_a_file_elsewhere(weight_map: dict[str, Any]) -> None:
    names = outcome(lambda: weight_files.names_in_index({"weight_map": weight_map}, "i"))
    if not isinstance(names, ModelUnreadable):
        assert all("/" not in n and n not in {"", ".", ".."} for n in names)


# -- whole directories --------------------------------------------------------------------------------


@explored(40)
@given(
    st.dictionaries(
        st.sampled_from(["config.json", "model.safetensors", "model.safetensors.index.json",
                         "model_index.json", "pytorch_model.bin", "model-00001-of-00002.safetensors"]),
        st.binary(max_size=64) | documents.map(lambda d: json.dumps(d).encode()), max_size=5,
    ),
    st.sampled_from(["vLLM", "Custom"]),
)  # fmt: skip
def test_any_directory_gives_facts_or_an_error(files: dict[str, bytes], backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        spec = a_model(source="local_path", local_path=folder, backend=backend)

        async def read() -> ModelFacts:
            async with Reader() as reader:
                return await reader.facts(spec)

        facts = outcome(lambda: asyncio.run(read()))
        if isinstance(facts, ModelFacts):
            assert facts.weight_bytes is None or facts.weight_bytes >= 0
            assert facts.weight_bytes is not None or facts.unknown_because


# -- memory -------------------------------------------------------------------------------------------

JUNK = {
    "ten megabytes of brackets": b"[" * 10_000_000,
    "empty lists": b'{"a":[' + b"[]," * 3_300_000 + b"[]]}",
    "empty objects": b'{"a":[' + b"{}," * 3_300_000 + b"{}]}",
    "numbers": b'{"a":[' + b"1," * 4_900_000 + b"1]}",
    "one number": b'{"a":' + b"1" * 9_999_000 + b"}",
    "one string": b'{"a":"' + b"x" * 9_999_000 + b'"}',
    "keys": b"{" + b",".join(b'"k%d":1' % i for i in range(800_000)) + b"}",
    "deep objects": b'{"a":' * 2_000_000,
    "noise": bytes(range(256)) * 39_062,
}


@pytest.mark.parametrize("what", JUNK)
def test_ten_megabytes_of_junk_take_little_memory_as_a_config_and_as_a_header(what: str) -> None:
    data = JUNK[what]
    assert len(data) > 9_000_000
    tracemalloc.start()
    try:
        outcome(lambda: config_json.hyper_parameters(bounded_json.parse_object(data, "config.json")))
        outcome(lambda: safetensors_header.parse(data, None, "model.safetensors"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB


def test_a_large_header_of_true_tensors_is_read_entry_by_entry() -> None:
    told = [(f"model.layers.{i}.mlp.experts.{i}.down_proj.weight", "BF16", [7, 9]) for i in range(40_000)]
    head = encode(told)
    tracemalloc.start()
    try:
        found = safetensors_header.parse(head[8:], None, "model.safetensors")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.tensors == 40_000
    assert peak < 5 * len(head)
