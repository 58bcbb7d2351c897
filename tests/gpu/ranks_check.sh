#!/usr/bin/env bash
# Two ranks that share one GPU by NCCL, and one process, train the same supervised steps: losses and
# norms of the gradient must agree within 1e-3; afterwards both sample and train. NCCL takes ranks of
# one device only if their hosts differ.
#   tests/gpu/ranks_check.sh LEEWAY FOLDER [DEVICE]
set -euo pipefail
leeway=$1 folder=$2 device=${3:-cuda}
rm -rf "$folder"
mkdir -p "$folder"
options=(--set model.device="$device" --set sft.max_steps=5 --set trainer.max_steps=2 --set eval.every=0
  --set eval.prompts=32 --set rollout.kv_bytes=268435456)
"$leeway" train "${options[@]}" --set output_dir="$folder/one" > "$folder/one.txt" 2>&1

export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 NCCL_SOCKET_IFNAME=lo CUDA_VISIBLE_DEVICES=0
MASTER_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export MASTER_PORT
rank() {
  RANK=$1 LOCAL_RANK=$1 NCCL_HOSTID=host$1 "$leeway" train "${options[@]}" --set output_dir="$folder/two"
}
rank 1 > "$folder/rank_1.txt" 2>&1 &
rank 0 > "$folder/rank_0.txt" 2>&1 || { cat "$folder"/rank_*.txt; exit 1; }
wait
python3 - "$folder" <<'PYTHON'
import json, sys
read = lambda file: [json.loads(line) for line in open(f"{sys.argv[1]}/{file}")]
one, two = read("one/sft.jsonl")[:5], read("two/sft.jsonl")[:5]
worst = max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(one, two) for key in ("loss", "grad_norm"))
print(f"{len(two)} steps of two ranks compared with one: {worst:.1e} apart at most")
sys.exit(0 if len(one) == len(two) == 5 and len(read("two/metrics.jsonl")) == 2 and worst < 1e-3 else 1)
PYTHON
