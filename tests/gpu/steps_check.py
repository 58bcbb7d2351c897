"""What the steps of a run must show: a gradient in each, and sampler and trainer with the same bits
in each where weights are the same (`zero`), and not in all where they are not (`above`).

  steps_check.py RUN/metrics.jsonl STEPS zero|above
"""

import json
import sys

path, steps, mismatch = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rows = [json.loads(line) for line in open(path)]
largest = max(row["mismatch_kl/all/max"] for row in rows)
least = min(row["grad_norm"] for row in rows)
print(f"{len(rows)} steps compared, mismatch_kl at most {largest}, grad_norm at least {least:.2g}")
right = {"zero": largest == 0, "above": largest > 0}[mismatch]
sys.exit(0 if right and least > 0 and len(rows) == steps else 1)
