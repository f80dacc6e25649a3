"""Headers of safetensors files: written and read by the same module, hostile ones refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats import safetensors_header as st
from tests.safetensors_files import data_bytes, encode

TENSORS = [("a", "BF16", [2, 3]), ("b", "F32", [5]), ("c", "I8", []), ("d", "F8_E4M3", [4]), ("e", "F4", [3])]


TWICE = (
    b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    b'"a": {"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
)


def header(entries: dict[str, Any]) -> bytes:
    return json.dumps(entries).encode()


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def refused(data: bytes, size: int | None = 10_000) -> ModelUnreadable:
    with pytest.raises(ModelUnreadable) as raised:
        st.parse(data, size, "m.safetensors")
    assert "m.safetensors" in raised.value.problem
    assert len(raised.value.problem) < 400
    return raised.value


def test_what_is_written_is_read_back() -> None:
    head = encode(TENSORS, {"format": "pt"})
    size = len(head) + data_bytes(TENSORS)
    length = st.header_length(head[:8], size, "x")
    assert length == len(head) - 8
    assert len(head) % 8 == 0
    found = st.parse(head[8:], size, "x")
    assert found.tensors == 5
    assert found.header_bytes + found.data_bytes == size
    assert dict(found.bytes_by_dtype) == {"BF16": 12, "F32": 20, "I8": 1, "F8_E4M3": 4, "F4": 2}


def test_packed_tensors_count_by_their_bytes() -> None:
    packed = [("w.qweight", "I32", [1024, 512]), ("w.scales", "F16", [8, 512])]
    found = st.parse(encode(packed)[8:], None, "x")
    assert found.data_bytes == 1024 * 512 * 4 + 8 * 512 * 2


def test_types_of_the_future_are_sized_by_their_offsets() -> None:
    found = st.parse(header({"a": entry(0, 7, "F2_NEW", [100])}), None, "x")
    assert dict(found.bytes_by_dtype) == {"F2_NEW": 7}


def test_an_empty_model_has_an_empty_header() -> None:
    assert st.parse(b"{}", 10, "x").data_bytes == 0
    assert st.parse(b' { "__metadata__" : {} } ', 100, "x").tensors == 0


@pytest.mark.parametrize(
    ("first", "size", "says"),
    [
        (b"", 0, "cut off"),
        (b"\x01\x02", 2, "cut off"),
        ((2**40).to_bytes(8, "little"), 10**6, str(2**40)),
        ((2**64 - 1).to_bytes(8, "little"), None, "the format allows"),
        ((100_000_001).to_bytes(8, "little"), 2**40, "the format allows"),
        ((5000).to_bytes(8, "little"), 4000, "in a file of 4000"),
        ((0).to_bytes(8, "little"), 4000, "header of 0 bytes"),
        (b"version https://git-lfs", 134, "git-lfs pointer"),
    ],
)
def test_a_length_that_cannot_be_true_is_refused_before_anything_is_read(
    first: bytes, size: int | None, says: str
) -> None:
    with pytest.raises(ModelUnreadable, match=says):
        st.header_length(first, size, "m.safetensors")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cut off"),
        (b"{", "cut off"),
        (b'{"a"', "cut off"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}', "cut off"),
        (b"[]", "not valid JSON"),
        (b"{]", "not valid JSON"),
        (b'{"a" 1}', "not valid JSON"),
        (b"{1: 2}", "not valid JSON"),
        (b"{} trailing", "not valid JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        (header({"a": 5}), "not an object"),
        (header({"a": {"shape": [], "data_offsets": [0, 1]}}), "no dtype"),
        (header({"a": {"dtype": "U8", "shape": "x", "data_offsets": [0, 1]}}), "no shape"),
        (header({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}), "no shape"),
        (header({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}), "no shape"),
        (header({"a": {"dtype": "U8", "shape": [1]}}), "data_offsets"),
        (header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.5]}}), "data_offsets"),
        (header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 2**70]}}), "data_offsets"),
        (header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [5, 1]}}), "before it begins"),
        (header({"a": entry(0, 8, "F32", [3])}), "takes 12"),
        (header({"a": {"dtype": "X", "shape": [1] * 17, "data_offsets": [0, 1]}}), "17 dimensions"),
        (header({"a": entry(0, 8), "b": entry(7, 9)}), "overlap at byte 7"),
        (TWICE, "twice"),
        (b'{"__metadata__": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deep"),
        (b"{" + b'"a":{},' * 800_000 + b"}", "more than 250000 tensors"),
        (b'{"a":{"shape":[' + b"1," * 5_000_000 + b"1]}}", "more than 250000 tensors"),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_true_is_refused_by_name(data: bytes, says: str) -> None:
    error = refused(data)
    assert says in error.problem
    assert not error.retryable


def test_a_file_that_ends_before_its_tensors_is_incomplete_and_may_be_whole_later() -> None:
    error = refused(header({"a": entry(0, 9_999)}), 5_000)
    assert (error.code, error.retryable) == ("cut_off", True)


def test_metadata_with_the_names_of_tensors_inside_is_no_tensor() -> None:
    told = header({"__metadata__": {"a": "b", "data_offsets": "x"}, "a": entry(0, 4)})
    assert st.parse(told, 10_000, "x").tensors == 1
