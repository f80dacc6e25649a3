"""Scores that were executed on the peer as cases, and any numbers against the formulas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.oracles import scores as oracle
from tests.gpustack_reference.production import scores
from tests.gpustack_reference.verdict import verdict

GIB = 2**30


def worker(n: int, gpus: Sequence[float], ram: float = 40) -> dict[str, Any]:
    """A worker with cards of these sizes (GiB)."""
    cards = [
        {"index": i, "type": "cuda", "vendor": "nvidia", "vram_total": int(g * GIB)}
        for i, g in enumerate(gpus)
    ]
    row = {"id": n, "name": f"w{n}", "state": "ready", "ram_total": int(ram * GIB), "gpus": cards}
    return {"inline": row}


def part(n: int, vram: dict[int, float], ram: float | None = None) -> dict[str, Any]:
    """A part on one worker: claims in GiB by GPU index."""
    claim: dict[str, Any] = {"vram": {str(i): int(v * GIB) for i, v in vram.items()}}
    if ram is not None:
        claim["ram"] = int(ram * GIB)
    return {"worker_id": n, "worker": f"w{n}", "gpu_indexes": list(vram) or None, "claim": claim}


def over(*parts: dict[str, Any]) -> dict[str, Any]:
    main, *others = parts
    return {**main, "subordinates": others}


def held(n: int, model: int, main: tuple[int, list[int]], *others: tuple[int, list[int]]) -> dict[str, Any]:
    """An instance that is there: worker and GPU indexes of its parts."""
    parts = [{"worker_id": w, "gpu_indexes": g or None} for w, g in (main, *others)]
    return {"id": n, "model_id": model, "state": "running", **parts[0], "subordinates": parts[1:]}


def case_of(
    strategy: str, workers: list[Any], candidates: list[Any], expected: Sequence[float],
    existing: Sequence[Any] = (), most: float = 100.0, model: int | None = 1,
) -> Case:  # fmt: skip
    scorer = {"type": "placement", "strategy": strategy, "max_score": most, "scale": "scale_up"}
    return {"id": "worked", "area": "scorer.placement", "model": {} if model is None else {"id": model},
            "inputs": {"scorers": [scorer], "candidates": candidates}, "workers": workers,
            "existing_instances": list(existing), "expect": {"scores": list(expected)}}  # fmt: skip


ONE = [worker(1, [24])]
SUBORDINATE = [worker(2, [24]), worker(3, [30]), worker(4, [24]), worker(5, [30])]
# 36.67 and 53.33: VRAM 50 % and RAM 10 %, VRAM 80 % and RAM 0
TWO = [part(2, {0: 12}, 4), part(3, {0: 24})]
FOUR = [*TWO, part(4, {0: 12}, 4), part(5, {0: 24})]
FULL = [worker(n, [20]) for n in range(1, 6)]
MEAN = "mean_over_workers"
PACKED = [
    ("E1", ONE, part(1, {0: 12}, 2), 35.0, "equal"),
    ("E2", [worker(1, [24, 16], 36)], part(1, {0: 12, 1: 12}, 2), (100 * 2 / 36 + 150) / 3, "equal"),
    ("E3", [*ONE, *SUBORDINATE], over(part(1, {0: 12}, 2), *TWO), (5 * 35 + 2 * 90) / 7, MEAN),
    ("E4", [*ONE, *SUBORDINATE], over(part(1, {0: 12}, 2), *FOUR), (5 * 35 + 4 * 180) / 9, MEAN),
    ("E5", FULL, over(*(part(n, {0: 18}, 4) for n in range(1, 6))), 1330 / 9, MEAN),
    ("E6", [worker(1, [])], part(1, {}, 10), 25.0, "equal"),
    ("E7", ONE, part(1, {0: 12}), 100 / 3, "equal"),
    ("E7, no RAM reported", [worker(1, [24], 0)], part(1, {0: 12}, 2), 100 / 3, "equal"),
    ("E8", ONE, part(1, {0: 30}, 2), 85.0, "equal"),
]


@pytest.mark.parametrize(
    ("workers", "candidate", "points", "word"), [p[1:] for p in PACKED], ids=[p[0] for p in PACKED]
)
def test_binpack(workers: list[Any], candidate: dict[str, Any], points: float, word: str) -> None:
    found = verdict(case_of("binpack", workers, [candidate], [points]))
    assert not found.wrong, found.wrong
    assert (found.classes or ["equal"]) == [word]


@pytest.mark.parametrize("claim", [10, None], ids=["E9", "E10"])
def test_what_stops_the_peer_scores_nothing(claim: float | None) -> None:
    """RAM of a worker that has none free, or a claim without RAM: there it is an error that ends the
    search."""
    workers = [worker(1, [], 0 if claim else 40)]
    assert verdict(case_of("binpack", workers, [part(1, {}, claim)], [0.0])).words == "equal"


def test_e11_scale_down_counts_what_the_instance_holds_as_free() -> None:
    def item(free: float, ram: float, claim: float, own: float, points: float) -> Case:
        scorer = {"type": "placement_item", "strategy": "binpack", "scale": "scale_down", "max_score": 1.0}
        inputs = {"scorers": [scorer], "gpu_indexes": [0], "claim": {"ram": own, "vram": {"0": claim}},
                  "allocatable": {"ram": ram, "vram": {"0": free}}}  # fmt: skip
        return {"id": "E11", "area": "scorer.placement", "inputs": inputs, "expect": {"score": points}}

    assert verdict(item(12 * GIB, 38 * GIB, 12 * GIB, 2 * GIB, 0.35)).words == "equal"
    # alone on a card of 80 and with 100 of RAM
    alone = (2 / 100 + 2 * 12 / 80) / 3
    assert verdict(item(68 * GIB, 98 * GIB, 12 * GIB, 2 * GIB, alone)).words == "equal"


def on(n: int, *gpus: int) -> dict[str, Any]:
    return part(n, dict.fromkeys(gpus, 1.0))


def several(*gpus: int) -> list[Any]:
    return [worker(n, [24.0] * g) for n, g in enumerate(gpus, 1)]


SPREAD = [
    ("S1", several(2, 1), [on(1, 0), on(1, 1), on(2, 0)], [held(1, 1, (1, [0]))], [62.75, 70.25, 100]),
    ("S2", several(1, 3, 2), [on(1, 0), on(2, 2), on(3, 1), on(3, 0)],
     [held(1, 9, (2, [0])), held(2, 9, (2, [1])), held(3, 9, (3, [0]))], [100, 87.25, 93.625, 91.125]),
    ("S3", several(3, 2, 3), [on(1, 2), on(2, 1), on(3, 2)],
     [held(1, 1, (1, [0])), held(2, 1, (1, [1])), held(3, 1, (2, [0])), held(4, 1, (3, [0])),
      held(5, 9, (3, [1]))], [70.25, 91.5, 78.75]),
    ("S4", several(4, 2), [on(1, 0), on(2, 1)], [held(1, 1, (1, [0, 1, 2, 3])), held(2, 1, (2, [0]))],
     [62.75, 91.5]),
    ("S5", several(0, 0), [on(1), on(2)], [held(1, 1, (1, []))], [65, 100]),
    ("S6", several(2, 3, 1), [on(1, 1), on(2, 2), on(3, 0)], [held(1, 1, (1, [0]), (2, [0, 1]))],
     [85.125, 70.25, 100]),
    ("S7", several(1, 3), [on(2, 1, 2)], [held(1, 1, (2, [1]))], [87.75]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "candidates", "existing", "points"), [s[1:] for s in SPREAD], ids=[s[0] for s in SPREAD]
)
def test_spread(workers: list[Any], candidates: list[Any], existing: list[Any], points: list[float]) -> None:
    found = verdict(case_of("spread", workers, candidates, points, existing))
    assert found.words == "equal", found.wrong


def test_s8_a_part_without_gpu_indexes_stops_nobody() -> None:
    """With the peer it is an error in the search of every model."""
    existing = [held(1, 9, (1, [0]), (2, []))]
    points = [100 * (0.85 * 0.85 + 0.15 / 1.2), 100]
    assert verdict(case_of("spread", several(1, 1), [on(1, 0), on(2, 0)], points, existing)).words == "equal"


def test_a_model_that_is_only_planned_is_held_against_what_is_there() -> None:
    existing = [held(1, 9, (1, [0])), held(2, 9, (2, [1]))]
    candidates = [on(1, 0), on(2, 0), on(2, 1)]
    found = verdict(case_of("spread", several(1, 2), candidates, [100, 100, 100], existing, model=None))
    assert found.words == "differs planned_like_deployed"


LOCALITY = [
    ("L1", [1], [1], None, 5.0),
    ("L2", [1], [1], [2], 10 / 3),
    ("L3", [1, 2, 3], [1, 2], None, 10 / 3),
    ("L4", [1, 2, 3], [1, 2], [3], 5 * (2 / 3 + 0.5 / 3) / 1.5),
    ("L5", [1], [], [1], 5 / 3),
    ("nobody has anything", [1], [], None, 0.0),
    ("a draft model that nobody has", [1], [1], [], 5.0),
]


@pytest.mark.parametrize(
    ("hosts", "main", "draft", "points"), [x[1:] for x in LOCALITY], ids=[x[0] for x in LOCALITY]
)
def test_locality(hosts: list[int], main: list[int], draft: list[int] | None, points: float) -> None:
    scorer = {"type": "file_locality", "max_score": 5.0, "ready_main": main, "ready_draft": draft,
              "has_draft": draft is not None}  # fmt: skip
    first, *others = hosts
    candidate = {"worker_id": first, "subordinates": [{"worker_id": w} for w in others]}
    case: Case = {"id": "L", "area": "scorer.file_locality", "workers": [], "expect": {"scores": [points]},
                  "inputs": {"scorers": [scorer], "candidates": [candidate]}}  # fmt: skip
    assert verdict(case).words == "equal"


RANKS = {
    "binpack": [(4, 0), (5, 0.3509), (6, 50.1067), (3, 50.1244), (2, 100.1244), (1, 100.3509)],
    "spread": [(4, 0), (5, 0.6275), (3, 50.6025), (6, 50.84), (2, 100.6025), (1, 100.6275)],
}
LAYERS = {
    None: [(4, 0), (5, 10.6275), (3, 60.6025), (6, 60.84), (2, 106.6631), (1, 110.6275)],
    100: [(4, 0), (5, 9.5743), (3, 54.5968), (6, 54.8108), (2, 96.0929), (1, 99.6644)],
}


def six(strategy: str, expected: list[tuple[int, float]], layers: bool, total: float | None) -> Case:
    """Six instances of one model: two on a worker of two cards, two on one card, one elsewhere, one
    nowhere."""
    workers = [worker(1, [24, 24], 40), worker(2, [80], 100), worker(3, [80], 100)]
    workers[2]["set"] = {"state": "unreachable"}
    claim = {"ram": 2 * GIB, "vram": 12 * GIB}
    existing = []
    for n, (at, index, state) in enumerate(
        [(1, 0, "running"), (2, 0, "running"), (2, 0, "starting"), (0, 0, "pending"), (1, 1, "error"),
         (3, 0, "running")], 1,
    ):  # fmt: skip
        one: dict[str, Any] = {"id": n, "model_id": 1, "state": state}
        if at:
            held = {"ram": claim["ram"], "vram": {str(index): claim["vram"]}}
            if layers:
                held |= {"offload_layers": 20 if n == 2 else 33, "total_layers": 33}
            one |= {"worker_id": at, "gpu_indexes": [index], "gpu_type": "cuda", "claim": held}
        existing.append(one)
    scorers = [{"type": "status", "max_score": 100.0}, {"type": "placement", "max_score": 1.0}]
    if layers:
        scorers.append({"type": "offload_layers", "max_score": 10.0})
    return {
        "id": "six", "area": "scale_down", "model": {"id": 1, "placement_strategy": strategy},
        "inputs": {"scorers": scorers, "total_max_score": total}, "workers": workers,
        "existing_instances": existing, "expect": {"order": [i for i, _ in expected]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "expected", "layers", "total"),
    [("binpack", RANKS["binpack"], False, None), ("spread", RANKS["spread"], False, None),
     ("spread", LAYERS[None], True, None), ("spread", LAYERS[100], True, 100)],
)  # fmt: skip
def test_executed_rankings(
    strategy: str, expected: list[tuple[int, float]], layers: bool, total: float | None
) -> None:
    case = six(strategy, expected, layers, total)
    assert verdict(case).words == "equal"
    found = scores.of_replicas(case)
    assert [found[str(i)] for i, _ in expected] == pytest.approx([v for _, v in expected], abs=5e-5)


# -- any numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_binpack_of_any_numbers(seed: int) -> None:
    chance = random.Random(seed)
    parts, workers = [], []
    for n in range(1, chance.choice([2, 2, 3, 6])):
        sizes = [float(chance.randint(1, 80)) for _ in range(chance.randint(1, 4))]
        workers.append(worker(n, sizes, chance.choice([0, 16, 512])))
        taken = {i: float(chance.randint(0, 90)) for i in range(chance.randint(1, len(sizes)))}
        parts.append(part(n, taken, chance.choice([None, 0, 3, 8])))
    most = chance.choice([1.0, 100.0, 250.0])
    case = case_of("binpack", workers, [over(*parts)], [], most=most)
    (found,) = scores.of_candidates(case, case["inputs"]["scorers"][0])
    assert found == pytest.approx(oracle.binpack(case, over(*parts), most))
    assert 0 <= found <= most


@pytest.mark.parametrize("seed", range(40))
def test_spread_of_any_numbers(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(1, 6) for _ in range(chance.randint(1, 5))]
    existing = []
    for n in range(1, chance.randint(1, 13)):
        w = chance.randint(1, len(sizes))
        gpus = sorted(chance.sample(range(sizes[w - 1]), chance.randint(0, sizes[w - 1])))
        existing.append(held(n, chance.choice([1, 1, 2, 3]), (w, gpus)))
    places = []
    for _ in range(chance.randint(1, 6)):
        w = chance.randint(1, len(sizes))
        places.append(on(w, *sorted(chance.sample(range(sizes[w - 1]), chance.randint(1, sizes[w - 1])))))
    case = case_of("spread", several(*sizes), places, [], existing)
    found = scores.of_candidates(case, case["inputs"]["scorers"][0])
    assert found == pytest.approx(oracle.spread(case, places))
