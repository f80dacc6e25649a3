"""How long to wait before the next try: doubling from one second to a minute, spread by chance."""

from __future__ import annotations

from random import Random


class Backoff:
    """Delays `first * 2^n`, at most `ceiling`, of which a random part up to `spread` is taken off.

    The spread keeps replicas that failed together from coming back together. `rng` is passed in, so that a
    test or a replay knows the delays.
    """

    def __init__(
        self, rng: Random, *, first: float = 1.0, ceiling: float = 60.0, spread: float = 0.25
    ) -> None:
        """`first` and `ceiling` in seconds, `spread` between 0 and 1."""
        self._rng = rng
        self._first = first
        self._ceiling = ceiling
        self._spread = spread

    def seconds(self, failures: int) -> float:
        """The delay after so many failures in a row before this one (0 = this was the first)."""
        # 2^failures without ever building a huge number
        delay = min(self._ceiling, self._first * 2.0 ** min(max(failures, 0), 60))
        return delay * (1.0 - self._spread * self._rng.random())
