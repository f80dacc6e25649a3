"""Amounts as Kubernetes writes them: `81920Mi`, `80Gi`, `1.5T`, a bare number of bytes."""

from __future__ import annotations

import re
from fractions import Fraction

MIB = 1024**2

_FORM = re.compile(r"\+?(\d{1,24}(?:\.\d{0,24})?|\.\d{1,24})([A-Za-z]{0,2}|[eE][+-]?\d{1,2})\Z")
_SCALE = {
    "": Fraction(1), "m": Fraction(1, 1000), "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9),
    "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18), "Ki": Fraction(2**10),
    "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40), "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}  # fmt: skip
_MOST = 2**62


def quantity(raw: object) -> int | None:
    """Bytes, fractions of a byte cut off; None for what is no amount, or is beyond any memory."""
    if isinstance(raw, bool) or not isinstance(raw, (str, int)):
        return None
    found = _FORM.match(str(raw).strip())
    if found is None:
        return None
    number, suffix = found.groups()
    if suffix in _SCALE:
        scale = _SCALE[suffix]
    elif suffix[:1] in {"e", "E"} and len(suffix) > 1 and suffix[1:].lstrip("+-").isdigit():
        scale = Fraction(10) ** int(suffix[1:])
    else:
        return None
    amount = int(Fraction(number if not number.startswith(".") else "0" + number) * scale)
    return amount if amount <= _MOST else None
