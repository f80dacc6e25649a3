"""Documents of apply, before any database: what is taken, and what is said of the rest."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.errors import Refused
from gpustackd.store import tables
from gpustackd.store.documents.fields import size
from gpustackd.store.documents.kinds import GPU, KINDS
from gpustackd.store.documents.reading import read_documents


def refused(text: str) -> str:
    with pytest.raises(Refused) as caught:
        read_documents(text, "x.yaml")
    return str(caught.value)


def test_a_file_holds_several_documents_and_their_numbers_count_empty_ones() -> None:
    found = read_documents("kind: Cluster\nname: a\n---\n---\nkind: Worker\nname: w\ncluster: a\n", "x.yaml")
    assert [d.where for d in found] == ["x.yaml, document 1 (Cluster a)", "x.yaml, document 3 (Worker w)"]
    assert found[1].references == {"cluster_id": "a"}


def test_json_is_taken_as_one_document_a_list_or_one_after_the_other() -> None:
    one, two = {"kind": "Cluster", "name": "a"}, {"kind": "Cluster", "name": "b"}
    for text in (
        json.dumps([one, two]),
        json.dumps(one) + "\n" + json.dumps(two),
        "\t" + json.dumps([one, two]),
    ):
        assert [d.name for d in read_documents(text, "x.json")] == ["a", "b"]


def test_everything_wrong_with_a_file_is_named_at_once() -> None:
    said = refused(
        """
kind: Worker
name: w
ram_totl: 5
gpus: [{type: cuda, index: 0, vram_total: -5}, {type: cuda}, {type: cuda, index: 1}, {type: cuda, index: 1}]
---
kind: Modell
---
3
"""
    )
    assert "document 1 (Worker w), ram_totl: no such field; did you mean ram_total?" in said
    assert "gpus[0], vram_total: must be from 0" in said
    assert "gpus[1]: index is missing" in said
    assert "gpus[3]: cuda:1 is listed twice" in said
    assert "document 2: kind 'Modell' is not known; use one of Cluster" in said
    assert "document 3: must be a map with a kind, not a number" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: Cluster\nname: a\nname: b", "'name' is written twice"),
        ("kind: [", "neither YAML nor JSON"),
        ("name: a", "has no kind"),
        ("kind: {a: b}\nname: a", "is not known"),
        ("kind: Worker\nname: ''", "name: must not be empty"),
        ("kind: Worker\nname: null", "name: must not be null"),
        ("kind: Worker\nname: 'a\\0'\n".replace("'a\\0'", '"a\\0"'), "NUL character"),
        ("kind: Worker\nname: w\nstate: Ready", "state: must be one of READY"),
        ("kind: Worker\nname: w\nport: 70000", "port: must be from 1 to 65535"),
        ("kind: Worker\nname: w\nunified_memory: 1", "must be true or false, not a number"),
        ("kind: Worker\nname: w\nheartbeat_at: yesterday", "heartbeat_at: must be a time"),
        ("kind: Worker\nname: w\ncluster: a\ncluster_id: 3", "give cluster or cluster_id, not both"),
        ("kind: Worker\nname: w\ngpus: {}", "gpus: must be a list, not a map"),
        ("kind: Worker\nname: w\nlabels: [a]", "labels: must be a map, not a list"),
        ("kind: Model\nname: m\nenv: {a: .nan}", "env"),
        ("kind: Model\nname: m\nmeta: {a: 2024-01-31}", "put it in quotes"),
        ("kind: Model\nname: m\nreplicas: -1", "replicas: must be from 0"),
        ("kind: ModelInstance\nname: i", "model or model_id is missing"),
        ("kind: ModelFile\nmodel: m", "worker or worker_id is missing"),
        ("kind: ModelInstance\nname: i\nmodel: m\ngpu_indexes: [0, 0]", "names a GPU twice"),
        ("kind: Cluster\nname: a\n---\nkind: Cluster\nname: a", "document 1 is about the same row"),
    ],
)
def test_a_mistake_is_named_with_its_field(text: str, expected: str) -> None:
    assert expected in refused(text)


def test_values_come_in_the_types_of_their_columns() -> None:
    (worker,) = read_documents(
        """
kind: Worker
name: w
labels: {gpu: true, rack: 12}
ram_total: 512GiB
heartbeat_at: 2026-01-31T12:00:00Z
ram_reserved: null
gpus: [{type: cuda, index: 0, compute_capability: 9.0, vram_total: 81559 MiB}]
x-note: for others
""",
        "x.yaml",
    )
    assert worker.values == {
        "name": "w",
        "labels": {"gpu": "true", "rack": "12"},
        "ram_total": 512 * 2**30,
        "heartbeat_at": datetime(2026, 1, 31, 12, tzinfo=UTC),
        "ram_reserved": 0,
    }
    assert worker.gpus == (
        {"type": "cuda", "index": 0, "compute_capability": "9.0", "vram_total": 81559 * 2**20},
    )


def test_aliases_that_unfold_into_billions_of_values_are_refused() -> None:
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    indented = "\n".join("  " + line for line in lines)
    assert "more than" in refused(f"kind: Model\nname: m\nmeta:\n{indented}\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("&d\nkind: Model\nname: m\nenv: *d\n", "env: is nested more than 64 levels deep"),
        ("[" * 100_000, "is neither YAML nor JSON"),
        ('{"kind": "Model", "name": "m", "env": ' + '{"a": ' * 50_000, "is neither YAML nor JSON"),
        ('{"kind": "Model", "name": "\\ud800"}', "half of a surrogate pair"),
        ("kind: Model\nname: " + "n" * 2_000_000 + "\nreplicas: -1\n", "replicas"),
    ],
)
def test_circles_depths_and_half_characters_are_refused_in_few_words(text: str, why: str) -> None:
    said = refused(text)
    assert why in said
    assert len(said) < 2000


def test_merge_keys_may_override_what_they_merge() -> None:
    gpus = "- &c {type: cuda, index: 0}\n- &d {<<: *c, index: 1}\n- {<<: *d, index: 2}"
    (worker,) = read_documents(f"kind: Worker\nname: w\ngpus:\n{gpus}", "x.yaml")
    assert [g["index"] for g in worker.gpus or ()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        ("80GiB", 85899345920),
        ("1.5 GB", 1500000000),
        ("81559 MiB", 85520809984),
        (8e10, 80000000000),
        ("7", 7),
        ("1e3", 1000),
    ],
)
def test_sizes_are_bytes_with_or_without_a_unit(text: object, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize(
    "text", ["80 gigs", "-1", -1, 1.5, True, None, "80m", "0.3KiB", 2**63, "99999999TiB"]
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="must"):
        size(text)


@given(st.text(max_size=300))
def test_no_text_whatever_does_more_than_be_refused(text: str) -> None:
    said = "x"
    try:
        read_documents(text, "x")
    except Refused as error:
        said = str(error)
    assert said.startswith("x")


def test_every_field_is_a_column_and_nothing_that_the_server_keeps_can_be_written() -> None:
    outside = "id", "created_at", "updated_at", "version", "changed_in", "over_committed", "scheduled_at"
    capacity = "ram_capacity", "capacity", "ram_allocated", "vram_allocated", "open", "unified"
    worker = "worker_ready", "worker_reserve"
    lease = "lease_owner", "lease_until", "placement_epoch", "attempts", "next_attempt_at", "reasons"
    kept = {*outside, *capacity, *worker, *lease}
    for kind in (*KINDS.values(), GPU):
        columns = set(tables.metadata.tables[kind.table].columns.keys())
        assert set(kind.fields) <= columns - kept
        assert {column for column, _ in kind.references.values()} <= set(kind.fields)


def test_null_means_what_the_server_would_have_filled_in() -> None:
    for kind in (*KINDS.values(), GPU):
        columns = tables.metadata.tables[kind.table].columns
        for name in set(kind.fields) - set(kind.required):
            default = columns[name].server_default
            shown = None if default is None else str(default.arg).strip("'")  # type: ignore[attr-defined]
            stated = kind.defaults.get(name)
            assert shown == (
                str(stated).lower() if isinstance(stated, bool) else None if stated is None else str(stated)
            )


def test_a_schedule_that_cannot_be_kept_is_refused_with_the_part_at_fault() -> None:
    head = "kind: Model\nname: m\nscaling_schedule:\n"
    rules = "  rules: [{start_cron: '%s', duration_seconds: 3600, replicas: 3}]\n"
    kept = head + "  enabled: true\n  baseline_replicas: 1\n" + rules % "0 8 * * 1-5"
    assert read_documents(kept, "x.yaml")[0].values["scaling_schedule"]["baseline_replicas"] == 1
    assert read_documents(head + "  enabled: false\n", "x.yaml")
    said = refused(head + "  enabled: true\n  baseline_replicas: 1\n" + rules % "0 0 30 2 *")
    assert "scaling_schedule: cannot be kept: scaling_schedule.rules[0].start_cron" in said
    assert "baseline_replicas: is missing" in refused(head + "  enabled: true\n" + rules % "0 8 * * *")


def test_a_worker_is_drained_by_a_map_that_can_be_read() -> None:
    head = "kind: Worker\nname: w\nstate: MAINTENANCE\nmaintenance: "
    found = read_documents(head + "{drain: true, deadline: 2026-01-31T02:00:00Z}", "x.yaml")[0].values
    assert found["maintenance"] == {"drain": True, "deadline": "2026-01-31T02:00:00+00:00"}
    assert read_documents(head + "{}", "x.yaml")[0].values["maintenance"] == {"drain": False}
    for wrong in ("true", "{drian: true}", "{drain: true, deadline: soon}", "{drain: maybe}"):
        assert "maintenance" in refused(head + wrong)
