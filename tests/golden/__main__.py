"""`python -m tests.golden` writes the record anew."""

from tests.golden.record import DECISIONS, WORDING, record

decisions, wording = record()
DECISIONS.write_text(decisions)
WORDING.write_text(wording)
print(f"{decisions.count(chr(10))} decisions, {len(decisions) + len(wording)} bytes")
