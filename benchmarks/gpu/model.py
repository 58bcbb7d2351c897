"""A Qwen3-shaped model of 0.6 billion random parameters: a training step of 8 x 2048 tokens and
sampling of 256 sequences, in transformers and in ours (gpu_model_benchmark).

  model.py [--program BUILD/gpu_model_benchmark] [--output FILE] [--only PART ..]

Every part runs in a process of its own with a limit of time; what it has printed until then counts.
memory.py and lora.py take transformers' training step from here, with other --options.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time

from shapes import SHAPES

SEQUENCES, LENGTH = 8, 2048
PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 256, 128, 128
CONFIG = {
    **SHAPES["0.6B"], "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "hidden_act": "silu",
    "attention_bias": False,
}
METHOD = ("medians of 5 steps after 2 warm-ups, by the host's clock with the device's work done; "
          "forward and backward of the mean token loss, all tokens trained; transformers: bf16 "
          "weights, sdpa, fused AdamW on bf16; ours: bf16 with float32 masters, gradients and "
          "moments; sampling at temperature 1: new tokens over the whole time, prompts included; "
          "used_gib: of the device, allocators' caches included; of transformers' training after a "
          "last pass beside the optimizer's moments")
# Seconds per stage.
LIMITS = {"train_eager": 60, "train_compiled": 120, "sample": 60, "sample_compiled": 120,
          "ours_train": 100, "ours_train_int8": 60, "ours_sample": 70, "ours_table": 100,
          "ours_precision": 110}
# What runs without --only, within the limit that run.sh has for it: transformers' compiled sampling
# did not end within 90 s.
USUAL = ["train_compiled", "ours_train", "ours_train_int8", "ours_sample", "ours_table",
         "ours_precision"]
# Sequences, tokens of a prompt, new tokens: what `ours_table` samples.
TABLE = [(32, 128, 128), (64, 128, 128), (128, 128, 128), (256, 128, 128), (512, 128, 128),
         (1024, 128, 128), (256, 1920, 128), (64, 8064, 128), (8, 32640, 128)]


def emit(row):
    print(json.dumps(row), flush=True)


def used_gib():
    import torch
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / float(1 << 30)


def make_model(shape="0.6B", device="cuda"):
    import torch
    import transformers
    values = {**CONFIG, **SHAPES[shape]}
    config = transformers.AutoConfig.for_model(
        values["model_type"],
        **{k: v for k, v in values.items() if k not in ("architectures", "model_type")})
    with torch.device(device):
        try:
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa")
        except TypeError:  # the argument's older name
            return transformers.AutoModelForCausalLM.from_config(
                config, torch_dtype=torch.bfloat16, attn_implementation="sdpa")


def synchronize():
    import torch
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(run, rounds=5, warm_ups=2):
    times = []
    for i in range(warm_ups + rounds):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        if i >= warm_ups:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def train(compiled, shape="0.6B", sequences=SEQUENCES, length=LENGTH, checkpointing=False, rank=0,
          rounds=5, warm_ups=2, device="cuda"):
    """`compiled`: each layer, and the head with its loss, which is where compiling pays. A `rank`
    above 0: an adapter of peft on all linear modules of the layers instead of all weights."""
    import torch
    import torch.nn.functional as F
    torch.manual_seed(1)
    model = make_model(shape, device)
    model.train()
    if rank:
        import peft
        # In place: the modules of `model` are replaced, and what is not the adapter's is frozen.
        # In bf16 as everything else: by itself peft makes adapters of bf16 models in float32.
        peft.get_peft_model(model, peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=[
                "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
            autocast_adapter_dtype=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    vocabulary = SHAPES[shape]["vocab_size"]
    ids = torch.randint(vocabulary, (sequences, length), device=device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def head_loss(hidden, weight, ids):
        logits = hidden[:, :-1].flatten(0, 1) @ weight.t()
        return F.cross_entropy(logits.float(), ids[:, 1:].flatten())

    if compiled:
        # If each layer counted as a recompilation, the rest would silently stay eager.
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile()
        head_loss = torch.compile(head_loss, dynamic=False)

    def forward_backward():
        model.zero_grad(set_to_none=True)
        if compiled:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            loss = head_loss(hidden, model.lm_head.weight, ids)
        else:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    begin = time.perf_counter()
    forward_backward()
    synchronize()
    first = time.perf_counter() - begin
    passes = median_seconds(forward_backward, rounds, warm_ups)
    step = median_seconds(optimizer.step, rounds, warm_ups)
    # The memory is that of a pass beside the optimizer's moments, as in every step but the first.
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    forward_backward()
    synchronize()
    peak = torch.cuda.max_memory_allocated() / float(1 << 30)
    tokens = sequences * length
    emit({"name": "transformers, train" + (", torch.compile" if compiled else ""), "model": shape,
          "trained": "adapter" if rank else "all weights", "gradient_checkpointing": checkpointing,
          "trained_numbers": sum(p.numel() for p in trained),
          "tokens": tokens, "forward_backward_seconds": passes, "optimizer_seconds": step,
          "tokens_per_second": tokens / (passes + step),
          "forward_backward_tokens_per_second": tokens / passes, "peak_gib": peak,
          "used_gib": used_gib(), "first_step_seconds": first})


def sample(compiled):
    """transformers' generate. `compiled`: with a static cache, for which it compiles the decode step
    by itself; in a process of its own, since that may take longer than its limit."""
    import torch
    torch.manual_seed(1)
    model = make_model().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.randint(CONFIG["vocab_size"], (PROMPTS, PROMPT_LENGTH), device="cuda")
    mask = torch.ones_like(ids)

    def generate(new_tokens, **options):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0,
                             top_p=1.0, max_new_tokens=new_tokens, pad_token_id=0, **options)
        torch.cuda.synchronize()
        assert out.shape == (PROMPTS, PROMPT_LENGTH + new_tokens), out.shape
        return time.perf_counter() - begin

    options = {"cache_implementation": "static"} if compiled else {}
    with torch.no_grad():
        # The static cache has the length of the first call: another one would compile again.
        first = generate(NEW_TOKENS if compiled else 8, **options)
        seconds = min(generate(NEW_TOKENS, **options) for _ in range(2 if compiled else 1))
    emit({"name": "transformers, sample" + (", static cache, torch.compile" if compiled else ""),
          "sequences": PROMPTS, "prompt_tokens": PROMPT_LENGTH, "new_tokens": NEW_TOKENS,
          "tokens_per_second": PROMPTS * NEW_TOKENS / seconds, "used_gib": used_gib(),
          "first_call_seconds": first})


PARTS = {"train_eager": lambda **options: train(False, **options),
         "train_compiled": lambda **options: train(True, **options),
         "sample": lambda: sample(False), "sample_compiled": lambda: sample(True)}


# ------------------------------------------------------------------------------------------------


def end_session(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of it has ended
        pass


def rows_of(command, limit):
    """The JSON lines a command prints within its limit, and what went wrong."""
    try:
        # A session of its own: what the command has started ends with it and leaves the GPU.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, start_new_session=True)
    except OSError as error:
        return [], str(error)
    # A limit from outside ends this process, and with it what it has started.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        out, error = process.communicate(timeout=limit)
        failure = "" if process.returncode == 0 else f"exit {process.returncode}: {error[-1500:]}"
    except subprocess.TimeoutExpired:
        failure = f"not done within {limit:.0f} s"
        end_session(process)
        out, _ = process.communicate()
    finally:
        end_session(process)
        signal.signal(signal.SIGTERM, before)
    rows = []
    for line in out.splitlines():
        if line.startswith("{"):
            rows.append(json.loads(line))
    return rows, failure


def compiled_step(limit, **options):
    """transformers' training step with torch.compile and those options of `train`, in a process of
    its own: a row, which says so where the memory does not suffice, and what went wrong. `limit`
    is in seconds, and may be used up already."""
    command = [sys.executable, os.path.abspath(__file__), "--part", "train_compiled",
               "--options", json.dumps(options)]
    rows, failure = rows_of(command, limit) if limit > 0 else ([], "no time left")
    row = {"name": "transformers, torch.compile", "model": options["shape"],
           "trained": "adapter" if options.get("rank") else "all weights",
           "gradient_checkpointing": options.get("checkpointing", False)}
    if "out of memory" in failure.lower():
        return {**row, "failure": "out of memory"}, ""
    if failure or not rows:
        return {**row, "failure": "no figure"}, failure or "no row"
    return {**rows[0], **row}, ""


def table_rows(program, limit):
    """Sampling with different numbers and lengths, within the limit in all."""
    cases = ",".join(":".join(str(n) for n in case) for case in TABLE)
    rows, failure = rows_of([program, "--repeats", "1", "--cases", cases], limit)
    return [{**row, "name": "ours, table"} for row in rows], failure


def precision_rows(program, limit):
    """Sampling in bf16 and in fp8, by the program beside it; 8 billion parameters too."""
    program = os.path.join(os.path.dirname(os.path.abspath(program)), "gpu_sampling_precision")
    rows, failures = [], []
    for model in ("0.6B", "8B"):
        some, failure = rows_of([program, "--model", model], limit / 2)
        rows += some
        failures += [failure] if failure else []
    return rows, "; ".join(failures)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--options", type=json.loads, default={}, help="of --part train_*: JSON")
    parser.add_argument("--program")
    parser.add_argument("--output", default="gpu_model.json")
    parser.add_argument("--only", nargs="*", choices=list(LIMITS), default=USUAL)
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part](**arguments.options)
        return
    from common import context, table, write
    results = {"context": context(METHOD), "config": CONFIG, "rows": [], "failures": {}}
    for part in arguments.only:
        command = [sys.executable, os.path.abspath(__file__), "--part", part]
        if part.startswith("ours_"):  # a process each, so that each has its own memory
            if not arguments.program:
                continue
            command = [arguments.program, "--only", part.split("_")[1]]
            if part.endswith("int8"):
                command += ["--optimizer-state", "int8"]
        begin = time.time()
        if part == "ours_table":
            rows, failure = table_rows(arguments.program, LIMITS[part])
        elif part == "ours_precision":
            rows, failure = precision_rows(arguments.program, LIMITS[part])
        else:
            rows, failure = rows_of(command, LIMITS[part])
        results["rows"] += rows
        if failure:
            results["failures"][part] = failure
            print(f"  {part}: {failure}", flush=True)
        print(f"  {part}: {time.time() - begin:.0f} s", flush=True)
        write(arguments.output, results)
    training = [r for r in results["rows"] if ", train" in r["name"]]
    sampling = [r for r in results["rows"] if ", sample" in r["name"]]
    for row in training:
        row["pass_ms"] = row["forward_backward_seconds"] * 1e3
        row["step_ms"] = row["optimizer_seconds"] * 1e3
    print(table(f"training step of {SEQUENCES} x {LENGTH} tokens, 0.6 B",
                [("name", "", "s"), ("pass_ms", "fwd+bwd ms", ".1f"), ("step_ms", "step ms", ".1f"),
                 ("forward_backward_tokens_per_second", "tokens/s", ",.0f"),
                 ("peak_gib", "peak GiB", ".1f"), ("used_gib", "used GiB", ".1f")], training))
    print(table(f"sampling {PROMPTS} sequences, {PROMPT_LENGTH} + {NEW_TOKENS} tokens, 0.6 B",
                [("name", "", "s"), ("tokens_per_second", "tokens/s", ",.0f"),
                 ("decode_tokens_per_second", "decode/s", ",.0f"),
                 ("used_gib", "used GiB", ".1f")], sampling))
    print(table("sampling, ours, 0.6 B",
                [("sequences", "sequences", ".0f"), ("prompt_tokens", "prompt", ".0f"),
                 ("new_tokens", "new", ".0f"), ("tokens_per_second", "tokens/s", ",.0f"),
                 ("decode_tokens_per_second", "decode/s", ",.0f"),
                 ("prompt_seconds", "prompts, s", ".2f"), ("kv_gib", "KV GiB", ".1f"),
                 ("used_gib", "used GiB", ".1f")],
                [r for r in results["rows"] if r["name"] == "ours, table"]))
    print(table("sampling in two precisions, ours; weights that a decode step reads",
                [("model", "model", "s"), ("precision", "", "s"), ("sequences", "sequences", ".0f"),
                 ("tokens_per_second", "tokens/s", ",.0f"),
                 ("decode_tokens_per_second", "decode/s", ",.0f"), ("step_ms", "step ms", ".2f"),
                 ("weight_gb", "weights GB", ".2f"), ("weight_tb_per_second", "TB/s", ".2f")],
                [r for r in results["rows"] if r["name"] == "ours, precision"]))
    sys.exit(1 if results["failures"] else 0)


if __name__ == "__main__":
    main()
