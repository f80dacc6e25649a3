"""With which flags llama-server runs a model: names, defaults, what it would refuse."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.llama_cpp.flags import LlamaServing, serving_of
from gpustackd.errors import BadRow
from gpustackd.estimate.llama_cpp.need import sizer_of
from gpustackd.estimate.llama_cpp.refusal import LlamaRefusal
from tests.gguf_truth import headers


def serving(*flags: str, architecture: str = "llama", **values: Any) -> LlamaServing:
    told = {f"{architecture}.context_length": 131072, f"{architecture}.block_count": 32}
    told |= {f"{architecture}.{k}": v for k, v in values.items()}
    return serving_of(GgufFacts(architecture, values=told), parse_flags(flags))


def test_without_flags_a_model_is_sized_for_8192_tokens_and_four_slots_that_share_one_cache() -> None:
    found = serving()
    assert (found.context, found.parallel, found.unified, found.cells) == (8192, 4, True, 8192)
    assert (found.batch, found.ubatch, found.flash_attention) == (2048, 512, "auto")
    assert (found.cache_k.name, found.cache_v.name) == ("F16", "F16")
    assert found.cache_ram == 8 * 1024**3


def test_a_shorter_trained_context_is_the_default_and_zero_asks_for_the_trained_one() -> None:
    assert serving(context_length=2048).context == 2048
    assert serving("--ctx-size=0").context == 131072
    assert serving("-c", "65535", context_length=32768).context == 65535


@pytest.mark.parametrize(
    ("flags", "cells", "streams"),
    [
        (["--parallel=4"], 8192, 4),
        (["-np", "3"], 3 * 2816, 3),  # 8192 / 3, up to a multiple of 256
        (["--parallel=4", "--kv-unified"], 8192, 1),
        (["--parallel=4", "--kv-unified", "--no-kv-unified"], 8192, 4),
        (["--no-kv-unified"], 8192, 4),
        (["--parallel=-1"], 8192, 1),
        (["--ctx-size=1000"], 1024, 1),
    ],
)
def test_cells_of_the_cache_follow_slots_and_sharing(flags: list[str], cells: int, streams: int) -> None:
    found = serving(*flags)
    assert (found.cells, found.streams) == (cells, streams)


def test_the_last_of_a_repeated_flag_counts_under_any_of_its_names() -> None:
    assert serving("--ctx-size=1024", "-c", "4096").context == 4096
    assert serving("-fa off", "--flash-attn on").flash_attention == "on"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-fa"], "on"), (["--flash-attn=off"], "off"), (["--flash_attn", "auto"], "auto"), ([], "auto"),
    ],
)  # fmt: skip
def test_flash_attention_is_on_off_or_chosen_by_the_engine(flags: list[str], expected: str) -> None:
    assert serving(*flags).flash_attention == expected


@pytest.mark.parametrize(
    ("flag", "layers"),
    [("-1", None), ("auto", None), ("-2", 33), ("all", 33), ("0", 0), ("16", 16), ("999", 33)],
)
def test_layers_on_gpus_are_counted_with_the_output_as_one(flag: str, layers: int | None) -> None:
    assert serving(f"--gpu-layers={flag}").gpu_layers == layers


def test_switches_are_read_in_both_spellings() -> None:
    found = serving("--no-kv-offload", "--swa-full", "--no-mmproj-offload")
    assert not any((found.offload_cache, found.projector_offload))
    assert found.full_windows
    again = serving("--no-mmproj-offload", "--mmproj-offload")
    assert again.projector_offload


def test_vectors_are_made_with_a_batch_of_one_pass() -> None:
    assert serving("--embeddings").batch == 512
    encoder = serving(architecture="bert", context_length=512)
    assert (encoder.embeddings, encoder.context, encoder.batch) == (True, 512, 512)


def test_experts_on_the_host_are_named_by_layer_or_all() -> None:
    overrides = serving("--cpu-moe", "-ot", r"blk\.1\.=CPU,attn_q=CUDA1", "--n-cpu-moe=2").overrides
    assert [o.device for o in overrides] == [None, 1, None, None, None]
    assert overrides[2].compiled.search("blk.9.ffn_up_exps.weight")
    assert not overrides[3].compiled.search("blk.9.ffn_up_exps.weight")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--cache-type-k=q9", "which llama.cpp does not know"),
        ("--ctx-size=many", "not a whole number"),
        ("--flash-attn=perhaps", "--flash-attn is 'perhaps'"),
        ("--gpu-layers=some", "use a number, auto or all"),
        ("--parallel=257", "at most 256"),
        ("--ctx-size=99999999999", "takes at most 2147483647"),
        ("--tensor-split=a,b", "not a list of shares"),
        ("--override-tensor=exps", "as in exps=CPU"),
        ("--override-tensor=(=CPU", "is no pattern"),
    ],
)
def test_values_that_llama_server_does_not_take_are_refused_by_name(flag: str, said: str) -> None:
    with pytest.raises(BadRow, match=r"backend_parameters: --") as raised:
        serving(flag)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("model", "flags", "why"),
    [
        ("llama-gqa", ["-fa", "off", "-ctv", "q8_0"], "quantized V cache requires flash_attn to be enabled"),
        ("deepseek2-lite", ["-ctk", "q8_0"], "does not support different K (q8_0) and V (f16) cache types"),
    ],
)
def test_llama_cpp_does_not_start_with_caches_that_it_cannot_use(
    model: str, flags: list[str], why: str
) -> None:
    with pytest.raises(LlamaRefusal) as raised:
        sizer_of(headers()[model], flags)
    assert why in raised.value.why
    assert str(raised.value).startswith("backend_parameters: llama.cpp refuses to start: ")
