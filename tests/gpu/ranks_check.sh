#!/usr/bin/env bash
# Ranks that share one GPU by NCCL, and one process, train the same steps: losses and norms of the
# gradient must agree within 1e-3, with each trainer.sharding. Two ranks of the program, supervised;
# afterwards both sample and train. Then one, two and four of gpu_ranks_steps beside the program, where
# the memory between two steps must be the computed one within 5 %. NCCL takes ranks of one device only
# if their hosts differ.
#   tests/gpu/ranks_check.sh LEEWAY FOLDER [DEVICE]
set -euo pipefail
leeway=$1 folder=$2 device=${3:-cuda}
steps=$(dirname "$leeway")/gpu_ranks_steps
rm -rf "$folder"
mkdir -p "$folder"
options=(--set model.device="$device" --set sft.max_steps=5 --set trainer.max_steps=2 --set eval.every=0
  --set eval.prompts=32 --set rollout.kv_bytes=268435456)
"$leeway" train "${options[@]}" --set output_dir="$folder/one" > "$folder/one.txt" 2>&1

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
for sharding in optimizer weights; do
  [ "$device" = cuda ] || [ "$sharding" = optimizer ] || continue
  sharded=()
  [ "$device" = cuda ] && sharded=(--set trainer.sharding="$sharding")
  ranks 2 "two_$sharding" "$leeway" train "${options[@]}" "${sharded[@]}" --set output_dir="$folder/$sharding"
done
if [ "$device" = cuda ] && [ -x "$steps" ]; then
  "$steps" --steps 3 > "$folder/steps_1_optimizer.jsonl" 2> "$folder/steps_1.err"
  for count in 2 4; do
    for sharding in optimizer weights; do
      ranks "$count" "steps_${count}_$sharding" "$steps" --steps 3 --sharding "$sharding"
    done
  done
fi
python3 - "$folder" <<'PYTHON'
import glob, json, os, sys
folder, failed = sys.argv[1], False
read = lambda file: [json.loads(line) for line in open(f"{folder}/{file}") if line.startswith("{")]
def compare(name, one, many, count):
    global failed
    worst = max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(one, many) for key in ("loss", "grad_norm"))
    print(f"{name}: {len(many)} steps compared with one process, {worst:.1e} apart at most")
    failed |= not (len(one) == len(many) == count and worst < 1e-3)
one = read("one/sft.jsonl")[:5]
for sharding in ("optimizer", "weights"):
    if not os.path.exists(f"{folder}/{sharding}"): continue
    compare(f"two ranks, {sharding}", one, read(f"{sharding}/sft.jsonl")[:5], 5)
    failed |= len(read(f"{sharding}/metrics.jsonl")) != 2
for file in sorted(glob.glob(f"{folder}/steps_*.jsonl")):
    name = os.path.basename(file)
    rows = read(name)
    compare(name, read("steps_1_optimizer.jsonl"), rows, 3)
    allocated, computed = rows[-1]["allocated_gib"], rows[-1]["computed_gib"]
    print(f"{name}: {allocated:.3f} GiB between two steps, {computed:.3f} computed")
    failed |= abs(allocated - computed) > 0.05 * computed
sys.exit(failed)
PYTHON
