"""TRL's GRPOTrainer with a loss of Leeway's, on a CPU, without a download.

  pip install torch trl scikit-build-core
  pip install ./python/leeway --no-build-isolation
  python3 examples/trl_grpo.py

A random model of two layers is rewarded for the letter a. Four optimizer steps on each batch of
completions, so that the loss needs a correction.
"""
import leeway
import torch
from datasets import Dataset
from leeway.integrations.trl import LeewayGRPOTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

words = {"<pad>": 0, "<eos>": 1, **{chr(97 + k): k + 2 for k in range(8)}}
letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
letters.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(1)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    eos_token_id=1, bos_token_id=None))


def reward(completions, **_):
    return [text.split().count("a") / 6 for text in completions]


trainer = LeewayGRPOTrainer(
    model=model, processing_class=tokenizer, reward_funcs=reward,
    train_dataset=Dataset.from_dict({"prompt": ["b c", "d e f", "g"] * 20}),
    args=GRPOConfig(output_dir="/tmp/trl_grpo", loss_type="dapo", beta=0.0, num_iterations=4,
                    per_device_train_batch_size=32, num_generations=8, max_completion_length=6,
                    max_steps=40, learning_rate=5e-3, logging_steps=10, save_strategy="no",
                    report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, log_level="error"),
    spec=leeway.Spec("icepop", icepop_ratio_high=2.0))
trainer.train()
for row in trainer.state.log_history:
    if "reward" in row:
        print(f"step {row['step']:3}  reward {float(row['reward']):.3f}  "
              f"masked {float(row['leeway/is_masked']):.2%}  "
              f"mismatch_kl {float(row['leeway/mismatch_kl']):.4f}")
