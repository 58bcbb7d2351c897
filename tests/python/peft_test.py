"""Adapters between leeway and the package peft: one of leeway's is loaded, one of peft's is made.

peft_test.py BASE ADAPTER TOKENS OUT: reads leeway's adapter over BASE, writes one of peft's to
OUT, and prints {"read": log-probabilities with the first, "made": with the second, "merged": with
the second put into the base}, each a list per list of tokens.
"""

import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def logprobs(model, lists):
    result = []
    for ids in lists:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        rows = torch.log_softmax(logits, dim=-1)
        result.append([None] + [rows[t, ids[t + 1]].item() for t in range(len(ids) - 1)])
    return result


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main():
    base, adapter, tokens, out = sys.argv[1:]
    with open(tokens) as file:
        lists = json.load(file)["tokens"]
    read = PeftModel.from_pretrained(load(base), adapter).eval()
    config = read.peft_config["default"]
    assert config.r == 4 and config.lora_alpha == 8 and not config.use_dora, config
    unused = [name for name, value in read.named_parameters() if "lora_B" in name and not value.any()]
    assert not unused, f"still zero, so not loaded: {unused[:3]}"

    torch.manual_seed(5)
    # The names of a regular expression or of all-linear are resolved when an adapter is saved.
    made = get_peft_model(
        load(base),
        LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).eval()
    for name, value in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.2)
    made.save_pretrained(out)
    print(
        json.dumps(
            {
                "read": logprobs(read, lists),
                "made": logprobs(made, lists),
                "merged": logprobs(made.merge_and_unload(), lists),
            }
        )
    )


main()
