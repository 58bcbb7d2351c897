#!/usr/bin/env bash
# Two ranks that share one GPU by NCCL, and one process, train the same steps: losses and norms of the
# gradient must agree within 1e-3; afterwards both sample and train. Of all weights, then of an adapter
# over a base that is made on the CPU: there sampler and trainer must agree in every bit too, and one
# process goes on from what two ranks have saved in parts. NCCL takes ranks of one device only if their
# hosts differ.
#   tests/gpu/ranks_check.sh LEEWAY FOLDER [DEVICE]
set -euo pipefail
leeway=$1 folder=$2 device=${3:-cuda}
rm -rf "$folder"
mkdir -p "$folder"

# NAME ARGUMENT ..: leeway train by one process, to FOLDER/NAME_one
one() {
  "$leeway" train "${@:2}" --set output_dir="$folder/$1_one" > "$folder/$1_one.txt" 2>&1 ||
    { cat "$folder/$1_one.txt"; exit 1; }
}
# RANK NAME ARGUMENT ..
rank() {
  RANK=$1 LOCAL_RANK=$1 NCCL_HOSTID=host$1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 \
    MASTER_PORT=$port NCCL_SOCKET_IFNAME=lo CUDA_VISIBLE_DEVICES=0 \
    "$leeway" train "${@:3}" --set output_dir="$folder/$2_two" > "$folder/$2_rank_$1.txt" 2>&1
}
# NAME ARGUMENT ..: the same by two ranks, to FOLDER/NAME_two
two() {
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  rank 1 "$@" &
  rank 0 "$@" || { cat "$folder/$1"_rank_*.txt; exit 1; }
  wait
}

options=(--set model.device="$device" --set eval.every=0 --set eval.prompts=32 --set rollout.kv_bytes=268435456)
whole=("${options[@]}" --set sft.max_steps=5 --set trainer.max_steps=2)
one whole "${whole[@]}"
two whole "${whole[@]}"

"$leeway" train --set output_dir="$folder/base" --set model.head_dim=32 --set trainer.max_steps=1 \
  --set eval.every=0 --set eval.prompts=32 > "$folder/base.txt" 2>&1
cat > "$folder/adapter.toml" <<TOML
output_dir = "$folder/run"
[model]
path = "$folder/base/weights/step_1"
tokenizer = "byte"
[model.lora]
[[environment]]
name = "sort"
[trainer]
max_steps = 3
[trainer.loss]
preset = "icepop"
[orchestrator]
max_off_policy_steps = 0
[rollout]
max_new_tokens = 12
stop = "\n"
TOML
# From the base on, so that both sample the same; and after supervised steps.
for each in rl sft; do
  adapter=("$folder/adapter.toml" "${options[@]}")
  [ "$each" = rl ] || adapter+=(--set sft.max_steps=5 --set trainer.max_steps=1)
  one "$each" "${adapter[@]}"
  two "$each" "${adapter[@]}"
done
parts=$(find "$folder/rl_two/checkpoints/step_3" -name 'adapter_model-0000?-of-00002.safetensors' | wc -l)
"$leeway" train --resume "$folder/rl_two" --set trainer.max_steps=5 > "$folder/resumed.txt" 2>&1 ||
  { cat "$folder/resumed.txt"; exit 1; }

python3 - "$folder" "$parts" <<'PYTHON'
import json, sys
folder, parts = sys.argv[1], int(sys.argv[2])
read = lambda file: [json.loads(line) for line in open(f"{folder}/{file}")]
failed = False

def check(is_right, text):
    global failed
    print(("ok    " if is_right else "WRONG ") + text)
    failed = failed or not is_right

# A loss of an on-policy batch may be about zero: then the difference itself counts.
def compare(name, file, steps, keys):
    one, two = read(f"{name}_one/{file}")[:steps], read(f"{name}_two/{file}")[:steps]
    worst = max(abs(a[key] - b[key]) / max(abs(a[key]), 1.0 if key == "loss" else 0.0)
                for a, b in zip(one, two) for key in keys)
    check(len(one) == len(two) == steps and worst < 1e-3,
          f"{name}/{file}: {len(two)} steps of two ranks compared with one: {worst:.1e} apart at most")

compare("whole", "sft.jsonl", 5, ("loss", "grad_norm"))
check(len(read("whole_two/metrics.jsonl")) == 2, "two ranks sample and train all weights")
compare("sft", "sft.jsonl", 5, ("loss",))
compare("sft", "sft.jsonl", 1, ("loss", "grad_norm"))
compare("rl", "metrics.jsonl", 1, ("loss", "grad_norm"))
for name, steps in (("rl_one", 3), ("rl_two", 5), ("sft_one", 1), ("sft_two", 1)):
    rows = read(f"{name}/metrics.jsonl")
    largest = max(row["mismatch_kl/all/max"] for row in rows)
    check(len(rows) == steps and largest == 0, f"{name}: {len(rows)} steps, mismatch_kl at most {largest}")
check(parts > 0, f"the adapter of two ranks is saved in {parts} parts, which one process went on from")
sys.exit(1 if failed else 0)
PYTHON
