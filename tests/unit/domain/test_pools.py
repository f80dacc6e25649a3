"""Quantities, instance types and inventories as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.domain.pools import FULL, Pools, gpu_pool, inventory
from gpustackd.domain.sizes import quantity

MIB = 1024**2
DETAIL = {
    "memory": "81920Mi",
    "manufacturer": "nvidia",
    "product": "A100-80GB-PCIe",
    "sliced_detail": {
        "physical": {"profiles": [{"name": "1g.40gb", "count": 1, "memory_mib": 40960}], "count": 1}
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "bytes_"),
    [
        ("80Gi", 80 * 1024**3), (85899345920, 85899345920), ("85899345920", 85899345920),
        ("1.5T", 1_500_000_000_000),
        ("1e3", 1000), ("1E", 10**18), ("24564Mi", 25_757_220_864), (" 5k ", 5000), (".5Ki", 512),
        ("80 Gi", 80 * 1024**3), ("80GiB", 80 * 1024**3), ("1.5 gb", 1_500_000_000), ("12000m", 12),
        ("129e6", 129_000_000), ("7 bytes", 7), ("2.k", 2000),
        ("-1", None), ("", None), ("x", None), ("5i", None), ("5ib", None), (True, None), (1.5, None),
        (None, None), (["80Gi"], None), ("9" * 30, None), ("9E", None),
    ],
)  # fmt: skip
def test_quantities(raw, bytes_):
    assert quantity(raw) == bytes_


@given(st.text() | st.integers() | st.floats() | st.none() | st.lists(st.text()))
def test_no_quantity_is_negative_or_raises(raw):
    found = quantity(raw)
    assert found is None or 0 <= found <= 2**62


def test_an_instance_type_is_read_with_its_partitions():
    found = gpu_pool("pool", 1, DETAIL)
    assert (found.memory, found.manufacturer, found.label) == (80 * 1024**3, "nvidia", "A100-80GB-PCIe")
    assert dict(found.profiles) == {"1g.40gb": 40960 * MIB}


@pytest.mark.parametrize(
    ("detail", "label"),
    [({"manufacturer": "nvidia"}, "nvidia"), ({}, "pool"), (None, "pool"), ({"product": 7}, "pool")],
)
def test_the_label_falls_back_to_manufacturer_then_name(detail, label):
    assert gpu_pool("pool", 1, detail).label == label


KEYS = [
    "memory", "manufacturer", "product", "sliced_detail", "physical", "profiles", "name", "memory_mib",
    "count", "id", "accelerators", "index", "remaining", "logical_count", "physical_profiles",
]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.sampled_from(KEYS), x),
    max_leaves=20,
)


@given(json_values, json_values)
def test_rows_of_any_shape_are_read_without_raising(detail, devices):
    pools = Pools.of([gpu_pool("t", 1, detail)], {1: devices})
    found = pools.named("t", 1)
    assert found is not None
    assert found.memory is None or found.memory >= 0
    assert pools.nodes(1) is None or isinstance(devices, dict)


def test_an_inventory_has_groups_by_node():
    raw = {"n1": [{"id": "g", "manufacturer": "nvidia", "product": "A100", "logical_count": 128,
                   "physical_profiles": [{"name": "1g.40gb", "count": 1, "memory_mib": 40960}],
                   "accelerators": [{"index": 0, "remaining": 800000}, {"remaining": "much"}]}]}  # fmt: skip
    (group,) = inventory(raw)["n1"]
    assert (group.logical_count, group.physical_count, group.profiles) == (128, 1, {"1g.40gb"})
    assert [(a.index, a.remaining, a.full) for a in group.accelerators] == [
        (0, 800000, FULL),
        (None, 0, FULL),
    ]
    assert inventory(None) is None
    assert inventory([]) is None


def test_a_type_is_looked_up_in_the_cluster_then_among_those_of_no_cluster():
    pools = Pools.of([gpu_pool("a", 1, {}), gpu_pool("a", 2, DETAIL), gpu_pool("b", None, DETAIL)])
    assert pools.named("a", 2).memory == 80 * 1024**3
    assert pools.named("a", 3) is None
    assert pools.named("b", 3).cluster_id is None
    assert pools.names_in(1) == ["a", "b"]
    assert pools.names_in(3) == ["b"]
