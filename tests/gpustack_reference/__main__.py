"""`python -m tests.gpustack_reference [FILE]`: judge every case and tell how many are equal, how many
differ and why."""

import os
import sys

from tests.gpustack_reference.cases import read_cases
from tests.gpustack_reference.verdict import told, too_wide, verdict

if len(sys.argv) > 1:
    os.environ["GPUSTACKD_PEER_CASES"] = sys.argv[1]
verdicts = [verdict(case) for case in read_cases()]
print("\n".join(told(v.words for v in verdicts)))
for v in verdicts:
    for wrong in v.wrong:
        print(f"wrong: {v.case['id']}: {wrong[:2000]}")
wide = too_wide(verdicts)
if wide:
    print(
        f"these classes hold more than a tenth of the cases and do not say whom they serve: {', '.join(wide)}"
    )
sys.exit(1 if wide or any(v.wrong for v in verdicts) else 0)
