"""Training steps of an adapter beside those of all weights, and sampling with either, and the same
steps by transformers with torch.compile and peft: runs gpu_lora_step and steps of model.py, writes
benchmarks/results/gpu_lora.json and prints the table.

  lora.py [--program BUILD/gpu_lora_step] [--models 135M 0.6B 8B] [--output FILE]
"""

import argparse
import importlib.util
import sys
import time

from common import add, context, table
from model import compiled_step, rows_of

METHOD = (
    "gpu_lora_step: passes in bf16, LoRA of rank 16 on all seven modules; trainer and engine of "
    "one process, at 8B the trainer's parts alone; 16,384 tokens in sequences of 1024 as one "
    "micro-batch, preset reinforce, AdamW in float32; all tokens but the first of a sequence are "
    "trained; medians of three steps after one. Sampling: 64 sequences of 32 + 128 tokens, the second time, CUDA graphs captured. "
    "swap is a snapshot of the trainer's weights, taken by the engine. allocated_gib is the peak "
    "of what torch allocates, with an engine (where with_engine) whose KV cache has 4 GiB. "
    "transformers: as many tokens, mean token loss, bf16, sdpa, each layer and the head with its "
    "loss compiled, adapters by peft in bf16, fused AdamW, no sampling; medians of three passes "
    "after two and of three optimizer steps after one, a process each")
# Model, rank (0: all weights), gradient checkpointing.
CASES = [("135M", 0, False), ("135M", 16, False), ("0.6B", 0, False), ("0.6B", 16, False),
         ("8B", 16, False), ("8B", 16, True), ("tiny", 16, False)]
SECONDS = 150  # of a step of transformers, in all


def name_of(row):
    if "gradient_checkpointing" not in row:
        return f"{row['model']}, {row['trained']}, recompute {row['recompute_activations']}"
    checkpointing = ", checkpointing" if row["gradient_checkpointing"] else ""
    return f"{row['model']}, {row['trained']}, {row['name']}{checkpointing}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program")
    parser.add_argument("--models", nargs="*", default=["135M", "0.6B", "8B"],
                        help="of transformers")
    parser.add_argument("--device", default="cuda", help="cpu: short sequences, for a test")
    parser.add_argument("--output", default="gpu_lora.json")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds in all")
    arguments = parser.parse_args()
    end = time.time() + arguments.limit
    results = {"context": context(METHOD), "rows": [], "failures": {}}

    def keep(name, rows, failure):
        add(results, arguments.output, name, rows, failure)

    if arguments.program:
        keep("gpu_lora_step", *rows_of([arguments.program], 170))
    there = {name for name in ("transformers", "peft") if importlib.util.find_spec(name)}
    for model, rank, checkpointing in CASES:
        if model not in arguments.models:
            continue
        if "transformers" not in there or (rank and "peft" not in there):
            print(f"  no transformers or no peft: {model}, rank {rank} is left out", flush=True)
            continue
        begin = time.time()
        small = {"length": 32, "device": "cpu"} if arguments.device == "cpu" else {}
        options = {"shape": model, "rank": rank, "checkpointing": checkpointing, "sequences": 16,
                   "length": 1024, "rounds": 3, "warm_ups": 1, **small}
        row, failure = compiled_step(min(SECONDS, end - begin), **options)
        print(f"  {name_of(row)}: {time.time() - begin:.0f} s", flush=True)
        keep(name_of(row), [row], failure)
    lines = []
    for row in results["rows"]:
        line = {**row, "name": name_of(row)}
        if "gradient_checkpointing" in row:
            line["allocated_gib"] = row.get("peak_gib")
            line["trained_tokens_per_second"] = row.get("tokens_per_second")
        if "step_seconds" in row:
            line["step_ms"] = row["step_seconds"] * 1e3
        if "forward_backward_seconds" in row:
            line["step_ms"] = 1e3 * (row["forward_backward_seconds"] + row["optimizer_seconds"])
        if "swap_seconds" in row:
            line["swap_ms"] = row["swap_seconds"] * 1e3
        lines.append(line)
    print(table("adapters beside all weights, 16,384 tokens a step",
                [("name", "", "s"), ("step_ms", "step ms", ".1f"),
                 ("trained_tokens_per_second", "trained tokens/s", ",.0f"),
                 ("sampled_tokens_per_second", "sampled tokens/s", ",.0f"),
                 ("swap_ms", "swap ms", ".2f"), ("allocated_gib", "allocated GiB", ".1f"),
                 ("reserved_gib", "reserved GiB", ".1f"), ("failure", "", "s")], lines))
    ours_failed = any("failure" in row for row in results["rows"]
                      if "gradient_checkpointing" not in row)
    sys.exit(1 if results["failures"] or ours_failed else 0)


if __name__ == "__main__":
    main()
