"""Whatever a GGUF file holds, reading it ends soon: with what it says, or an error that names the file."""

from __future__ import annotations

import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpustackd.errors import ModelUnreadable
from tests.exploring import explored
from tests.gguf_files import ARRAY, STRING, Typed, Writer, drive, file_bytes, read

NUMBERS = {
    0: st.integers(0, 255),
    1: st.integers(-128, 127),
    2: st.integers(0, 65535),
    3: st.integers(-(2**15), 2**15 - 1),
    4: st.integers(0, 2**32 - 1),
    5: st.integers(-(2**31), 2**31 - 1),
    10: st.integers(0, 2**64 - 1),
    11: st.integers(-(2**63), 2**63 - 1),
    12: st.floats(allow_nan=False),
}
TEXTS = st.text(max_size=30)


@st.composite
def typed(draw: st.DrawFn) -> tuple[Typed, Any]:
    """A value to write and what should be read of it (None: only passed over)."""
    shape = draw(st.sampled_from(["number", "text", "numbers", "texts", "nested"]))
    if shape == "text":
        value = draw(TEXTS)
        return Typed(STRING, value), value
    kind = draw(st.sampled_from(sorted(NUMBERS)))
    if shape == "number":
        value = draw(NUMBERS[kind])
        return Typed(kind, value), value
    if shape == "numbers":
        items = draw(st.lists(NUMBERS[kind], max_size=20))
        return Typed(ARRAY, Typed(kind, items)), tuple(items)
    if shape == "texts":
        return Typed(ARRAY, Typed(STRING, draw(st.lists(TEXTS, max_size=20)))), None
    inner = draw(st.lists(st.lists(NUMBERS[kind], max_size=3), max_size=4))
    return Typed(ARRAY, Typed(ARRAY, [Typed(kind, i) for i in inner])), None


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, int, dict[str, Any]]:
    """A header, the length of its file, and the values that should be read."""
    pairs = draw(st.dictionaries(st.text(min_size=1, max_size=20), typed(), max_size=12))
    names = draw(st.lists(st.text(min_size=1, max_size=20), max_size=6, unique=True))
    tensors = [(n, draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)), "F16") for n in names]
    values = {k: v for k, (v, _) in pairs.items() if k != "general.alignment"}
    writer = Writer(draw(st.integers(1, 3)), draw(st.sampled_from("<>")))
    data = writer.head(values, tensors)
    told = {k: w for k, (_, w) in pairs.items() if w is not None and k != "general.alignment"}
    return data, file_bytes(data, tensors), told


@explored(60)
@given(files(), st.sampled_from([32, 300, 2**18]))
def test_what_is_written_is_read_back_through_any_window(
    file: tuple[bytes, int, dict[str, Any]], window: int
) -> None:
    data, size, told = file
    head = read(data, size, window=window)
    assert dict(head.values) == told
    assert head.data_offset + head.data_bytes == size


@explored(80)
@given(files(), st.data())
def test_damage_gives_an_error_with_a_name_or_another_header(
    file: tuple[bytes, int, dict[str, Any]], data: st.DataObject
) -> None:
    """Bytes exchanged, the end cut off, the length of the file changed."""
    raw = bytearray(file[0])
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    size = data.draw(st.sampled_from([file[1], cut, len(raw), 2**33]))
    tracemalloc.start()
    try:
        said = outcome(bytes(raw[: cut or len(raw)]), size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said is None or ("m.gguf" in said and len(said) < 500)
    assert peak < 64 * 1024**2


@explored(60)
@given(st.binary(max_size=400), st.sampled_from([None, 2**20, 2**40]))
def test_anything_behind_the_magic_is_read_or_refused(raw: bytes, size: int | None) -> None:
    data = b"GGUF\x03\0\0\0" + raw
    said = outcome(data, max(size or 0, len(data)))
    assert said is None or "m.gguf" in said


def outcome(data: bytes, size: int) -> str | None:
    """What is said against a file; None where it is read, and then no more of it than there is."""
    try:
        _, asked = drive(data, size, window=2**16)
    except ModelUnreadable as error:
        return error.problem
    assert asked <= size
    return None
