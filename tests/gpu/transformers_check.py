"""Weights that the program saves load in transformers and compute the same there, and back.

  transformers_check.py PROGRAM [WORD ..]

On a GPU, training passes and sampling there are checked as well.
"""

import json
import os
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

from support import check, run_checks

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VOCABULARY = 320
QWEN2 = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=64, intermediate_size=160,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY,
    max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True,
    hidden_act="silu", use_sliding_window=False)
LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=96, intermediate_size=256,
    num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, vocab_size=VOCABULARY,
    max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=500000.0, attention_bias=True,
    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=128),
    tie_word_embeddings=False, hidden_act="silu")
# float32 sums in another order; bf16 rounds activations at every step.
FLOAT32_TOLERANCE, BF16_MEAN_TOLERANCE = 2e-4, 3e-2

program, folder = "", ""


def configs():
    found = {}
    for name in ("qwen3-tied", "llama3-rope"):
        with open(f"{ROOT}/tests/data/hf/{name}/config.json") as file:
            found[name] = json.load(file)
    return {**found, "qwen2-old-keys": QWEN2, "llama-bias-old-keys": LLAMA}


def leeway(*arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    check(done.returncode == 0, f"leeway {' '.join(arguments)}: {done.stderr[-500:]}")
    return done.stdout


def written(value, name):
    path = f"{folder}/{name}.json"
    with open(path, "w") as file:
        json.dump(value, file)
    return path


def made(name, config, shard_bytes=1 << 40):
    path = f"{folder}/{name}-{shard_bytes}"
    if not os.path.exists(path):
        leeway("init", "--config", written(config, name), "--seed", "3", "--output", path,
               "--shard-bytes", str(shard_bytes))
    return path


def loaded(path, dtype=torch.float32, device="cpu"):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def ids_of(rows=3, length=200):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


@torch.no_grad()
def logprobs_there(model, ids):
    log_p = torch.log_softmax(model(ids.to(model.device)).logits.double(), -1)[:, :-1]
    return log_p.gather(-1, ids[:, 1:, None].to(model.device))[..., 0].cpu()


def logprobs_here(path, ids, *options):
    tokens = written({"tokens": ids.tolist()}, "tokens")
    out = json.loads(leeway("logprobs", "--model", path, "--tokens", tokens, *options))
    return torch.tensor([row[1:] for row in out["logprobs"]], dtype=torch.float64)


def same(a, b, what):
    largest = float((a - b).abs().max())
    check(largest <= FLOAT32_TOLERANCE, f"{what}: log-probabilities differ by {largest:.2g}")


def saved_here_loads_there():
    cases = 0
    for name, config in configs().items():
        for shard_bytes in (1 << 40, 100000):
            path = made(name, config, shard_bytes)
            same(logprobs_here(path, ids_of()), logprobs_there(loaded(path), ids_of()), path)
            cases += 1
    return cases


def greedy_tokens_are_the_same():
    cases = 0
    for name, config in configs().items():
        path = made(name, config)
        prompts = ids_of()[:, :20]
        out = loaded(path).generate(prompts, max_new_tokens=30, do_sample=False, eos_token_id=None,
                                    pad_token_id=0, attention_mask=torch.ones_like(prompts))
        mine = json.loads(leeway("generate", "--model", path, "--tokens",
                                 written({"tokens": prompts.tolist()}, "prompts"),
                                 "--max-new-tokens", "30", "--temperature", "0"))
        check(out[:, 20:].tolist() == mine["tokens"], f"{name}: greedy tokens differ")
        cases += 1
    return cases


def saved_there_loads_here():
    cases = 0
    for name, config in configs().items():
        for dtype in (torch.float32, torch.bfloat16):
            path = f"{folder}/{name}-from-{str(dtype)[6:]}"
            loaded(made(name, config), dtype).save_pretrained(path)
            # Weights rounded to bf16, computed in float32, by both.
            same(logprobs_here(path, ids_of()), logprobs_there(loaded(path), ids_of()), path)
            cases += 1
    return cases


def has_gpu(command):
    return torch.cuda.is_available() and "--device" in leeway(command, "--help")


def training_passes_on_a_gpu():
    if not has_gpu("logprobs"):
        return 0
    cases = 0
    for name, config in configs().items():
        path = made(name, config)
        there = logprobs_there(loaded(path, device="cuda"), ids_of())
        gpu = ("--device", "cuda", "--precision")
        same(logprobs_here(path, ids_of(), *gpu, "float32"), there, f"{name} on the GPU")
        mean = float((logprobs_here(path, ids_of(), *gpu, "bf16") - there).abs().mean())
        check(mean <= BF16_MEAN_TOLERANCE, f"{name}: bf16 is {mean:.3g} off on average")
        cases += 2
    return cases


def sampling_in_bf16_on_a_gpu():
    if not has_gpu("generate"):
        return 0
    cases = 0
    for name, config in configs().items():
        path = made(name, config)
        prompts = ids_of(rows=16, length=40)
        mine = json.loads(leeway("generate", "--model", path, "--device", "cuda", "--precision",
                                 "bf16", "--tokens", written({"tokens": prompts.tolist()}, "gpu"),
                                 "--max-new-tokens", "100", "--seed", "1"))
        new = torch.tensor(mine["tokens"])
        whole = torch.cat([prompts, new], 1)
        recorded = torch.tensor(mine["logprobs"], dtype=torch.float64)
        for dtype in (torch.float32, torch.bfloat16):
            there = logprobs_there(loaded(path, dtype, "cuda"), whole)[:, prompts.shape[1] - 1:]
            mean = float((recorded - there).abs().mean())
            check(mean <= BF16_MEAN_TOLERANCE, f"{name}: {mean:.3g} on average from {dtype}")
            cases += 1
    return cases


def main():
    global program, folder
    program = os.path.abspath(sys.argv[1])
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = temporary
        checks = [saved_here_loads_there, greedy_tokens_are_the_same, saved_there_loads_here,
                  training_passes_on_a_gpu, sampling_in_bf16_on_a_gpu]
        sys.exit(run_checks(checks, sys.argv[2:]))


if __name__ == "__main__":
    main()
