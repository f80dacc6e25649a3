"""Suggested changes as statements: whatever is in a name, the statement says just that."""

from __future__ import annotations

import pytest

from gpustackd.store.documents.change_sql import literal, statements


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "NULL"),
        (True, "true"),
        (7, "7"),
        ("w1", "'w1'"),
        ("it's", "'it''s'"),
        ("back\\slash'", "E'back\\\\slash'''"),
    ],
)
def test_values_are_written_as_sql_reads_them(value: object, written: str) -> None:
    assert literal(value) == written


def test_an_edit_sets_columns_of_the_model_by_name() -> None:
    change = {
        "kind": "edit_model",
        "model": "m",
        "columns": {"backend_parameters": ["--tp=2"], "cluster_id": None},
    }
    (said,) = statements(change)
    assert said == (
        """UPDATE models SET "backend_parameters" = '["--tp=2"]'::jsonb, "cluster_id" = NULL"""
        " WHERE name = 'm'"
    )


def test_instances_are_stopped_and_gpus_opened_by_name() -> None:
    assert statements({"kind": "stop_instances", "instances": ["a'b", "c"]}) == [
        "DELETE FROM model_instances WHERE name IN ('a''b', 'c')"
    ]
    opened = {"kind": "open_gpus", "worker": "w", "gpus": [{"type": "cuda", "index": 3}]}
    (said,) = statements(opened)
    assert said.startswith("UPDATE gpu_devices SET schedulable = true WHERE worker_id =")
    assert said.endswith("(SELECT id FROM workers WHERE name = 'w') AND (type, index) IN (('cuda', 3))")


def test_two_changes_are_two_statements_of_one_transaction() -> None:
    first = {"kind": "edit_model", "model": "m", "columns": {"cpu_offloading": True}}
    second = {"kind": "ready_worker", "worker": "w"}
    both = statements({"kind": "together", "changes": [first, second]})
    assert both == [*statements(first), *statements(second)]
    assert len(both) == 2
