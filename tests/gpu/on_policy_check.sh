#!/usr/bin/env bash
# All weights on a GPU, by the program: the quick start's task on-policy, where sampler and trainer
# must agree in every bit at every step while weights move and the reward rises; and with a lag of
# two, where they must not.
#   tests/gpu/on_policy_check.sh LEEWAY FOLDER [DEVICE]
set -euo pipefail
leeway=$1 folder=$2 device=${3:-cuda}
here=$(dirname "$0")
rm -rf "$folder"
mkdir -p "$folder"
for lag in 0 2; do
  "$leeway" train --set output_dir="$folder/lag_$lag" --set model.device="$device" \
    --set trainer.max_steps=25 --set eval.every=0 --set eval.prompts=256 \
    --set orchestrator.max_off_policy_steps="$lag" > "$folder/lag_$lag.txt" 2>&1 || {
    cat "$folder/lag_$lag.txt"
    exit 1
  }
  grep -E '^held-out' "$folder/lag_$lag.txt"
done
python3 "$here/steps_check.py" "$folder/lag_0/metrics.jsonl" 25 zero
python3 "$here/steps_check.py" "$folder/lag_2/metrics.jsonl" 25 above
python3 - "$folder/lag_0/metrics.jsonl" << 'PYTHON'
import json, sys
rewards = [json.loads(line)["reward/all/mean"] for line in open(sys.argv[1])]
first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
print(f"reward {first:.3f} in the first five steps, {last:.3f} in the last: compared")
sys.exit(0 if last > first else 1)
PYTHON
