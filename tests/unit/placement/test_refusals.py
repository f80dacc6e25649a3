"""What a refusal says: every cause with its count, real figures, what could cure it (FR-20)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Cure, Placed
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject
from tests.fleets import ask, demand, fleet, model, occupy, place, refused

CAUSES = {
    "1x1xA-24[cluster=2,zone=a]": "1 worker is not in the model's cluster",
    "1x1xA-24[zone=b]": "1 worker does not match worker_selector (zone=a)",
    "1x1xA-24[zone=a,state=NOT_READY]": "1 worker is NOT_READY",
    "1x1xA-24[zone=a,state=MAINTENANCE]": "1 worker is MAINTENANCE",
    "1x1xA-8[zone=a]": "not enough free GPU memory on 1 worker",
}
EXISTS = {"key": "zone", "operator": "Exists"}
SPEC = model(cluster_id=1, worker_selector={"zone": "a"})


def test_six_workers_that_fail_for_one_cause_each_are_told_apart():
    said = refused(fleet(" + ".join(CAUSES)), demand(20, SPEC)).message
    for words in CAUSES.values():
        assert words in said
    assert "8.00 GiB of 8.00 GiB" in said
    assert "20.00 GiB needed" in said


@pytest.mark.parametrize("gone", CAUSES)
def test_a_cause_that_is_gone_is_not_told(gone):
    said = refused(fleet(" + ".join(c for c in CAUSES if c != gone)), demand(20, SPEC)).message
    for text, words in CAUSES.items():
        assert (words in said) == (text != gone)


def test_free_memory_is_what_is_really_free():
    on = fleet("1x2xA-24")
    occupy(on, "w1", [0], 20)
    occupy(on, "w1", [1], 12)
    said = refused(on, demand(20)).message
    assert "the most free is w1:cuda:1: 12.00 GiB of 24.00 GiB (50 %)" in said


def test_an_emptied_pool_says_what_else_would_fail():
    on = fleet("3x1xA-24[cluster=2,state=NOT_READY]")
    outcome = refused(on, demand(8, model(cluster_id=1)))
    assert "3 workers are not in the model's cluster" in outcome.message
    assert "also: 3 workers are NOT_READY (w1, w2, w3)" in outcome.message
    assert [(s.filter, s.kept, s.total) for s in outcome.pool] == [("cluster", 0, 3), ("status", 0, 3)]


def test_no_gpus_is_said_only_where_there_are_none():
    assert "2 workers have no GPU" in refused(fleet("2xcpu"), demand(8)).message
    assert "no GPU" not in refused(fleet("2x1xA-8"), demand(20)).message
    assert refused(Fleet(), demand(8)).message == "No place: there are no workers."


@pytest.mark.parametrize("workers", [500, 3000])
def test_a_message_stays_short_at_any_fleet_size(workers):
    states = ["NOT_READY", "UNREACHABLE", "MAINTENANCE", "PENDING", "ERROR", "DELETING"]
    text = " + ".join(f"{workers // 10}x1xA-8[state={s},name={'n' * 300}]" for s in states)
    text += f" + {workers // 10}x2xA-8 + {workers // 10}x8xA-8[zone=b]"
    labels = {f"key-{n}": "v" * 200 for n in range(50)}
    for selector in (None, labels):
        message = refused(fleet(text), demand(10**6, model(worker_selector=selector))).message
        assert len(message.encode()) < 4096


@pytest.mark.parametrize(
    ("text", "spec", "cures"),
    [
        ("1x1xA-8", model(), Cure.CAPACITY | Cure.WORKER | Cure.MODEL),
        ("1x1xA-24[state=NOT_READY]", model(), Cure.WORKER | Cure.MODEL),
        ("1x1xA-24[zone=b]", model(worker_selector={"zone": "a"}), Cure.WORKER | Cure.MODEL),
    ],
)
def test_a_refusal_knows_what_could_cure_it(text, spec, cures):
    assert refused(fleet(text), demand(20, spec)).cures == cures


def test_the_signature_stays_when_only_byte_counts_change():
    on = fleet("1x1xA-24")
    first = refused(on, demand(23))
    occupy(on, "w1", [0], 4)
    second = refused(on, demand(23))
    assert first.message != second.message
    assert first.signature == second.signature


def test_text_and_data_tell_the_same_facts():
    outcome = refused(fleet("1x1xA-8"), demand(20))
    by_code = {r.code: r for r in outcome.reasons}
    assert by_code["fit.one_gpu"].params["free_bytes"] == 8 * 2**30
    assert by_code["fit.one_gpu"].params["need_bytes"] == 20 * 2**30
    assert all(r.as_json()["text"] for r in outcome.reasons)


def test_a_refused_instance_is_placed_once_the_cause_is_gone():
    on = fleet("1x1xA-24[state=NOT_READY]")
    refused(on, demand(8))
    on.put_worker(replace(on.row(0), state="READY", version=1))
    on.put_gpu(replace(on.gpu_rows[1], open=True))
    place(on, demand(8))


def test_an_instance_may_be_decided_as_if_it_held_nothing():
    on = fleet("1x1xA-24")
    place(on, demand(8), n=7)
    refused(on, demand(8), n=8)
    again = decide(on, demand(8), Subject(7, "x-7", leave_out=True), Policy())
    assert isinstance(again, Placed)
    refused(on, demand(8), n=8)
    assert ask(on, demand(8)).signature


@pytest.mark.parametrize(
    "selector",
    [
        {"terms": [{"key": "zone", "operator": "Within", "values": ["a"]}]},
        {"terms": [{"operator": "In", "values": ["a"]}]},
        {"terms": {"key": "zone"}},
        {"terms": [{"key": "zone", "operator": "In"}]},
        {"preferred": [{"key": "zone", "operator": "Exists", "weight": "much"}]},
        {"match": ["zone"]},
    ],
)
def test_a_selector_that_cannot_be_read_is_named(selector):
    outcome = refused(fleet("1x1xA-24"), demand(8, model(worker_selector=selector)))
    assert "worker_selector" in outcome.message
    assert outcome.cures == Cure.MODEL


@pytest.mark.parametrize(
    ("selector", "worker"),
    [
        ({"zone": "a"}, "w1"),
        ({"zone": "b"}, "w2"),
        ({"match": {"zone": "b"}}, "w2"),
        ({"terms": [{"key": "zone", "operator": "In", "values": ["b", "c"]}]}, "w2"),
        ({"terms": [{"key": "zone", "operator": "NotIn", "values": ["a", "b"]}]}, "w3"),
        ({"terms": [{"key": "zone", "operator": "DoesNotExist"}]}, "w3"),
        ({"match": {}, "terms": [EXISTS, {"key": "zone", "operator": "NotIn", "values": ["a"]}]}, "w2"),
        ({"preferred": [{"key": "zone", "operator": "In", "values": ["b"], "weight": 10}]}, "w2"),
        ({"preferred": [{"key": "zone", "operator": "Exists", "weight": -10}]}, "w3"),
    ],
)  # fmt: skip
def test_label_terms_choose_the_worker(selector, worker):
    on = fleet("1x1xA-24[zone=a] + 1x1xA-24[zone=b] + 1x1xA-24")
    assert place(on, demand(8, model(worker_selector=selector))).parts[0].worker_name == worker


def test_labels_are_compared_as_exact_strings():
    refused(fleet("1x1xA-24[rack=01]"), demand(8, model(worker_selector={"rack": "1"})))
    place(fleet("1x1xA-24[rack=01]"), demand(8, model(worker_selector={})))


def test_a_share_next_to_nothing_is_told_and_breaks_nothing():
    spec = model(backend_parameters=("--gpu-memory-utilization=1e-300",))
    assert "not enough free GPU memory" in refused(fleet("1x1xA-24"), demand(20, spec)).message
