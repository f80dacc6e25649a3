"""One, two and four replicas on the same two cores: on a fleet with room, and on one that is nearly full."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.bench.daemons import replicas, warm
from tests.bench.figure import Figure
from tests.bench.stage import Stage

COUNTS = (1, 2, 4)
SHARES = {2: 0.9, 4: 0.65}
"""Of one replica's rate, at least."""


@dataclass(slots=True)
class Seen:
    """Rounds with one number of replicas."""

    rates: list[float] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    conflicts: int = 0
    """Commits that the database rejected."""
    overtaken: int = 0
    """Placements given up before their commit, for news of the fleet."""

    @property
    def clashing(self) -> float:
        """Conflicts as a percentage of all that was tried to be committed."""
        tried = sum(self.placed) + self.conflicts
        return 100 * self.conflicts / tried if tried else 0.0


async def with_room(
    stage: Stage, folder: Path, number: int, rounds: int, tell: Callable[[str], None]
) -> list[Figure]:
    """Bursts that leave more than half of the fleet free."""
    seen = await _rounds(stage, folder, number, rounds, tell)
    row = "replicas, fleet with room"
    figures = [Figure(row, "one replica", median(seen[1].rates), "/s")]
    for count, bound in SHARES.items():
        figures += [
            Figure(row, f"{count} replicas", median(seen[count].rates), "/s"),
            Figure(
                row, f"{count} replicas, share of one's rate",
                median(b / a for a, b in zip(seen[1].rates, seen[count].rates, strict=True)), "", bound,
                note=f"{rounds} rounds, turn about",
            ),
            Figure(row, f"{count} replicas, conflicts", seen[count].clashing, "%", 5, at_most=True,
                   note=f"{seen[count].overtaken} more were overtaken before their commit"),
        ]  # fmt: skip
    return figures


async def nearly_full(
    stage: Stage, folder: Path, number: int, rounds: int, tell: Callable[[str], None]
) -> list[Figure]:
    """Bursts that ask for more than the fleet has."""
    seen = await _rounds(stage, folder, number, rounds, tell)
    row = "replicas, fleet nearly full"
    one = median(seen[1].placed)
    figures = [
        Figure(row, "one replica", median(seen[1].rates), "/s", note=f"{one:,.0f} of {number:,} placed")
    ]
    for count in SHARES:
        placed = median(seen[count].placed)
        figures += [
            Figure(row, f"{count} replicas", median(seen[count].rates), "/s",
                   note=f"conflicts {seen[count].clashing:.1f} %"),
            Figure(row, f"{count} replicas, placed in all against one's", placed / one, "", 0.98,
                   note=f"{placed:,.0f} placed"),
        ]  # fmt: skip
    return figures


async def _rounds(
    stage: Stage, folder: Path, number: int, rounds: int, tell: Callable[[str], None]
) -> dict[int, Seen]:
    seen: dict[int, Seen] = defaultdict(Seen)
    for n in range(rounds):
        for count in COUNTS:
            async with replicas(stage, folder, count) as made:
                await warm(stage, 1 if count == 1 else 2)
                for replica in made:
                    replica.events()
                burst = await stage.burst(stage.mixed, number)
                of = seen[count]
                told = sum((replica.events() for replica in made), Counter())
                conflicts = told["placement.conflict"]
                of.conflicts += conflicts
                of.overtaken += told["placement.overtaken"]
                of.rates.append(burst.rate)
                of.placed.append(burst.placed)
            await stage.clear()
            tell(
                f"{count} replicas, round {n + 1}: {burst.rate:,.0f}/s, {burst.placed} placed,"
                f" {burst.waiting} wait, {conflicts} conflicts"
            )
    return seen
