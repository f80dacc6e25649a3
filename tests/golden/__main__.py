"""`python -m tests.golden` writes the record anew; with the name of a scene it prints that scene's lines."""

import sys

from tests.golden.record import DECISIONS, WORDING, lines_of, record

if len(sys.argv) > 1:
    sys.stdout.writelines(lines_of(sys.argv[1]))
else:
    decisions, wording = record()
    DECISIONS.write_text(decisions)
    WORDING.write_text(wording)
    print(f"{decisions.count(chr(10))} entries, {len(decisions) + len(wording)} bytes")
