"""The catalogue of images: the packaged rows, what a worker chooses, chips and architectures."""

from __future__ import annotations

from collections import Counter

import pytest

from gpustackd.domain.backends import architecture
from gpustackd.engines.images import Runner, choose, runs, variant, variant_of_product
from tests.runners import packaged_runners


def test_the_packaged_catalogue_has_all_of_its_rows():
    found = packaged_runners()
    assert len(found) == 390
    assert sum(r.deprecated for r in found) == 78
    assert Counter(r.arch for r in found).keys() == {"amd64", "arm64"}
    assert {r.runtime for r in found} == {"cann", "corex", "cuda", "dtk", "hggc", "maca", "musa", "rocm"}


def images(*rows: str) -> list[Runner]:
    """`level:version` each."""
    pairs = (r.split(":") for r in rows)
    return [
        Runner("cuda", level, "", "vllm", version, "amd64", f"{level}-{version}") for level, version in pairs
    ]


@pytest.mark.parametrize(
    ("host", "level"),
    [
        ("12.9", "12.9"),
        ("12.9.1", "12.9"),
        ("13.1", "13.0"),
        ("12.8", "12.8"),
        ("12.4", "12.9"),  # all are newer: the newest of the host's major
        ("11.8", "12.8"),  # none of its major: the oldest
        ("v13.0", "13.0"),
        ("", "13.0"),  # not known: the newest
    ],
)
def test_a_worker_takes_the_newest_level_that_its_host_has(host, level):
    found = choose(images("12.8:1.0", "13.0:1.0", "12.9:1.0"), host)
    assert found is not None
    assert found.level == level


def test_of_one_level_the_newest_version_is_taken():
    found = choose(images("12.8:0.9.2", "12.8:0.10.1.1", "12.8:0.10.0", "12.9:0.11"), "12.8")
    assert found is not None
    assert found.version == "0.10.1.1"


def test_where_there_is_no_image_none_is_taken():
    assert choose([], "12.8") is None


@pytest.mark.parametrize(
    ("level", "host", "runs_there"),
    [("12.8", "12.9", True), ("12.8", "12.4", True), ("12.8", "11.8", False), ("12.8", "13.0", True),
     ("13.0", "12.9", False), ("12.8", "", True), ("8.2", "8.2.rc1", True)],
)  # fmt: skip
def test_an_image_runs_on_a_newer_host_or_one_of_its_major(level, host, runs_there):
    assert runs(images(f"{level}:1")[0], host) is runs_there


CHIPS = {
    "910": "Ascend910A Ascend910ProA Ascend910ProB Ascend910B Ascend910PremiumA",
    "310p": "Ascend310P1 Ascend310P7",
    "910b": "Ascend910B1 Ascend910B3 Ascend910B4-1 Ascend910B2C 910b3",
    "310b": "Ascend310B1 Ascend310B4",
    "a3": "Ascend910_9391 Ascend910_9362 Ascend910",
    "950": "Ascend910_9579 Ascend950 Ascend950PR_957",
    None: "Ascend310 Ascend777 H100",
}


@pytest.mark.parametrize(("soc", "expected"), [(n, v) for v, names in CHIPS.items() for n in names.split()])
def test_the_variant_of_a_chip(soc, expected):
    assert variant(soc) == expected


@pytest.mark.parametrize(
    ("product", "expected"),
    [("910B3", "910b"), ("310P3", "310p"), ("910B", None), ("Ascend 910B", None), ("Ascend910", None)],
)
def test_a_product_tells_the_chip_only_where_it_names_one(product, expected):
    assert variant_of_product(product) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("x86_64", "amd64"), ("AMD64", "amd64"), ("linux/arm64", "arm64"), ("aarch64", "arm64"), (None, "")],
)
def test_architectures_have_one_name(text, expected):
    assert architecture(text) == expected
