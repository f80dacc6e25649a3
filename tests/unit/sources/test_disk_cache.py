"""The cache on disk: expiring, bounded, and never trusted to be whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustackd.sources.cache.disk import DiskCache


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def cache(tmp_path: Path, now: list[float]) -> DiskCache:
    return DiskCache(tmp_path / "cache", lambda: now[0])


def files(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.is_file()]


def test_what_is_put_is_there_until_it_expires(cache: DiskCache, now: list[float]) -> None:
    cache.put("hub:a/b@main/config.json", b"\n{}\n\n", 60)
    assert cache.get("hub:a/b@main/config.json") == b"\n{}\n\n"
    assert cache.get("hub:a/b@main/other.json") is None
    now[0] += 61
    assert cache.get("hub:a/b@main/config.json") is None


def test_a_later_value_takes_the_place_of_an_earlier_one(cache: DiskCache, tmp_path: Path) -> None:
    cache.put("k", b"one", 60)
    cache.put("k", b"two", 60)
    assert cache.get("k") == b"two"
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("damage", [b"", b"x", b"gpustackd-cache-1 nan abc\nk\n", None])
def test_a_damaged_file_is_no_file(cache: DiskCache, tmp_path: Path, damage: bytes | None) -> None:
    cache.put("k", b"value", 60)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] if damage is None else damage)
    assert cache.get("k") is None
    cache.put("k", b"value", 60)
    assert cache.get("k") == b"value"


def test_keys_with_odd_characters_are_keys(cache: DiskCache) -> None:
    cache.put("local:/mnt/\udcff/a\nb", b"v", 60)
    assert cache.get("local:/mnt/\udcff/a\nb") == b"v"


def test_a_folder_that_cannot_be_written_makes_nothing_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "cache", lambda: 0.0)
    cache.put("k", b"v", 60)
    assert cache.get("k") is None


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, lambda: 0.0, limit=8_000)
    for i in range(64):
        cache.put(f"k{i}", bytes(1000), 60)
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 8_000 + 8_000 // 8 + 1_200
    assert cache.get("k63") is not None


def test_nobody_else_may_look_in(tmp_path: Path) -> None:
    DiskCache(tmp_path / "cache", lambda: 0.0).put("k", b"v", 60)
    (file,) = files(tmp_path / "cache")
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0
