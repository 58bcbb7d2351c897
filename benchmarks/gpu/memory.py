"""The memory of a training step of Qwen3's shapes, with every setting that saves it: runs
gpu_memory_table, writes benchmarks/results/gpu_memory.json and prints the table."""

import argparse
import sys

from common import context, table, write
from model import rows_of

METHOD = (
    "gpu_memory_table: 16,384 tokens in sequences of 2048 as one micro-batch, passes in bf16, float32 "
    "weights and gradients; one step to warm up, then two, the faster one counts. used_gib is the memory "
    "of the device in use after the steps, CUDA's context and allocator caches included; "
    "computed_gib is what src/trainer/device_memory.h says before, without the context, to be set "
    "beside beyond_context_gib.")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--output", default="gpu_memory.json")
    arguments = parser.parse_args()
    rows, failure = rows_of([arguments.program], 110)
    results = {"context": context(METHOD), "rows": rows, "failures": {}}
    if failure:
        results["failures"]["gpu_memory_table"] = failure
        print(f"  gpu_memory_table: {failure}", flush=True)
    write(arguments.output, results)
    for row in rows:
        row["name"] = (f"{row['model']}, {row['optimizer_state']}, "
                       f"{row['recompute_activations']}")
        if "used_gib" in row:
            row["off_by"] = row["computed_gib"] / row["beyond_context_gib"] - 1
            row["pass_ms"] = row["forward_backward_seconds"] * 1e3
            row["step_ms"] = row["optimizer_seconds"] * 1e3
    print(table("memory of a training step, 16,384 tokens",
                [("name", "", "s"), ("used_gib", "used GiB", ".1f"),
                 ("beyond_context_gib", "of it ours", ".1f"), ("computed_gib", "computed", ".1f"),
                 ("off_by", "off by", "+.1%"), ("allocated_gib", "allocated", ".1f"),
                 ("pass_ms", "fwd+bwd ms", ".0f"), ("step_ms", "step ms", ".1f")], rows))
    sys.exit(1 if failure else 0)


if __name__ == "__main__":
    main()
