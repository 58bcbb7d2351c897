"""Every mistake is a Python exception that names the argument and the remedy."""
import subprocess
import sys

import pytest
import torch

import leeway


def loss(**change):
    batch = dict(logprobs=torch.zeros(6, requires_grad=True), rollout=torch.zeros(6),
                 advantages=torch.ones(6), cu_seqlens=torch.tensor([0, 2, 6]))
    return leeway.policy_loss(**{**batch, **change})


def head(**change):
    batch = dict(hidden=torch.zeros(6, 3), weight=torch.zeros(5, 3), targets=torch.zeros(6).long(),
                 rollout=torch.zeros(6), advantages=torch.ones(6), cu_seqlens=torch.tensor([0, 2, 6]))
    return leeway.policy_head(**{**batch, **change})


@pytest.mark.parametrize("change,kind,words", [
    ({"logprobs": [0.0]}, TypeError, "logprobs must be a tensor, got list"),
    ({"logprobs": torch.zeros(6).bfloat16()}, ValueError, "logprobs must be float32.*bfloat16"),
    ({"logprobs": torch.zeros(6, dtype=torch.int64)}, ValueError, "logprobs must be float32"),
    ({"logprobs": torch.zeros(2, 3)}, ValueError, "cu_seqlens is for packed"),
    ({"logprobs": torch.zeros(1, 2, 3), "cu_seqlens": None}, ValueError, r"\[N\] packed or \[B, T\]"),
    ({"logprobs": torch.zeros(6).to_sparse()}, TypeError, "sparse"),
    ({"rollout": torch.zeros(5)}, ValueError, r"rollout must be \[6\] as logprobs"),
    ({"rollout": torch.zeros(6).half()}, ValueError, "rollout must be float32.*rollout.float"),
    ({"rollout": torch.zeros(6, requires_grad=True)}, ValueError, "rollout.detach"),
    ({"rollout": torch.zeros(6, device="meta")}, ValueError, "rollout is on meta, logprobs on cpu"),
    ({"rollout": torch.full((6,), torch.nan)}, ValueError, "rollout"),
    ({"advantages": torch.ones(6, requires_grad=True)}, ValueError, "advantages.detach"),
    ({"advantages": torch.ones(6).long()}, ValueError, "advantages must be float32"),
    ({"advantages": torch.ones(4)}, ValueError, r"\[6\], one for each token, or \[2\]"),
    ({"mask": torch.ones(6)}, ValueError, "mask must be bool.*mask.bool"),
    ({"mask": torch.ones(5).bool()}, ValueError, r"mask must be \[6\]"),
    ({"cu_seqlens": None}, ValueError, "cu_seqlens is missing.*torch.tensor"),
    ({"cu_seqlens": torch.tensor([0, 2, 5])}, ValueError, "cu_seqlens must rise from 0 to .*6"),
    ({"cu_seqlens": torch.tensor([0, 5, 2, 6])}, ValueError, "cu_seqlens must rise"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, ValueError, "cu_seqlens must be int32 or int64"),
    ({"rollout_ids": torch.tensor([1])}, ValueError, r"rollout_ids must be int64 \[2\]"),
    ({"rollout_ids": torch.tensor([1, 2**40])}, ValueError, r"rollout_ids\[1\].*32 bits"),
    ({"weights": torch.ones(2)}, ValueError, "weights must be"),
    ({"prox": "old"}, ValueError, "prox must be"),
    ({"denominator": -1.0}, ValueError, "denominator = -1.0: must be finite and not negative"),
    ({"denominator": torch.ones(2)}, ValueError, "denominator must be one number"),
    ({"denominator": "all"}, TypeError, "denominator must be a number"),
    ({"preset": "icepp"}, ValueError, "there is no preset icepp.*did you mean icepop"),
    ({"preset": 3}, TypeError, "preset must be text"),
    ({"icepop_ratio_lo": 0.5}, ValueError, "icepop_ratio_lo = 0.5: unknown key.*icepop_ratio_low"),
    ({"tis_cap": 2.0}, ValueError, r"tis_cap = 2: preset icepop has no such key; it belongs to \+tis"),
    ({"icepop_ratio_high": -1}, ValueError, "icepop_ratio_high = -1: must be above 0"),
    ({"icepop_ratio_low": [1]}, TypeError, "icepop_ratio_low must be a number"),
    ({"preset": leeway.Spec("ppo"), "eps_low": 0.1}, TypeError, "with_keys"),
    ({"preset": "ppo"}, ValueError, 'ppo reads the stream "prox": give prox='),
])
def test_a_mistake_in_a_loss_is_named(change, kind, words):
    with pytest.raises(kind, match=words):
        loss(**change)


@pytest.mark.parametrize("change,kind,words", [
    ({"hidden": torch.zeros(6)}, ValueError, r"hidden must be \[N, H\]"),
    ({"hidden": torch.zeros(6, 3).half()}, ValueError, "hidden must be float32 or bfloat16"),
    ({"hidden": torch.zeros(6, 3).bfloat16()}, ValueError, "one dtype.*convert"),
    ({"weight": torch.zeros(5, 4)}, ValueError, r"weight must be \[vocabulary, 3\]"),
    ({"weight": torch.zeros(5, 3, device="meta")}, ValueError, "weight is on meta"),
    ({"targets": torch.zeros(6)}, ValueError, "targets must be int64"),
    ({"targets": torch.full((6,), 5)}, ValueError, r"target.*5"),
    ({"temperature": 0.0}, ValueError, "temperature = 0.0: must be above 0"),
    ({"temperature": torch.ones(4)}, ValueError, "temperature must be one number, or one for each"),
    ({"temperature": "hot"}, TypeError, "temperature must be a number"),
    ({"rows": torch.tensor([3, 1])}, ValueError, "rows"),
    ({"rows": torch.tensor([0])}, ValueError, "not among the rows|rows"),
])
def test_a_mistake_in_a_head_is_named(change, kind, words):
    with pytest.raises(kind, match=words):
        head(**change)


def test_a_dtensor_is_refused_by_name():
    class DTensor(torch.Tensor):
        def full_tensor(self):
            return self

    with pytest.raises(TypeError, match="weight is a DTensor.*full_tensor"):
        head(weight=torch.zeros(5, 3).as_subclass(DTensor))


def test_tensors_may_lie_anyhow():
    wide = torch.randn(6, 2)
    base, _ = loss(logprobs=wide[:, 0].contiguous(), rollout=wide[:, 1].contiguous())
    strided, _ = loss(logprobs=wide[:, 0], rollout=wide[:, 1])
    assert base.item() == strided.item()
    hidden, weight = torch.randn(3, 6).T, torch.randn(3, 5).T
    assert head(hidden=hidden, weight=weight).loss.item() == head(
        hidden=hidden.contiguous(), weight=weight.contiguous()).loss.item()


def test_second_derivatives_are_refused():
    logprobs = torch.zeros(6, requires_grad=True)
    value, _ = loss(logprobs=logprobs)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(value, logprobs, create_graph=True)


def test_another_torch_is_refused_naming_both(tmp_path):
    from leeway import _library
    library = tmp_path / "libleeway_ops.so"
    library.write_bytes(b"\x7fELF....leeway_ops built for torch 2.99.0 cuda\n....")
    with pytest.raises(ImportError, match=r"built for torch 2.99.0, this is torch 2\.13\.0\+cpu"):
        _library.check_library(library, "2.13.0+cpu", None)
    with pytest.raises(ImportError, match="with CUDA, this is torch 2.99.0.* without"):
        _library.check_library(library, "2.99.0+cpu", None)
    _library.check_library(library, "2.99.0+cu130", "13.0")
    done = subprocess.run([sys.executable, "-c", "import leeway"], capture_output=True, text=True,
                          env={**__import__("os").environ, "LEEWAY_OPS": str(library)}, timeout=120)
    assert "2.99.0" in done.stderr and "ImportError" in done.stderr
    missing = subprocess.run([sys.executable, "-c", "import leeway"], capture_output=True, text=True,
                             env={**__import__("os").environ, "LEEWAY_OPS": str(tmp_path / "no")},
                             timeout=120)
    assert "pip install" in missing.stderr


def test_importing_it_imports_no_trainer():
    code = ("import sys, leeway; bad = {'trl', 'verl', 'transformers', 'prime_rl', 'slime', 'ray'} & "
            "set(sys.modules); assert not bad, bad")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
