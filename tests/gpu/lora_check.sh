#!/usr/bin/env bash
# An adapter on a GPU, by the program: a base is made on the CPU, then an adapter over it is trained
# on-policy, gone on with, and used. Fails unless sampler and trainer agree in every bit.
#   tests/gpu/lora_check.sh LEEWAY FOLDER [DEVICE]
set -euo pipefail
leeway=$1 folder=$2 device=${3:-cuda}
rm -rf "$folder"
mkdir -p "$folder"
"$leeway" train --set output_dir="$folder/base" --set model.head_dim=32 --set trainer.max_steps=1 \
  --set eval.every=0 --set eval.prompts=32 > "$folder/base.txt" 2>&1
cat > "$folder/lora.toml" <<TOML
output_dir = "$folder/run"
[model]
path = "$folder/base/weights/step_1"
tokenizer = "byte"
device = "$device"
[model.lora]
[[environment]]
name = "sort"
[trainer]
max_steps = 20
[trainer.loss]
preset = "icepop"
[orchestrator]
max_off_policy_steps = 0
[rollout]
max_new_tokens = 12
stop = "\n"
[eval]
every = 0
prompts = 32
[checkpoint]
every = 10
TOML
"$leeway" train "$folder/lora.toml"
"$leeway" train --resume "$folder/run" --set trainer.max_steps=25
adapter=$folder/run/weights/step_25
"$leeway" generate "$folder/base/weights/step_1" --adapter "$adapter" --device "$device" --prompt "dbca=" \
  --temperature 0 --max-new-tokens 6
precision=float32
[ "$device" = cpu ] || precision=bf16
"$leeway" logprobs "$adapter" --device "$device" --precision "$precision" --text "dbca=abcd"
"$leeway" eval "$folder/lora.toml" --adapter "$adapter"
python3 - "$folder/run/metrics.jsonl" <<'PYTHON'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
largest = max(row["mismatch_kl/all/max"] for row in rows)
print(f"{len(rows)} steps compared, mismatch_kl at most {largest}")
sys.exit(0 if len(rows) == 25 and largest == 0 else 1)
PYTHON
