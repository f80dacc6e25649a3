"""GGUF headers: every version, order and type is read; what is long is passed over; lies are refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gpustackd.domain.gguf_facts import TYPES
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats.gguf_header import LONGEST_ARRAY, MAX_TENSORS, header
from gpustackd.sources.formats.gguf_window import FIRST
from tests.gguf_files import ARRAY, STRING, Typed, Writer, drive, file_bytes, read

TENSORS = [
    ("token_embd.weight", (64, 100), "Q8_0"),
    ("blk.0.attn_norm.weight", (64,), "F32"),
    ("blk.0.ffn_up.weight", (256, 8, 2), "Q4_K"),
]
VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.rope.freq_base": 500000.0,
    "llama.attention.causal": False,
    "llama.attention.head_count_kv": [8, 0, 4],
    "tokenizer.ggml.tokens": ["a", "bb", ""],
}
EVERY_TYPE = {
    "u8": Typed(0, 200), "i8": Typed(1, -3), "u16": Typed(2, 60000), "i16": Typed(3, -300),
    "u32": Typed(4, 4 * 10**9), "i32": Typed(5, -7), "f32": Typed(6, 0.5), "bool": Typed(7, 1),
    "text": Typed(STRING, "ü"),
    "u64": Typed(10, 2**63), "i64": Typed(11, -(2**62)), "f64": Typed(12, 0.1),
}  # fmt: skip


def whole(version: int = 3, order: str = "<", values: dict[str, Any] | None = None) -> tuple[bytes, int]:
    head = Writer(version, order).head(VALUES if values is None else values, TENSORS)
    return head, file_bytes(head, TENSORS, (values or {}).get("general.alignment", 32))


def refused(data: bytes, size: int | None = None) -> ModelUnreadable:
    with pytest.raises(ModelUnreadable) as raised:
        read(data, size)
    assert "m.gguf" in raised.value.problem
    assert len(raised.value.problem) < 400
    return raised.value


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_and_byte_order_says_the_same(version: int, order: str) -> None:
    head = read(*whole(version, order))
    assert (head.version, head.big_endian) == (version, order == ">")
    assert head.values["llama.block_count"] == 1
    assert head.values["llama.attention.head_count_kv"] == (8, 0, 4)
    assert head.values["llama.attention.causal"] is False
    assert head.lengths["tokenizer.ggml.tokens"] == 3
    assert [(t.name, t.shape) for t in head.tensors] == [(n, tuple(s)) for n, s, _ in TENSORS]
    assert [t.size for t in head.tensors] == [6800, 256, 16 * 144]
    assert head.data_offset % 32 == 0
    assert head.data_bytes == 6816 + 256 + 2304


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_magic_written_the_other_way_round_is_big_endian(order: str) -> None:
    data, size = whole(3, ">")
    assert read(b"FUGG" + data[4:], size).big_endian


@pytest.mark.parametrize("version", [1, 3])
def test_every_type_of_value_is_read(version: int) -> None:
    head = read(Writer(version).head(EVERY_TYPE))
    assert head.values == {k: v.value if k != "bool" else True for k, v in EVERY_TYPE.items()}


@pytest.mark.parametrize("kind", [k for k, v in enumerate(EVERY_TYPE.values()) if v.type != STRING])
def test_arrays_of_numbers_are_kept_while_they_are_short(kind: int) -> None:
    typed = list(EVERY_TYPE.values())[kind]
    values = {
        "short": Typed(ARRAY, Typed(typed.type, [typed.value] * 3)),
        "long": Typed(ARRAY, Typed(typed.type, [typed.value] * (LONGEST_ARRAY + 1))),
        "after": 7,
    }
    head = read(Writer().head(values))
    assert head.values["short"] == (typed.value,) * 3
    assert "long" not in head.values
    assert head.lengths == {"short": 3, "long": LONGEST_ARRAY + 1}
    assert head.values["after"] == 7


def test_arrays_in_arrays_are_passed_over() -> None:
    inner = Typed(ARRAY, Typed(STRING, ["x", "yy"]))
    head = read(Writer().head({"deep": Typed(ARRAY, Typed(ARRAY, [inner.value] * 3)), "after": 7}))
    assert head.values == {"after": 7}
    assert head.lengths["deep"] == 3


@pytest.mark.parametrize("version", [1, 2, 3])
def test_empty_arrays_in_arrays_at_the_very_end_of_a_file_are_no_damage(version: int) -> None:
    empty = Typed(ARRAY, Typed(ARRAY, [Typed(4, [])]))
    data = Writer(version).head({"a": empty, "b": empty, "c": empty}, [])
    assert read(data).lengths == {"a": 1, "b": 1, "c": 1}


def test_long_texts_are_passed_over() -> None:
    head = read(Writer().head({"tokenizer.chat_template": "x" * 100_000, "after": 7}))
    assert head.values == {"after": 7}
    assert head.lengths["tokenizer.chat_template"] == 100_000


@pytest.mark.parametrize("window", [64, 1000, FIRST, 4 * FIRST])
@pytest.mark.parametrize("count", [10, 5000, 20_000])
def test_a_vocabulary_is_passed_over_whatever_the_windows_cut(window: int, count: int) -> None:
    """Empty strings, zeros in strings and strings of more than 255 bytes break the quick way."""
    tokens = [("x" * (i % 40)) if i % 97 else "\0" * 12 if i % 2 else "y" * 300 for i in range(count)]
    data = Writer().head({"tokenizer.ggml.tokens": tokens, "general.architecture": "qwen2"}, TENSORS)
    head = read(data, file_bytes(data, TENSORS), window=window)
    assert head.values == {"general.architecture": "qwen2"}
    assert head.lengths["tokenizer.ggml.tokens"] == count
    assert len(head.tensors) == 3


def test_little_more_than_the_header_is_read_of_a_large_file() -> None:
    data = Writer().head({"tokenizer.ggml.tokens": [f"token{i}" for i in range(100_000)]}, TENSORS)
    _, asked = drive(data, 2**40)
    assert asked <= 2 * len(data) + FIRST
    _, asked = drive(Writer().head(VALUES, TENSORS), 2**40)
    assert asked <= FIRST


def test_numbers_that_nobody_needs_are_not_read() -> None:
    scores = Typed(ARRAY, Typed(6, [0.0] * 2_000_000))
    data = Writer().head({"tokenizer.ggml.scores": scores, "after": 7}, TENSORS)
    head, asked = drive(data, file_bytes(data, TENSORS))
    assert head.values == {"after": 7}
    assert asked < 3 * FIRST


def test_memory_stays_near_a_window_for_a_large_vocabulary() -> None:
    data = Writer().head({"tokenizer.ggml.tokens": [f"token number {i}" for i in range(250_000)]}, TENSORS)
    size = file_bytes(data, TENSORS)
    tracemalloc.start()
    try:
        read(data, size, window=1024**2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024**2


def test_an_alignment_of_its_own_moves_the_data() -> None:
    head = read(*whole(values={**VALUES, "general.alignment": 4096}))
    assert head.alignment == 4096
    assert head.data_offset % 4096 == 0


def test_a_header_that_is_aligned_already_gets_no_padding() -> None:
    for pad in range(32):
        data = Writer().head({"k": "x" * pad})
        assert read(data, len(data) + 64).data_offset == -(-len(data) // 32) * 32


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type_of_tensor_has_a_size(kind: int) -> None:
    tensors = [("a", (2 * TYPES[kind].elements, 3), kind), ("b", (4,), 0)]
    data = Writer().head({}, tensors)
    head = read(data, file_bytes(data, tensors))
    assert head.tensors[0].size == 6 * TYPES[kind].size
    assert not head.warnings


def test_a_tensor_of_an_unknown_type_ends_where_the_next_begins() -> None:
    tensors = [("a", (32,), 99), ("b", (4,), 0), ("c", (32,), 98)]
    data = Writer().head({}, tensors)
    head = read(data, file_bytes(data, tensors))
    assert [t.size for t in head.tensors] == [2048, 16, 2048]
    assert [t.type in TYPES for t in head.tensors] == [False, True, False]
    assert len(head.warnings) == 1


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"GGUF", "cut_off", "cut off"),
        (b"version https://git-lfs.github.com/spec/v1\n", "lfs_pointer", "git-lfs"),
        (b"lmgg" + bytes(100), "not_gguf", "older format"),
        (b"PK\x03\x04" + bytes(100), "not_gguf", "not a GGUF"),
        (b"GGUF\x04\0\0\0" + bytes(100), "bad_header", "version 4"),
        (b"GGUF\0\0\0\0" + bytes(100), "bad_header", "version 0"),
        (Writer().head({}, tensor_count=MAX_TENSORS + 1) + bytes(100), "bad_header", "tensors"),
        (Writer().head({}, tensor_count=2**62), "bad_header", "tensors"),
        (Writer().head({}, tensor_count=1000), "cut_off", "cut off"),
        (Writer().head({}, key_count=1000), "cut_off", "cut off"),
        (Writer().head({"a": Typed(7, 1)})[:-5] + b"\x63\0\0\0" + bytes(40), "bad_header", "value type"),
        (Writer().head({"a": 1}) + bytes(10), "", ""),
        (Writer().head({"general.alignment": 3}), "bad_header", "power of two"),
        (Writer().head({"general.alignment": 0}), "bad_header", "power of two"),
        (Writer().head({"general.alignment": "32"}), "bad_header", "power of two"),
    ],
)
def test_what_cannot_be_true_is_refused_by_name(data: bytes, code: str, said: str) -> None:
    if not code:
        read(data)
        return
    error = refused(data)
    assert error.code == code
    assert said in error.problem
    assert error.retryable == (code == "cut_off")


def test_a_key_that_comes_twice_is_refused() -> None:
    one = Writer().head({"a": 1})
    pair = one[24:]
    assert "twice" in refused(Writer().head({}, key_count=2) + pair + pair).problem


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([("a", (4,), "F32"), ("a", (4,), "F32")], "twice"),
        ([("a", (33,), "Q8_0")], "multiple"),
        ([("a", (2**40, 2**30), "F32")], "beyond any memory"),
        ([("a" * 300, (4,), "F32")], "300 bytes"),
    ],
)
def test_tensors_that_cannot_be_are_refused(
    tensors: list[tuple[str, tuple[int, ...], str]], said: str
) -> None:
    data = Writer().head({}, tensors)
    assert said in refused(data, 2**50).problem


def test_tensors_beyond_the_file_mean_an_unfinished_download() -> None:
    data, size = whole()
    error = refused(data, size - 1000)
    assert (error.code, error.retryable) == ("cut_off", True)
    assert "blk.0.ffn_up.weight" in error.problem


def test_tensors_on_top_of_each_other_are_refused() -> None:
    data = bytearray(Writer().head({}, [("a", (64,), "F32"), ("b", (64,), "F32")]))
    data[-8:] = (32).to_bytes(8, "little")
    assert "overlap" in refused(bytes(data), 10_000).problem
    data[-8:] = (257).to_bytes(8, "little")
    assert "multiple" in refused(bytes(data), 10_000).problem


def test_more_than_memory_should_hold_is_refused() -> None:
    data = Writer().head({f"k{i}": [1] * 4096 for i in range(400)})
    assert "than fit into" in refused(data).problem


def test_a_hole_where_the_keys_should_be_is_refused_at_once() -> None:
    """Zeros read as an empty key of type u8, over and over."""
    data = Writer().head({}, key_count=10_000)
    assert "twice" in refused(data, 2**40).problem


def test_a_hole_where_strings_should_be_is_refused() -> None:
    data = Writer().head({}, key_count=1) + Writer().text("t") + bytes([9, 0, 0, 0, 8, 0, 0, 0])
    assert "strings" in refused(data + (2**30).to_bytes(8, "little"), 2**40).problem


def test_a_length_beyond_the_file_is_refused_before_anything_is_read() -> None:
    data = Writer().head({}, key_count=1) + (2**63).to_bytes(8, "little") + bytes(64)
    assert refused(data).code == "cut_off"


def test_a_file_that_shrank_meanwhile_is_cut_off() -> None:
    data, size = whole()
    reading = header(size, "m.gguf", largest_window=4096)
    next(reading)
    wanted = reading.send(data[:40])
    assert wanted.start == 40
    with pytest.raises(ModelUnreadable) as raised:
        reading.send(b"")
    assert raised.value.code == "cut_off"


def test_the_gguf_package_writes_what_we_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_block_count(2)
    writer.add_head_count_kv([4, 8])
    writer.add_token_list(["<s>", "a", "ü" * 200])
    writer.add_tensor("token_embd.weight", np.zeros((3, 64), np.float16))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    ours, theirs = read(data), gguf.GGUFReader(str(path))
    assert ours.data_offset == theirs.data_offset
    assert ours.values["qwen3.attention.head_count_kv"] == (4, 8)
    assert ours.lengths["tokenizer.ggml.tokens"] == 3
    mine = {(t.name, t.shape, t.size, ours.data_offset + t.offset) for t in ours.tensors}
    its = {(t.name, tuple(map(int, t.shape)), int(t.n_bytes), int(t.data_offset)) for t in theirs.tensors}
    assert mine == its
