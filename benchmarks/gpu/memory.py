"""The memory of a training step of Qwen3's shapes, with every setting that saves it, and that of
transformers with torch.compile beside it: runs gpu_memory_table and steps of model.py, writes
benchmarks/results/gpu_memory.json and prints the table.

  memory.py [--program BUILD/gpu_memory_table] [--models 0.6B 1.7B 4B 8B] [--output FILE]

Without --program transformers alone, without --models' names ours alone."""

import argparse
import importlib.util
import sys
import time

from common import add, context, table
from model import compiled_step, rows_of

METHOD = (
    "gpu_memory_table: 16,384 tokens in sequences of 2048 as one micro-batch, passes in bf16, "
    "float32 weights and gradients; medians of three steps after one. used_gib "
    "is the memory of the device in use after the steps, CUDA's context and allocator caches "
    "included; computed_gib is what src/trainer/device_memory.h says before, without the context, "
    "to be set beside beyond_context_gib. transformers: the same tokens, weights, gradients and "
    "the fused AdamW's moments in bf16, sdpa, each layer and the head with its loss compiled, with "
    "and without gradient checkpointing of each layer; medians of three passes after two and of "
    "three optimizer steps after one, a process each")
SECONDS = 150  # of a step of transformers, in all


def transformers_rows(model, device, end):
    for checkpointing in (False, True):
        begin = time.time()
        small = {"length": 32, "device": device} if device == "cpu" else {}
        row, failure = compiled_step(min(SECONDS, end - begin), shape=model, rounds=3,
                                     warm_ups=1, checkpointing=checkpointing, **small)
        print(f"  {row['name']}, {model}: {time.time() - begin:.0f} s", flush=True)
        yield row, failure


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program")
    parser.add_argument("--models", nargs="*", default=["0.6B", "1.7B", "4B", "8B"])
    parser.add_argument("--device", default="cuda", help="cpu: short sequences, for a test")
    parser.add_argument("--output", default="gpu_memory.json")
    parser.add_argument("--limit", type=float, default=550.0, help="seconds in all")
    arguments = parser.parse_args()
    end = time.time() + arguments.limit
    results = {"context": context(METHOD), "rows": [], "failures": {}}

    def keep(name, rows, failure):
        add(results, arguments.output, name, rows, failure)

    if arguments.program:
        keep("gpu_memory_table", *rows_of([arguments.program], 125))
    if importlib.util.find_spec("transformers") is None:
        print("  no transformers: its rows are left out", flush=True)
        arguments.models = []
    for model in arguments.models:
        for row, failure in transformers_rows(model, arguments.device, end):
            keep(f"transformers, {model}, {row['gradient_checkpointing']}", [row], failure)
    lines = []
    for row in results["rows"]:
        line = dict(row)
        if "gradient_checkpointing" in row:
            line["name"] = f"{row['model']}, {row['name']}"
            line["name"] += ", checkpointing" if row["gradient_checkpointing"] else ""
            line["allocated_gib"] = row.get("peak_gib")
        else:
            line["name"] = (f"{row['model']}, {row['optimizer_state']}, "
                            f"{row['recompute_activations']}")
        if "used_gib" in row and "computed_gib" in row:
            line["off_by"] = row["computed_gib"] / row["beyond_context_gib"] - 1
        if "forward_backward_seconds" in row:
            line["pass_ms"] = row["forward_backward_seconds"] * 1e3
            line["step_ms"] = row["optimizer_seconds"] * 1e3
        lines.append(line)
    print(table("memory of a training step, 16,384 tokens",
                [("name", "", "s"), ("used_gib", "used GiB", ".1f"),
                 ("beyond_context_gib", "of it ours", ".1f"), ("computed_gib", "computed", ".1f"),
                 ("off_by", "off by", "+.1%"), ("allocated_gib", "allocated", ".1f"),
                 ("pass_ms", "fwd+bwd ms", ".0f"), ("step_ms", "step ms", ".1f"),
                 ("failure", "", "s")], lines))
    sys.exit(1 if results["failures"] else 0)


if __name__ == "__main__":
    main()
