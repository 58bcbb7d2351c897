#!/usr/bin/env bash
# Ranks that share one GPU by NCCL, and one process, train the same steps: losses and norms of the
# gradient must agree within 1e-3. Of all weights, with each trainer.sharding, by two ranks of the
# program, supervised; afterwards both sample and train. Of an adapter over a base that is made on the
# CPU: there sampler and trainer must agree in every bit too, and one process goes on from what two
# ranks have saved in parts. Then one, two and four of gpu_ranks_steps beside the program, where the
# memory between two steps must be the computed one within 5 %. NCCL takes ranks of one device only if
# their hosts differ.
#   tests/gpu/ranks_check.sh LEEWAY FOLDER [DEVICE]
set -euo pipefail
leeway=$1 folder=$2 device=${3:-cuda}
steps=$(dirname "$leeway")/gpu_ranks_steps
rm -rf "$folder"
mkdir -p "$folder"

export MASTER_ADDR=127.0.0.1 NCCL_SOCKET_IFNAME=lo CUDA_VISIBLE_DEVICES=0
# ranks COUNT NAME COMMAND..: the command on so many ranks; rank R writes NAME_R.txt, rank 0 prints to NAME.jsonl.
ranks() {
  local count=$1 name=$2 port others=()
  shift 2
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  for ((rank = count - 1; rank >= 0; rank--)); do
    local output="$folder/${name}_$rank.txt"
    [ "$rank" -eq 0 ] && output="$folder/$name.jsonl"
    WORLD_SIZE=$count LOCAL_WORLD_SIZE=$count MASTER_PORT=$port RANK=$rank LOCAL_RANK=$rank NCCL_HOSTID=host$rank \
      "$@" > "$output" 2> "$folder/${name}_$rank.err" &
    others+=($!)
  done
  for process in "${others[@]}"; do
    wait "$process" || { cat "$folder/${name}"_*; exit 1; }
  done
}
# NAME ARGUMENT ..: leeway train by one process, to FOLDER/NAME_one, and by two ranks, to FOLDER/NAME_two
one() {
  "$leeway" train "${@:2}" --set output_dir="$folder/$1_one" > "$folder/$1_one.txt" 2>&1 ||
    { cat "$folder/$1_one.txt"; exit 1; }
}
two() {
  ranks 2 "$1_ranks" "$leeway" train "${@:2}" --set output_dir="$folder/$1_two"
}

options=(--set model.device="$device" --set eval.every=0 --set eval.prompts=32 --set rollout.kv_bytes=268435456)
whole=("${options[@]}" --set sft.max_steps=5 --set trainer.max_steps=2)
one whole "${whole[@]}"
two whole "${whole[@]}"
[ "$device" != cuda ] || two sharded "${whole[@]}" --set trainer.sharding=weights

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

if [ "$device" = cuda ] && [ -x "$steps" ]; then
  "$steps" --steps 3 > "$folder/steps_1_optimizer.jsonl" 2> "$folder/steps_1.err"
  for count in 2 4; do
    for sharding in optimizer weights; do
      ranks "$count" "steps_${count}_$sharding" "$steps" --steps 3 --sharding "$sharding"
    done
  done
fi

python3 - "$folder" "$parts" <<'PYTHON'
import glob, json, os, sys
folder, parts = sys.argv[1], int(sys.argv[2])
read = lambda file: [json.loads(line) for line in open(f"{folder}/{file}") if line.startswith("{")]
failed = False

def check(is_right, text):
    global failed
    print(("ok    " if is_right else "WRONG ") + text)
    failed = failed or not is_right

# A loss of an on-policy batch may be about zero: then the difference itself counts.
def compare(name, one, many, steps, keys=("loss", "grad_norm")):
    one, many = read(one)[:steps], read(many)[:steps]
    worst = max(abs(a[key] - b[key]) / max(abs(a[key]), 1.0 if key == "loss" else 0.0)
                for a, b in zip(one, many) for key in keys)
    check(len(one) == len(many) == steps and worst < 1e-3,
          f"{name}: {len(many)} steps compared with one process, {worst:.1e} apart at most")

for name in ("whole", "sharded"):
    if not os.path.exists(f"{folder}/{name}_two"): continue
    compare(f"two ranks, {name}", "whole_one/sft.jsonl", f"{name}_two/sft.jsonl", 5)
    check(len(read(f"{name}_two/metrics.jsonl")) == 2, f"two ranks sample and train, {name}")
compare("an adapter, supervised", "sft_one/sft.jsonl", "sft_two/sft.jsonl", 5, ("loss",))
compare("an adapter, supervised", "sft_one/sft.jsonl", "sft_two/sft.jsonl", 1)
compare("an adapter", "rl_one/metrics.jsonl", "rl_two/metrics.jsonl", 1)
for name, steps in (("rl_one", 3), ("rl_two", 5), ("sft_one", 1), ("sft_two", 1)):
    rows = read(f"{name}/metrics.jsonl")
    largest = max(row["mismatch_kl/all/max"] for row in rows)
    check(len(rows) == steps and largest == 0, f"{name}: {len(rows)} steps, mismatch_kl at most {largest}")
check(parts > 0, f"the adapter of two ranks is saved in {parts} parts, which one process went on from")
for file in sorted(glob.glob(f"{folder}/steps_*.jsonl")):
    name = os.path.basename(file)
    compare(name, "steps_1_optimizer.jsonl", name, 3)
    last = read(name)[-1]
    allocated, computed = last["allocated_gib"], last["computed_gib"]
    check(abs(allocated - computed) <= 0.05 * computed,
          f"{name}: {allocated:.3f} GiB between two steps, {computed:.3f} computed")
sys.exit(1 if failed else 0)
PYTHON
