"""The peer's scorer cases and every worked example of the scorers spec (E*, S*, L*), by one runner."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests import peer_cases as peer
from tests.peer_scorers import score_of

GIB = 2**30
CASES = [
    c
    for c in peer.cases("scorer.placement", "scorer.file_locality", "scorer.chain", "scorer.instance_chain")
    if "scores" in c["expect"] or "score" in c["expect"]
]


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_the_peers_cases(case: dict[str, Any]) -> None:
    expect = case["expect"]
    assert score_of(case) == pytest.approx(expect.get("scores", expect.get("score")), rel=1e-12)


# -- worked examples as cases --------------------------------------------------------------------------------


def worker(n: int, gpus: list[float], ram: float = 40) -> dict[str, Any]:
    """A worker with cards of these sizes (GiB)."""
    cards = [
        {"index": i, "type": "cuda", "vendor": "nvidia", "vram_total": int(g * GIB)}
        for i, g in enumerate(gpus)
    ]
    return {
        "inline": {"id": n, "name": f"w{n}", "state": "ready", "ram_total": int(ram * GIB), "gpus": cards}
    }


def part(n: int, vram: dict[int, float], ram: float | None = None) -> dict[str, Any]:
    """A part on one worker: claims in GiB by GPU index."""
    claim = {"vram": {str(i): int(v * GIB) for i, v in vram.items()}}
    if ram is not None:
        claim["ram"] = int(ram * GIB)
    return {"worker_id": n, "worker": f"w{n}", "gpu_indexes": list(vram) or None, "claim": claim}


def packed(workers: list[Any], *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    main, *others = parts
    return case_of("binpack", workers, [{**main, "subordinates": others}], **more)


def case_of(
    strategy: str,
    workers: list[Any],
    candidates: list[Any],
    existing: Sequence[Any] = (),
    **more: Any,
) -> dict[str, Any]:
    scorer = {"type": "placement", "strategy": strategy, "max_score": 100.0, **more}
    return {"model": {"id": 1}, "inputs": {"scorers": [scorer], "candidates": candidates}, "workers": workers,
            "existing_instances": list(existing)}  # fmt: skip


def held(n: int, model: int, main: tuple[int, list[int]], *others: tuple[int, list[int]]) -> dict[str, Any]:
    """An instance that is there: worker and GPU indexes of its parts."""
    parts = [{"worker_id": w, "gpu_indexes": g or None} for w, g in (main, *others)]
    return {"id": n, "model_id": model, "state": "running", **parts[0], "subordinates": parts[1:]}


ONE = [worker(1, [24])]
SUBORDINATE = [worker(2, [24], 40), worker(3, [30], 40), worker(4, [24], 40), worker(5, [30], 40)]
# 36.67 and 53.33: VRAM 50 % and RAM 10 %, VRAM 80 % and RAM 0
TWO = [part(2, {0: 12}, 4), part(3, {0: 24})]
FOUR = [*TWO, part(4, {0: 12}, 4), part(5, {0: 24})]
FULL = [worker(n, [20], 40) for n in range(1, 6)]
PACKED = [
    ("E1", packed(ONE, part(1, {0: 12}, 2)), 35.00),
    ("E2", packed([worker(1, [24, 16], 36)], part(1, {0: 12, 1: 12}, 2)), 51.85),
    ("E3", packed([*ONE, *SUBORDINATE], part(1, {0: 12}, 2), *TWO), (5 * 35 + 90) / 7),
    ("E4", packed([*ONE, *SUBORDINATE], part(1, {0: 12}, 2), *FOUR), (5 * 35 + 180) / 9),
    ("E5", packed(FULL, *(part(n, {0: 18}, 4) for n in range(1, 6))), 63.33),
    ("E6", packed([worker(1, [])], part(1, {}, 10)), 25.00),
    ("E7", packed(ONE, part(1, {0: 12})), 33.33),
    ("E7, no RAM reported", packed([worker(1, [24], 0)], part(1, {0: 12}, 2)), 33.33),
    ("E8", packed(ONE, part(1, {0: 30}, 2)), 85.00),
    ("E9", packed([worker(1, [], 0)], part(1, {}, 10)), 0),
    ("E10", packed([worker(1, [])], part(1, {})), 0),
]  # fmt: skip


@pytest.mark.parametrize(("case", "points"), [p[1:] for p in PACKED], ids=[p[0] for p in PACKED])
def test_binpack_by_the_worked_examples(case: dict[str, Any], points: float) -> None:
    assert score_of(case) == pytest.approx([points], abs=0.005)


def test_e11_scale_down_counts_what_the_instance_holds_as_free() -> None:
    def standing(free: float, ram: float, claim: float, own: float) -> Any:
        scorer = {"type": "placement_item", "strategy": "binpack", "scale": "scale_down", "max_score": 1.0}
        inputs = {"scorers": [scorer], "gpu_indexes": [0], "claim": {"ram": own, "vram": {"0": claim}},
                  "allocatable": {"ram": ram, "vram": {"0": free}}}  # fmt: skip
        return score_of({"inputs": inputs})

    assert standing(12 * GIB, 38 * GIB, 12 * GIB, 2 * GIB) == pytest.approx(0.35)
    # alone on a card of 80 and with 100 of RAM: (2/100 + 2 * 12/80) / 3
    assert standing(68 * GIB, 98 * GIB, 12 * GIB, 2 * GIB) == pytest.approx(0.1067, abs=5e-5)
    unplaced = {"id": 1, "model_id": 1, "state": "pending"}
    scorer = {"type": "placement", "strategy": "binpack", "scale": "scale_down", "max_score": 1.0}
    case = {
        "model": {"id": 1},
        "inputs": {"scorers": [scorer]},
        "workers": ONE,
        "existing_instances": [unplaced],
    }
    assert score_of(case) == {"1": 0.0}


def on(n: int, *gpus: int) -> dict[str, Any]:
    return part(n, dict.fromkeys(gpus, 1.0))


def four(*gpus: int) -> list[Any]:
    return [worker(n, [24.0] * g) for n, g in enumerate(gpus, 1)]


SPREAD = [
    ("S1", four(2, 1), [on(1, 0), on(1, 1), on(2, 0)], [held(1, 1, (1, [0]))], [62.75, 70.25, 100]),
    ("S2", four(1, 3, 2), [on(1, 0), on(2, 2), on(3, 1), on(3, 0)],
     [held(1, 9, (2, [0])), held(2, 9, (2, [1])), held(3, 9, (3, [0]))], [100, 87.25, 93.625, 91.125]),
    ("S3", four(3, 2, 3), [on(1, 2), on(2, 1), on(3, 2)],
     [held(1, 1, (1, [0])), held(2, 1, (1, [1])), held(3, 1, (2, [0])), held(4, 1, (3, [0])),
      held(5, 9, (3, [1]))], [70.25, 91.5, 78.75]),
    ("S4", four(4, 2), [on(1, 0), on(2, 1)], [held(1, 1, (1, [0, 1, 2, 3])), held(2, 1, (2, [0]))],
     [62.75, 91.5]),
    ("S5", four(0, 0), [on(1), on(2)], [held(1, 1, (1, []))], [65, 100]),
    ("S6", four(2, 3, 1), [on(1, 1), on(2, 2), on(3, 0)], [held(1, 1, (1, [0]), (2, [0, 1]))],
     [85.125, 70.25, 100]),
    ("S7", four(1, 3), [on(2, 1, 2)], [held(1, 1, (2, [1]))], [87.75]),
    ("S8", four(1, 1), [on(1, 0), on(2, 0)], [held(1, 9, (1, [0]), (2, []))], []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "candidates", "existing", "scores"),
    [s[1:] for s in SPREAD[:-1]],
    ids=[s[0] for s in SPREAD[:-1]],
)
def test_spread_by_the_worked_examples(
    workers: list[Any], candidates: list[Any], existing: list[Any], scores: list[float]
) -> None:
    case = case_of("spread", workers, candidates, existing)
    assert score_of(case) == pytest.approx(scores)


def test_s8_a_part_without_gpu_indexes_stops_nobody() -> None:
    _, workers, candidates, existing, _ = SPREAD[-1]
    first, second = score_of(case_of("spread", workers, candidates, existing))  # type: ignore[misc]
    assert first == pytest.approx(100 * (0.85 * 0.85 + 0.15 / 1.2))
    assert second == pytest.approx(100)


def test_a_model_that_is_not_deployed_yet_is_held_against_what_is_there() -> None:
    existing = [held(1, 9, (1, [0])), held(2, 9, (2, [1]))]
    case = case_of("spread", four(1, 2), [on(1, 0), on(2, 0), on(2, 1)], existing)
    del case["model"]
    first, *others = score_of(case)  # type: ignore[misc]
    assert first < max(others) == 100
    assert min(others) < 100


def test_a_model_that_is_nowhere_yet_spreads_freely() -> None:
    case = case_of("spread", four(1, 1), [on(1, 0), on(2, 0)])
    assert score_of(case) == [100, 100]


LOCALITY = [
    ("L1", [1], [1], None, 5.00),
    ("L2", [1], [1], [2], 3.33),
    ("L3", [1, 2, 3], [1, 2], None, 3.33),
    ("L4", [1, 2, 3], [1, 2], [3], 2.78),
    ("L5", [1], [], [1], 1.67),
    ("nobody has anything", [1], [], None, 0.0),
    ("a draft model that nobody has", [1], [1], [], 5.0),
]


@pytest.mark.parametrize(
    ("hosts", "main", "draft", "points"), [x[1:] for x in LOCALITY], ids=[x[0] for x in LOCALITY]
)
def test_locality_by_the_worked_examples(
    hosts: list[int], main: list[int], draft: list[int] | None, points: float
) -> None:
    scorer = {"type": "file_locality", "max_score": 5.0, "ready_main": main, "ready_draft": draft,
              "has_draft": draft is not None}  # fmt: skip
    first, *others = hosts
    candidate = {"worker_id": first, "subordinates": [{"worker_id": w} for w in others]}
    case = {"inputs": {"scorers": [scorer], "candidates": [candidate]}, "workers": []}
    assert score_of(case) == pytest.approx([points], abs=0.005)


# -- any numbers, against the formulas as the spec writes them -----------------------------------------------


def spec_binpack(parts: list[tuple[list[tuple[float, float]], float, float]], most: float) -> float:
    """Per part: (claim, free) of cards, RAM claim, RAM free."""

    def item(cards: list[tuple[float, float]], ram: float, free: float) -> float:
        r = ram / free if free else 0.0
        if not cards:
            return most * r
        return min(most, max(0.0, *(most * (r + 2 * (c / f if f else 0.0)) / 3 for c, f in cards)))

    main, *rest = (item(*p) for p in parts)
    n = len(rest)
    return (5 * main + sum(rest)) / (5 + n)


@pytest.mark.parametrize("seed", range(40))
def test_binpack_of_any_numbers(seed: int) -> None:
    chance = random.Random(seed)
    parts, workers, formula = [], [], []
    for n in range(1, chance.choice([2, 2, 3, 6])):
        sizes = [float(chance.randint(1, 80)) for _ in range(chance.randint(1, 4))]
        ram, own = chance.choice([0, 16, 512]), chance.choice([None, 0, 3, 8])
        taken = {i: float(chance.randint(0, 90)) for i in range(chance.randint(1, len(sizes)))}
        workers.append(worker(n, sizes, ram))
        parts.append(part(n, taken, own))
        formula.append(([(v, sizes[i]) for i, v in taken.items()], own or 0, ram))
    case = packed(workers, *parts, max_score=chance.choice([1.0, 100.0, 250.0]))
    most = case["inputs"]["scorers"][0]["max_score"]
    assert score_of(case) == pytest.approx([spec_binpack(formula, most)])
    assert 0 <= score_of(case)[0] <= most  # type: ignore[index]


def spec_spread(
    places: list[tuple[int, list[int]]], sat: list[tuple[int, int, list[int]]], most: float
) -> list[float]:
    """Candidates (worker, GPUs) among instances (model, worker, GPUs); our model is 1."""

    def counts(w: int, mine: bool) -> int:
        return sum(max(len(g), 1) for m, x, g in sat if x == w and (m == 1) is mine)

    def inv(x: int, all_: list[int]) -> float:
        low, high = min(all_), max(all_)
        return 1.0 if high <= low else 1 - (x - low) / (high - low)

    seen = sorted({w for w, _ in places})
    current, others = ([counts(w, mine) for w in seen] for mine in (True, False))
    found = []
    for w, gpus in places:
        c, o = counts(w, True), counts(w, False)
        if min(current) > 0:
            value = 0.50 + 0.25 * inv(c, current) + 0.15 * inv(o, others)
        elif c == 0:
            value = 0.85 + 0.15 * inv(o, others)
        else:
            value = 0.45 + 0.35 * inv(c, current) + 0.20 * inv(o, others)
        if gpus:
            on_card = [
                1 / (1 + sum(m == 1 and x == w and i in g for m, x, g in sat)
                     + 0.2 * sum(m != 1 and x == w and i in g for m, x, g in sat))
                for i in gpus
            ]  # fmt: skip
            value = 0.85 * value + 0.15 * math.fsum(on_card) / len(on_card)
        found.append(most * value)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_spread_of_any_numbers(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(1, 6) for _ in range(chance.randint(1, 5))]
    sat = []
    for _ in range(chance.randint(0, 12)):
        w = chance.randint(1, len(sizes))
        gpus = sorted(chance.sample(range(sizes[w - 1]), chance.randint(0, sizes[w - 1])))
        sat.append((chance.choice([1, 1, 2, 3]), w, gpus))
    places = []
    for _ in range(chance.randint(1, 6)):
        w = chance.randint(1, len(sizes))
        places.append((w, sorted(chance.sample(range(sizes[w - 1]), chance.randint(1, sizes[w - 1])))))
    existing = [held(n, m, (w, g)) for n, (m, w, g) in enumerate(sat, 1)]
    case = case_of("spread", four(*sizes), [on(w, *g) for w, g in places], existing)
    assert score_of(case) == pytest.approx(spec_spread(places, sat, 100.0))
