"""Steps of `leeway train` on a GPU, by the run's own time/*: sampling and training alone (lag 0)
and beside each other (lag 1), for two models and two lengths of answers.

  python3 benchmarks/gpu/loop.py --program BUILD/leeway [--models 135M 0.6B 8B]
          [--tokens 16 512] [--lags 0 1] [--steps N] [--output FILE]

Weights are random, so that answers have the greatest length, and a reward falls to about half of
them by their first token, so that weights move. A cell fails where they do not, where sampler and
trainer differ at lag 0, and where they do not differ at lag 1. A run is ended when it has its
steps. 8B, which is not among the models without --models, trains all weights with int8 moments.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

from shapes import SHAPES

# Rollouts of a batch: prompts x 8. The larger model with long answers has fewer, so that its cells
# take as long as the others.
PROMPTS = {("0.6B", 512): 16, ("8B", 16): 16}
# What a model needs to fit one GPU of 141 GB.
TRAINER = {"8B": 'optimizer_state = "int8"\nrecompute_activations = "layer"\n'}
# Before these the trainer chooses its algorithms, and whether it leaves room to the sampler.
FIRST = 5
METHOD = ("medians over the steps from the sixth on, in ms, from metrics.jsonl; lag 0: sampling "
          "and training take turns, so its sample and train are those of each alone; bound: the "
          "longer of both alone; mismatch_kl: the largest, grad_norm: the smallest of all steps; "
          "run_seconds: from the program's start until its last step is in the file, to 0.1 s")
NAMES = ["step", "sample", "train", "forward_backward", "optim_step", "snapshot", "load_weights",
         "wait_for_trainer", "wait_for_batch", "prepare_batch", "report", "other", "train_other"]

# What docs/runs.md says adds up: a time and its parts.
SUMS = {"step": ["sample", "wait_for_environments", "prepare_batch", "report", "checkpoint",
                 "wait_for_trainer", "other"],
        "train": ["forward_backward", "optim_step", "prox_forward", "ref_forward",
                  "teacher_forward", "snapshot", "train_other"]}


def largest_gap(rows):
    """The most that a time differs from the sum of its parts, in ms."""
    return max(1e3 * abs(row[f"time/{whole}"] - sum(row.get(f"time/{part}", 0.0) for part in parts))
               for row in rows for whole, parts in SUMS.items())


def tensors_of(shape):
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    for i in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield layer + f"self_attn.{name}_proj.weight", (rows * dim, hidden)
        if shape["model_type"] == "qwen3":
            yield layer + "self_attn.q_norm.weight", (dim,)
            yield layer + "self_attn.k_norm.weight", (dim,)
        yield layer + "self_attn.o_proj.weight", (hidden, heads * dim)
        for name in ("gate", "up"):
            yield layer + f"mlp.{name}_proj.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (shape["vocab_size"], hidden)


def write_tokenizer(folder, size):
    """Byte-level BPE without merges: 256 bytes, and words that a text is never cut into."""
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain}
    names.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    vocabulary = {names[byte]: byte for byte in range(256)}
    for i in range(256, size):
        vocabulary["w" + str(i)] = i
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    with open(os.path.join(folder, "tokenizer.json"), "w") as file:
        json.dump({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
                   "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
                   "decoder": byte_level,
                   "model": {"type": "BPE", "dropout": None, "unk_token": None,
                             "continuing_subword_prefix": None, "end_of_word_suffix": None,
                             "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
                             "merges": []}}, file)


def write_model(folder, shape):
    """A Hugging Face folder with random weights in bf16: parts of one long row of numbers."""
    os.makedirs(folder)
    write_tokenizer(folder, shape["vocab_size"])
    config = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
              "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16", **shape}
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    rng = numpy.random.default_rng(1)
    numbers = rng.standard_normal(1 << 22, dtype=numpy.float32) * 0.02
    numbers = (numbers.view(numpy.uint32) >> 16).astype(numpy.uint16)
    one = numpy.uint16(0x3f80)
    header, offset = {}, 0
    for name, dims in tensors_of(shape):
        size = 2 * int(numpy.prod(dims))
        header[name] = {"dtype": "BF16", "shape": list(dims),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dims in tensors_of(shape):
            count = int(numpy.prod(dims))
            if len(dims) == 1:
                file.write(numpy.full(count, one).tobytes())
                continue
            shift = int(rng.integers(1 << 22))
            for begin in range(0, count, 1 << 22):
                part = numpy.roll(numbers, shift + begin // 7)
                file.write(part[:min(count - begin, 1 << 22)].tobytes())


# Right if the first token is a word with an even number: neither length nor prompt has a say.
EVEN = r"^w\d*[02468](?!\d)"


def write_prompts(path):
    """Letters as those of the environment `sort`."""
    rng = random.Random(1)
    with open(path, "w") as file:
        for _ in range(4096):
            letters = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randint(4, 8))
            file.write(json.dumps({"prompt": "".join(letters) + "=", "answer": EVEN}) + "\n")


CONFIG = """
output_dir = "{folder}/run"
[model]
path = "{folder}/model"
device = "{device}"
[[environment]]
name = "jsonl"
data = "{folder}/prompts.jsonl"
verifier = "regex"
[trainer]
max_steps = 100000
learning_rate = 1e-6
{trainer}[orchestrator]
prompts_per_batch = {prompts}
group_size = 8
max_off_policy_steps = {lag}
filter_zero_advantages = false
[rollout]
max_new_tokens = {tokens}
stop = "\\n"
max_sequences = {sequences}
kv_bytes = {kv_bytes}
[eval]
prompts = 1
[checkpoint]
every = 0
"""


def run_cell(program, folder, shape, cell, steps, limit, device):
    """Rows of metrics.jsonl, the seconds until they were there, and what went wrong."""
    sequences = 8 * cell["prompts"]
    block = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    kv_bytes = 2 * sequences * (cell["tokens"] + 64) * block
    config = os.path.join(folder, "config.toml")
    shutil.rmtree(os.path.join(folder, "run"), ignore_errors=True)
    with open(config, "w") as file:
        file.write(CONFIG.format(folder=folder, device=device, sequences=2 * sequences,
                                 kv_bytes=kv_bytes, trainer=TRAINER.get(cell["model"], ""),
                                 **{k: cell[k] for k in ("prompts", "lag", "tokens")}))
    log = open(os.path.join(folder, "log.txt"), "w+")
    begin = time.time()
    process = subprocess.Popen([program, "train", config], stdout=log, stderr=log)
    metrics = os.path.join(folder, "run", "metrics.jsonl")
    rows = []
    try:
        while len(rows) < steps and process.poll() is None and time.time() < begin + limit:
            time.sleep(0.1)
            if os.path.exists(metrics):
                with open(metrics) as file:
                    rows = [json.loads(line) for line in file if line.endswith("\n")]
        seconds = time.time() - begin
    finally:
        process.kill()
        process.wait()
    if len(rows) >= steps:
        return rows, seconds, ""
    log.seek(0)
    return rows, seconds, f"{len(rows)} of {steps} steps: " + log.read()[-600:]


def row_of(name, cell, rows, seconds):
    row = {"name": name, **cell}
    for key in NAMES:
        values = [r[f"time/{key}"] for r in rows[FIRST:] if f"time/{key}" in r]
        row[key] = 1e3 * statistics.median(values) if values else None
    row["sampled_tokens_per_second"] = statistics.median(
        r["perf/sampled_tokens_per_second"] for r in rows[FIRST:])
    row["mismatch_kl"] = max(r["mismatch_kl/all/max"] for r in rows)
    row["grad_norm"] = min(r["grad_norm"] for r in rows)
    row["run_seconds"] = seconds
    row["leaves_room"] = rows[-1].get("perf/trainer_leaves_room", 0.0)
    row["gap"] = largest_gap(rows[FIRST:])
    row["over_own"] = row["step"] / max(row["sample"], row["train"])
    return row


def wrong_in(row):
    if not row["grad_norm"] > 0.0:
        return "a step has no gradient: weights stay what they are"
    if row["lag"] == 0 and row["mismatch_kl"] != 0.0:
        return f"mismatch_kl is {row['mismatch_kl']} at lag 0: sampler and trainer differ"
    if row["lag"] > 0 and not row["mismatch_kl"] > 0.0:
        return "mismatch_kl is 0 with a lag: the sampler's weights are the trainer's"
    return ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--models", nargs="*", default=["135M", "0.6B"], choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[16, 512])
    parser.add_argument("--lags", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a cell")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", default="gpu_loop.json")
    arguments = parser.parse_args()
    if arguments.steps <= FIRST:
        parser.error(f"--steps {arguments.steps}: medians begin after step {FIRST}")
    from common import context, table, write
    results = {"context": context(METHOD) if arguments.device == "cuda" else {"method": METHOD},
               "rows": [], "failures": {}}
    folder = tempfile.mkdtemp(prefix="leeway_loop_")
    write_prompts(os.path.join(folder, "prompts.jsonl"))
    try:
        for model in arguments.models:
            shutil.rmtree(os.path.join(folder, "model"), ignore_errors=True)
            write_model(os.path.join(folder, "model"), SHAPES[model])
            for tokens in arguments.tokens:
                alone = None
                for lag in arguments.lags:
                    cell = {"model": model, "tokens": tokens, "lag": lag,
                            "prompts": PROMPTS.get((model, tokens), 64)}
                    rows, seconds, failure = run_cell(
                        arguments.program, folder, SHAPES[model], cell, arguments.steps,
                        arguments.limit, arguments.device)
                    name = f"{model}, {tokens} tokens, lag {lag}"
                    print(f"  {name}: {seconds:.0f} s", flush=True)
                    row = row_of(name, cell, rows, seconds) if not failure else None
                    failure = failure or wrong_in(row)
                    if failure:
                        results["failures"][name] = failure
                        print(f"  {name}: {failure}", flush=True)
                        write(arguments.output, results)
                    if row is None:
                        continue
                    if lag == 0:
                        alone = row
                    elif alone:
                        row["bound"] = max(alone["sample"], alone["train"])
                        row["sum"] = alone["sample"] + alone["train"]
                        row["over_bound"] = row["step"] / row["bound"]
                        row["over_sum"] = row["step"] / row["sum"]
                    results["rows"].append(row)
                    write(arguments.output, results)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    columns = [("name", "", "s")] + [(key, key, ".1f") for key in NAMES] + [
        ("leaves_room", "leaves room", ".0f"), ("over_own", "step/own longer", ".2f"),
        ("gap", "time/* off by", ".2f"),
        ("bound", "longer alone", ".1f"), ("sum", "sum alone", ".1f"),
        ("over_bound", "step/longer", ".2f"), ("over_sum", "step/sum", ".2f"),
        ("sampled_tokens_per_second", "tokens/s", ",.0f"), ("mismatch_kl", "mismatch", ".1e"),
        ("grad_norm", "grad_norm", ".1e"), ("run_seconds", "run, s", ".1f")]
    print(table("steps of the loop, ms", columns, results["rows"]))
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
