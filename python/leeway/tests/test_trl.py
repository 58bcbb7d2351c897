"""LeewayGRPOTrainer beside TRL's own loss, with TRL from PyPI and a random two-layer model."""
import pytest
import torch

pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

import leeway  # noqa: E402
from leeway.integrations.trl import LeewayGRPOTrainer  # noqa: E402


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, **{chr(97 + k): k + 2 for k in range(26)}}
    base = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<eos>")


def model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=28, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=None))


def reward(completions, **_):
    return [float(len(text)) for text in completions]


def trainer(tmp_path, cls=LeewayGRPOTrainer, spec=None, **options):
    options = {"loss_type": "grpo", "beta": 0.0, "temperature": 0.7, **options}
    if options["beta"] != 0.0:
        options["model_init_kwargs"] = {"dtype": "float32"}
    args = GRPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False,
                      per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
                      logging_steps=1, save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
                      **options)
    data = Dataset.from_dict({"prompt": ["a b", "c d e", "f", "g h"] * 4})
    extra = {} if spec is None else {"spec": spec}
    the_model = model()
    if options["beta"] != 0.0:  # TRL loads the reference from where the model came from
        the_model.save_pretrained(tmp_path / "model")
        the_model = str(tmp_path / "model")
    return cls(model=the_model, args=args, reward_funcs=reward, train_dataset=data,
               processing_class=tokenizer(), **extra)


def micro_batch(seed=1, prox=True, ref=False, sampling=False):
    torch.manual_seed(seed)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0],
                         [1, 1, 1, 1, 1, 0]])
    batch = {"prompt_ids": torch.randint(2, 28, (4, 3)), "prompt_mask": torch.ones(4, 3).long(),
             "completion_ids": torch.randint(2, 28, (4, 6)), "completion_mask": mask,
             "advantages": torch.tensor([1.0, -0.5, 0.3, -1.2]),
             "num_items_in_batch": torch.tensor(37.0)}
    stream = lambda: -3.3 + 0.4 * torch.randn(4, 6)
    if prox:
        batch["old_per_token_logps"] = stream()
    if sampling:
        batch["sampling_per_token_logps"] = stream()
    if ref:
        batch["ref_per_token_logps"] = stream()
    return batch


def loss_and_gradients(one, batch):
    one.model.train()
    one.model.zero_grad()
    one.current_gradient_accumulation_steps = 2
    loss = one.compute_loss(one.model, batch)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in one.model.named_parameters()
                         if p.grad is not None}


def check_equal(tmp_path, spec, batch, **options):
    theirs, gradients = loss_and_gradients(trainer(tmp_path, GRPOTrainer, **options), batch)
    ours, own = loss_and_gradients(trainer(tmp_path, spec=spec, **options), batch)
    # Both sum float32 in other orders: a few units of the last place of the largest term.
    assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item() + 1e-12
        assert (own[name] - gradient).abs().max().item() <= 1e-4 * scale, name


# Every denominator of TRL's, for the loss that its clip is.
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_a_clipped_loss_is_trls_under_each_of_its_denominators(tmp_path, loss_type):
    options = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    spec = leeway.Spec("gspo", gradient="through_mean") if options else leeway.Spec("ppo")
    check_equal(tmp_path, spec, micro_batch(), loss_type=loss_type, **options)


def test_without_an_old_policy_the_ratio_is_one(tmp_path):
    check_equal(tmp_path, "ppo", micro_batch(prox=False))


def test_a_reference_penalty_is_trls(tmp_path):
    check_equal(tmp_path, leeway.Spec("grpo", ref_kl=0.04), micro_batch(ref=True), beta=0.04,
                use_bias_correction_kl=False)


def test_sapo_is_trls(tmp_path):
    check_equal(tmp_path, "sapo", micro_batch(), loss_type="sapo")


def test_cispo_is_trls(tmp_path):
    check_equal(tmp_path, leeway.Spec("cispo", anchor="prox", ratio_high=1.1), micro_batch(),
                loss_type="cispo", epsilon_high=1.1)


def test_tool_results_are_not_trained(tmp_path):
    batch = micro_batch()
    batch["tool_mask"] = torch.tensor([1, 1, 0, 0, 1, 1]).expand(4, 6)
    check_equal(tmp_path, "ppo", batch)


def test_log_probabilities_are_trls(tmp_path):
    batch = micro_batch()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    ones = torch.ones_like(ids)
    theirs = trainer(tmp_path, GRPOTrainer)
    ours = trainer(tmp_path, spec="ppo")
    with torch.no_grad():
        a = theirs._get_per_token_logps_and_entropies(theirs.model, ids, ones, 6, compute_entropy=True)
        b = ours._get_per_token_logps_and_entropies(ours.model, ids, ones, 6, batch_size=2,
                                                    compute_entropy=True)
    torch.testing.assert_close(b[0], a[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(b[1], a[1], rtol=1e-5, atol=1e-5)


def test_corrections_read_the_samplers_log_probabilities(tmp_path):
    batch = micro_batch(sampling=True)
    one = trainer(tmp_path, spec=leeway.Spec("icepop", icepop_ratio_high=1.2))
    loss_and_gradients(one, batch)
    assert one._metrics["train"]["leeway/is_masked"][0] > 0


def test_it_trains_with_gradient_accumulation(tmp_path):
    one = trainer(tmp_path, spec="icepop", gradient_accumulation_steps=2, max_steps=3,
                  num_iterations=2)
    before = one.model.model.layers[0].mlp.up_proj.weight.clone()
    one.train()
    assert not torch.equal(before, one.model.model.layers[0].mlp.up_proj.weight)
    logs = [row for row in one.state.log_history if "leeway/is_masked" in row]
    assert len(logs) == 3 and all(row["loss"] == row["loss"] for row in logs)


def test_what_has_no_effect_is_refused(tmp_path):
    for options, spec, words in [({"beta": 0.04}, "icepop", "beta"),
                                 ({}, "m2po", "whole batch"), ({}, "verl/vanilla", "native"),
                                 ({}, leeway.Spec("ppo", reduction="sum"), "loss_type"),
                                 ({"top_entropy_quantile": 0.5}, "ppo", "top_entropy_quantile"),
                                 ({}, leeway.Spec("grpo", ref_kl=0.1), "beta")]:
        with pytest.raises(ValueError, match=words):
            trainer(tmp_path, spec=spec, **options)
