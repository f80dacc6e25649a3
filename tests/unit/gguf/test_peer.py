"""The peer's estimate in compatibility mode: worked examples of the spec and captured outputs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gpustackd.domain.backend_parameters import parse
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import BY_NAME, GgufFacts, GgufTensor
from gpustackd.estimate.gguf.need import gguf_need
from gpustackd.estimate.gguf.peer import PeerSizes
from gpustackd.estimate.gguf.peer_flags import MIB, PeerFlags, peer_flags
from tests.specs import a_model

CAPTURED = Path(__file__).parents[2] / "fixtures" / "peer" / "gguf-estimates.json"
QWEN_32B: dict[str, Any] = {
    "e": 5120,
    "ff": 27648,
    "v": 152064,
    "layers": 64,
    "heads": 40,
    "kv": 8,
    "bias": True,
}
LLAMA_8B: dict[str, Any] = {"e": 4096, "ff": 14336, "v": 128256, "layers": 32, "heads": 32, "kv": 8}
LLAMA_70B: dict[str, Any] = {"e": 8192, "ff": 28672, "v": 128256, "layers": 80, "heads": 64, "kv": 8}
LLAMA_405B: dict[str, Any] = {"e": 16384, "ff": 53248, "v": 128256, "layers": 126, "heads": 128, "kv": 16}


def model(
    *, e: int, ff: int, v: int, layers: int, heads: int, kv: int, bias: bool = False, kind: str = "bf16",
    metadata: int = 0, merges: int = 0, freqs: bool = False, arch: str = "llama",
) -> GgufFacts:  # fmt: skip
    """A dense model with these dimensions."""
    wide = kv * (e // heads)
    tensors = [tensor("rope_freqs.weight", (64,), "f32")] if freqs else []
    tensors.append(tensor("token_embd.weight", (e, v), kind))
    for i in range(layers):
        parts: list[tuple[str, tuple[int, ...], str]] = [
            ("attn_norm.weight", (e,), "f32"), ("ffn_norm.weight", (e,), "f32"),
            ("attn_q.weight", (e, e), kind), ("attn_k.weight", (e, wide), kind),
            ("attn_v.weight", (e, wide), kind), ("attn_output.weight", (e, e), kind),
            ("ffn_gate.weight", (e, ff), kind), ("ffn_up.weight", (e, ff), kind),
            ("ffn_down.weight", (ff, e), kind),
        ]  # fmt: skip
        if bias:
            parts += [(f"attn_{x}.bias", (e if x == "q" else wide,), "f32") for x in "qkv"]
        tensors += [tensor(f"blk.{i}.{name}", shape, of) for name, shape, of in parts]
    tensors += [tensor("output_norm.weight", (e,), "f32"), tensor("output.weight", (e, v), kind)]
    data = sum(t.size for t in tensors)
    values: dict[str, Any] = {
        f"{arch}.block_count": layers, f"{arch}.embedding_length": e, f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv, f"{arch}.context_length": 131072,
        "tokenizer.ggml.model": "gpt2",
    }  # fmt: skip
    return GgufFacts(
        arch, values=values, tensors=tuple(tensors), data_bytes=data, file_bytes=data + metadata,
        lengths={"tokenizer.ggml.tokens": v, "tokenizer.ggml.merges": merges},
    )  # fmt: skip


def tensor(name: str, shape: tuple[int, ...], kind: str) -> GgufTensor:
    return GgufTensor(name, shape, BY_NAME[kind].id, BY_NAME[kind].bytes_of(math.prod(shape)))


def full(facts: GgufFacts, flags: PeerFlags, split: tuple[float, ...] = ()) -> Any:
    sizes = PeerSizes(facts, flags)
    return sizes.level(sizes.total_layers, split)


def llama_8b_q8() -> GgufFacts:
    return model(**LLAMA_8B, kind="q8_0", metadata=7_840_928, merges=280_147, freqs=True)


def test_example_j_an_8b_model_with_the_settings_of_the_peer() -> None:
    sizes = PeerSizes(llama_8b_q8(), PeerFlags())
    whole, half, none = (sizes.level(n) for n in (33, 16, 0))
    assert (whole.devices[0].unified, whole.devices[0].vram) == (9_319_563_264, 10_431_055_872)
    assert (whole.ram_unified, whole.ram) == (752_504_824, 909_791_224)
    assert (half.devices[0].unified, half.devices[0].vram) == (4_245_159_936, 5_423_761_408)
    assert (half.ram_unified, half.ram) == (5_988_897_016, 6_146_183_416)
    assert (none.ram_unified, none.ram) == (10_234_056_952, 10_391_343_352)
    assert whole.full
    assert not half.full
    assert full(llama_8b_q8(), peer_flags(parse(["--flash-attn=off"]))).devices[0].vram == 10_140_076_032


def test_a_quantised_value_cache_counts_only_with_flash_attention() -> None:
    types = ["--cache-type-k=q8_0", "--cache-type-v=q8_0"]
    plain = full(llama_8b_q8(), peer_flags(parse([*types, "-fa"])))
    assert whole_cache(plain) == 570_425_344
    assert whole_cache(full(llama_8b_q8(), peer_flags(parse(types)))) == (570_425_344 + 1_073_741_824) // 2


def whole_cache(level: Any) -> int:
    """The cache of an 8B model that is wholly on one device."""
    without = full(llama_8b_q8(), PeerFlags(context=32)).devices[0].unified
    one_token = 32 * 8 * 128 * 2 * 2
    rows = 4 * (512 - 32) * (4096 + 128256)
    found: int = level.devices[0].unified - without + 32 * one_token - rows
    return found


def test_example_a_a_32b_model_in_one_piece_on_an_apple() -> None:
    sizes = PeerSizes(model(**QWEN_32B, arch="qwen2"), PeerFlags(context=32768, old=True))
    assert sizes.layer_bytes[0] == 975_245_312 + 134_217_728
    unified = [sizes.level(n).devices[0].unified for n in (1, 2, 64, 65)]
    assert unified == [1_109_463_040, 2_218_926_080, 71_005_634_560, 72_563_419_136]


@pytest.mark.parametrize(
    ("name", "split", "remotes"),
    [
        ("deepseek_r1_distill_qwen_32b_bf16_partial_offload", (), 0),
        ("deepseek_r1_distill_qwen_32b_bf16_partial_offload_split_1main_1rpc", (1.0, 1.0), 1),
        ("deepseek_r1_distill_qwen_32b_bf16_partial_offload_split_3_1", (0.296, 0.2783, 0.4257), 2),
    ],
)
def test_captured_outputs_of_a_32b_model_on_gpus(name: str, split: tuple[float, ...], remotes: int) -> None:
    flags = PeerFlags(context=32768, old=True, device_platform=250 * MIB)
    sizes = PeerSizes(model(**QWEN_32B, arch="qwen2"), flags)
    items = json.loads(CAPTURED.read_text())["estimates"][name]["items"]
    assert len(items) == 66
    rams = set()
    for offloaded, whole, (unified, ram, _), devices in items:
        level = sizes.level(65 if whole else offloaded, split, remotes)
        assert [[d.unified, d.vram, d.layers] for d in level.devices] == devices
        assert level.ram - level.ram_unified == ram - unified
        rams.add(level.ram - ram if offloaded else 0)
    assert (
        len(rams - {0}) == 1
    )  # the header's length is not handed down; everything that depends on layers is


def test_examples_b_c_and_h_how_layers_are_divided() -> None:
    flags = PeerFlags(old=True, mmap=True)
    sizes = PeerSizes(model(**LLAMA_70B), flags)
    assert sizes.level(1).devices[0].unified == 33_554_432
    assert sizes.level(81).devices[0].unified == 2_684_900_352
    two = sizes.level(81, (1.0, 1.0))
    assert [d.layers for d in two.devices] == [41, 39]
    assert two.devices[0].unified == 1_375_731_712
    assert [d.layers for d in sizes.level(41, (1.0, 1.0)).devices] == [21, 20]
    short = PeerSizes(model(**LLAMA_70B), PeerFlags(context=1024, old=True, mmap=True)).level(81, (8.0, 10.0))
    assert [d.layers for d in short.devices] == [36, 44]
    assert short.devices[0].unified == 144 * MIB


@pytest.mark.parametrize(
    ("devices", "layers"),
    [
        (2, [31, 30]), (3, [21, 21, 19]), (4, [16, 15, 16, 14]), (5, [13, 12, 13, 12, 11]),
        (6, [11, 10, 10, 11, 10, 9]), (7, [9, 9, 9, 9, 9, 9, 7]), (8, [8, 8, 8, 7, 8, 8, 8, 6]),
    ],
)  # fmt: skip
def test_sixty_one_layers_over_equal_devices_as_captured(devices: int, layers: list[int]) -> None:
    facts = model(e=64, ff=64, v=64, layers=61, heads=1, kv=1)
    found = full(facts, PeerFlags(), (1.0,) * devices)
    assert [d.layers for d in found.devices] == layers


def test_example_g_buffers_of_a_405b_model_at_its_longest_context() -> None:
    flags = PeerFlags(context=131072, device_platform=0)
    found = full(model(**LLAMA_405B), flags).devices[0]
    assert found.vram - found.unified == 34_762_393_600


def test_example_f_cache_logits_and_buffers_of_a_7b_model_at_its_longest_context() -> None:
    facts = model(e=3584, ff=18944, v=152064, layers=28, heads=28, kv=4, bias=True, arch="qwen2")
    found = full(facts, PeerFlags(context=131072, device_platform=0)).devices[0]
    weights = facts.data_bytes - next(t.size for t in facts.tensors if t.name == "token_embd.weight")
    assert found.vram - found.unified == 7_813_990_400
    assert found.unified - weights == 7_516_192_768 + 318_767_104


def test_example_i_the_cache_of_a_legacy_file_with_latent_attention() -> None:
    values = {"deepseek2.block_count": 2, "deepseek2.embedding_length": 7168,
              "deepseek2.attention.head_count": 128, "deepseek2.attention.head_count_kv": 128,
              "deepseek2.attention.key_length": 192, "deepseek2.attention.value_length": 128}  # fmt: skip
    tensors = tuple(tensor(f"blk.{i}.attn_norm.weight", (7168,), "f32") for i in range(2))
    sizes = PeerSizes(GgufFacts("deepseek2", values=values, tensors=tensors), PeerFlags(context=2048))
    assert sizes.layer_bytes[0] == 167_772_160 + 4 * 7168


def test_flags_that_cannot_be_read_are_ignored_all_together() -> None:
    assert peer_flags(parse(["--ctx-size=4096", "--parallel=many"])) == PeerFlags()
    assert peer_flags(parse(["--ctx-size=4096", "--mmap"])) == PeerFlags(context=4096, mmap=True)


def test_a_demand_in_compatibility_mode_has_the_sizes_of_the_peer() -> None:
    facts = ModelFacts(weight_bytes=8_540_775_840, gguf=llama_8b_q8(), categories=("llm",))
    spec = a_model(huggingface_filename="m.gguf")
    need, asked = gguf_need(spec, facts, compat=True)
    assert (need.vram, need.ram) == (10_431_055_872, 909_791_224)
    assert asked is not None
    assert asked.sizes.total_layers == 33
    ours, _ = gguf_need(spec, facts)
    assert ours.vram is not None
    assert need.vram is not None
    assert ours.vram < need.vram
