"""What a step of TRL's GRPOTrainer costs with its loss and with Leeway's: compute_loss and backward of a
random decoder, time and memory.

  LEEWAY_OPS=build-gpu/libleeway_ops.so PYTHONPATH=python/leeway trl_step.py [--output FILE]

Qwen3's shape with 0.6 B parameters, bf16, gradient checkpointing, 16 sequences of 128 + 896 tokens, a
clipped loss with old log-probabilities. Needs trl; liger-kernel, where it is there, is timed too. Where
`datasets` and `pandas` are missing, stand_ins.py has what a step uses of them. docs/performance.md tells
the method.
"""

import argparse
import sys
import tempfile

import torch

import stand_ins
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

import leeway
from common import GIB, Contender, context, measure, table, write
from leeway.integrations._output_head import head_as, output_head
from leeway.integrations.trl import LeewayGRPOTrainer

METHOD = ("compute_loss and backward on one micro-batch, one process, contenders by turns; medians of "
          "the rounds after 2 warm-ups, CUDA events; memory: the allocator's peak beyond weights, "
          "gradients included")
SMALL = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=2, head_dim=8)
LARGE = dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
             num_attention_heads=16, num_key_value_heads=8, head_dim=128)


class MaterialisingTrainer(GRPOTrainer):
    """TRL's loss over logits in memory, by TRL's own functions, as before it had a fused head."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep,
                                           batch_size=None, compute_entropy=False,
                                           compute_aux_loss=False, **_):
        logits = model(input_ids=input_ids, attention_mask=attention_mask,
                       logits_to_keep=logits_to_keep + 1, use_cache=False).logits
        logits = logits[:, :-1] / self.temperature
        logprobs = selective_log_softmax(logits, input_ids[:, -logits_to_keep:])
        with torch.no_grad():
            entropies = entropy_from_logits(logits) if compute_entropy else None
        return logprobs, entropies, None


class LigerTrainer(GRPOTrainer):
    """The loss that liger-kernel fuses with the head, as TRL called it before it had one of its own."""

    def __init__(self, *args, **kwargs):
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
        super().__init__(*args, **kwargs)
        self.fused = LigerFusedLinearGRPOLoss(
            beta=0.0, epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high,
            temperature=self.temperature, use_ref_model=False, loss_type=self.loss_type,
            max_completion_length=self.max_completion_length)

    def _compute_loss(self, model, inputs):
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        head, out = output_head(model), {}

        def compute(hidden, weight):
            out["loss"], _ = self.fused(hidden[:, :-1], weight, ids, mask, inputs["advantages"],
                                        old_per_token_logps=inputs["old_per_token_logps"])
            return out["loss"].reshape(1, 1, 1)

        with head_as(head, compute):
            model(input_ids=torch.cat([inputs["prompt_ids"], ids], dim=1),
                  attention_mask=torch.cat([inputs["prompt_mask"], mask], dim=1),
                  logits_to_keep=ids.size(1) + 1, use_cache=False)
        return out["loss"]


def trainer_of(kind, model, sequences, completion, device, **extra):
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    args = GRPOConfig(output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=device == "cpu", bf16=False,
                      per_device_train_batch_size=sequences, num_generations=sequences,
                      max_completion_length=completion, loss_type="bnpo", beta=0.0, temperature=0.9,
                      gradient_checkpointing=True, save_strategy="no", disable_tqdm=True)
    return kind(model=model, args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions),
                train_dataset=Dataset.from_dict({"prompt": ["a"] * sequences}),
                processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>",
                                                         eos_token="<eos>"), **extra)


def batch_of(sequences, prompt, completion, vocabulary, device):
    torch.manual_seed(1)
    ids = torch.randint(2, vocabulary, (sequences, prompt + completion), device=device)
    mask = torch.ones(sequences, completion, dtype=torch.long, device=device)
    mask[1, completion * 3 // 4:] = 0
    return {"prompt_ids": ids[:, :prompt], "prompt_mask": torch.ones_like(ids[:, :prompt]),
            "completion_ids": ids[:, prompt:], "completion_mask": mask,
            "advantages": torch.randn(sequences, device=device),
            "num_items_in_batch": mask.sum().float()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a model of two small layers on the CPU, "
                        "losses alone")
    args = parser.parse_args()
    device = "cpu" if args.small else "cuda"
    shape = SMALL if args.small else LARGE
    sequences, prompt, completion = (4, 3, 9) if args.small else (16, 128, 896)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
                                             bos_token_id=None, **shape))
    model = model.float() if args.small else model.to(torch.bfloat16)
    batch = batch_of(sequences, prompt, completion, shape["vocab_size"], device)
    forward = model.forward
    trainers = {}
    for name, kind, extra in (
            ("TRL's fused head", GRPOTrainer, {}), ("TRL, logits materialised", MaterialisingTrainer, {}),
            ("liger-kernel's fused loss", LigerTrainer, {}),
            ("LeewayGRPOTrainer", LeewayGRPOTrainer, {"spec": leeway.Spec("ppo")})):
        try:
            trainers[name] = trainer_of(kind, model, sequences, completion, device, **extra)
        except ImportError as error:
            print(f"{name}: {error}", flush=True)
            continue
        trainers[name].own_forward = model.__dict__.get("forward")  # TRL patches the instance
        model.__dict__.pop("forward", None)
        assert model.forward == forward
    # As TRL has it when it trains: its trainers turn this on in train(), which is not called here.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    some = next(iter(trainers.values()))
    model.forward = some.own_forward
    with torch.no_grad():
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        batch["old_per_token_logps"] = some._get_per_token_logps_and_entropies(
            model, ids, mask, completion)[0] + 0.1 * torch.randn(sequences, completion, device=device)
    losses = {}

    def step(name):
        def run():
            trainer = trainers[name]
            model.forward = trainer.own_forward or forward
            trainer.current_gradient_accumulation_steps = 1
            loss = trainer.compute_loss(model, batch)
            loss.backward()
            losses[name] = loss.detach()
        return run

    def clear():
        model.zero_grad(set_to_none=True)

    gradients = {}
    for name in trainers:
        clear()
        step(name)()
        gradients[name] = model.lm_head.weight.grad.float().norm().item()
        print(f"{name}: loss {losses[name].item():.6f}, norm of the head's gradient "
              f"{gradients[name]:.6f}", flush=True)
    if args.small:
        return
    contenders = [Contender(name, step(name), clear) for name in trainers]
    measure(contenders, args.rounds)
    rows = [{"name": c.name, "ms": c.median() if c.times else None, "peak_gib": c.peak_bytes / GIB,
             "loss": losses[c.name].item(), "gradient_norm": gradients[c.name], "failure": c.failure}
            for c in contenders]
    print(table("a step of a 0.6 B decoder in TRL",
                [("name", "", ""), ("ms", "ms", ".1f"), ("peak_gib", "GiB", ".2f")], rows), flush=True)
    if args.output:
        write(args.output, [context(METHOD) | {"stand_ins": stand_ins.used}] + rows)
    sys.exit(1 if any(row["failure"] for row in rows) else 0)


if __name__ == "__main__":
    main()
