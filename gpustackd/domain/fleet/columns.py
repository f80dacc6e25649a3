"""What the fleet's arrays are made of: types, the value for "unknown", codes for repeated values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
"""Stands for a size that is not known (NULL in the row)."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

T = TypeVar("T")


class Codes(Generic[T]):
    """Small integers that stand for values: code `i` is `values[i]`. Values are added, never removed."""

    def __init__(self, values: Iterable[T] = ()) -> None:
        self.values: list[T] = list(values)
        self._codes = {value: code for code, value in enumerate(self.values)}

    def code(self, value: T) -> int:
        """The code of a value; a new one for a value that was never seen."""
        code = self._codes.get(value)
        if code is None:
            code = self._codes[value] = len(self.values)
            self.values.append(value)
        return code


def grown(array: NDArray[Any], shape: tuple[int, ...], empty: int = 0) -> NDArray[Any]:
    """A copy in a larger shape, `empty` where there was nothing."""
    larger = np.full(shape, empty, array.dtype)
    larger[tuple(slice(n) for n in array.shape)] = array
    return larger
