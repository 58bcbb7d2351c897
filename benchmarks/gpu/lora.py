"""Training steps of an adapter beside those of all weights, and sampling with either: runs
gpu_lora_step, writes benchmarks/results/gpu_lora.json and prints the table."""

import argparse
import sys

from common import context, table, write
from model import rows_of

METHOD = (
    "gpu_lora_step: passes in bf16, LoRA of rank 16 on all seven modules; trainer and engine of one process, "
    "at 8B the trainer's parts alone; 16,384 tokens in sequences of 1024 as one micro-batch, preset reinforce, AdamW in float32; "
    "one step to warm up, then three, the fastest counts. Sampling: 64 sequences of 32 + 128 tokens, the "
    "second time, CUDA graphs captured. swap is a snapshot of the trainer's weights, taken by the engine. "
    "allocated_gib is the peak of what torch allocates, with an engine (where with_engine) whose KV cache has "
    "4 GiB.")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--output", default="gpu_lora.json")
    arguments = parser.parse_args()
    rows, failure = rows_of([arguments.program], 170)
    results = {"context": context(METHOD), "rows": rows, "failures": {}}
    if failure:
        results["failures"]["gpu_lora_step"] = failure
        print(f"  gpu_lora_step: {failure}", flush=True)
    write(arguments.output, results)
    for row in rows:
        row["name"] = f"{row['model']}, {row['trained']}, recompute {row['recompute_activations']}"
        if "step_seconds" in row:
            row["step_ms"] = row["step_seconds"] * 1e3
        if "swap_seconds" in row:
            row["swap_ms"] = row["swap_seconds"] * 1e3
    print(table("adapters beside all weights, 16,384 tokens a step",
                [("name", "", "s"), ("step_ms", "step ms", ".1f"),
                 ("trained_tokens_per_second", "trained tokens/s", ",.0f"),
                 ("sampled_tokens_per_second", "sampled tokens/s", ",.0f"),
                 ("swap_ms", "swap ms", ".2f"), ("allocated_gib", "allocated GiB", ".1f"),
                 ("reserved_gib", "reserved GiB", ".1f")], rows))
    sys.exit(1 if failure or any("failure" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
