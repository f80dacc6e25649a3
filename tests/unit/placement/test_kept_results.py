"""What is kept between decisions: bounded, and right while the fleet grows under it."""

from __future__ import annotations

from dataclasses import replace

from gpustackd.placement.decide import Searches
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import GIB, ask, demand, fleet, model, place, rows, seats


def test_the_oldest_result_goes_where_there_are_too_many():
    memo: SearchCache[int] = SearchCache(2)
    for key in "abac":
        if memo.get(key) is None:
            memo.put(key, ord(key))
    assert (memo.get("a"), memo.get("b"), memo.get("c")) == (97, None, 99)
    assert len(memo) == 2


def test_workers_and_slots_may_grow_under_kept_results():
    on = fleet("1x1xA-24")
    memo: Searches = SearchCache()
    single, several = demand(8, model(1)), demand(400, model(2), heads=32)
    assert not hasattr(ask(on, several, memo=memo), "placement")
    place(on, single, n=1, memo=memo)
    workers, gpus = rows("70x20xB-48")
    for w in workers:
        on.put_worker(replace(w, id=w.id + 100, name=f"new{w.id}"))
    for g in gpus:
        on.put_gpu(replace(g, id=g.id + 100, worker_id=g.worker_id + 100))
    for wanted in (single, several):
        kept, fresh = ask(on, wanted, memo=memo), ask(on, wanted)
        assert kept == fresh
        assert seats(kept.placement)[0][0] != "w1"
    placed = place(on, several, n=2, memo=memo)
    assert placed.gpu_count == 16
    assert sum(placed.parts[0].vram) >= 400 * GIB


def test_a_worker_that_takes_the_position_of_another_is_looked_at_anew():
    on = fleet("1x1xA-24 + 1x1xA-8")
    memo: Searches = SearchCache()
    wanted = demand(16)
    assert seats(ask(on, wanted, memo=memo).placement)[0][0] == "w1"
    on.drop_worker(1)
    assert not hasattr(ask(on, wanted, memo=memo), "placement")
    workers, gpus = rows("1x1xA-24[name=later]")
    on.put_worker(replace(workers[0], id=9))
    on.put_gpu(replace(gpus[0], id=9, worker_id=9))
    assert seats(ask(on, wanted, memo=memo).placement)[0][0] == "later1"


def test_an_edited_model_is_searched_for_anew():
    on = fleet("1x1xA-24 + 1x1xB-24[zone=b]")
    memo: Searches = SearchCache()
    first = model(1, version=1)
    ask(on, demand(8, first), memo=memo)
    edited = replace(first, version=2, worker_selector={"zone": "b"})
    assert seats(ask(on, demand(8, edited), memo=memo).placement)[0][0] == "w2"
