"""Every mistake is a Python exception that names the argument and the remedy."""
import subprocess
import sys

import pytest
import torch

import leeway
from leeway._batch import usable_offsets


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
    ({"logprobs": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(4)])}, TypeError,
     "logprobs is a nested tensor"),
    ({"weights": torch.quantize_per_tensor(torch.zeros(6), 0.1, 0, torch.qint8)}, TypeError,
     "weights is quantised"),
    ({"weights": torch.full((6,), torch.nan)}, ValueError, "position 0: weights is nan"),
    ({"cu_seqlens": torch.empty(3, dtype=torch.int64, device="meta")}, ValueError, "cu_seqlens is on meta"),
    ({"cu_seqlens": torch.tensor([0, -2, 6])}, ValueError, "cu_seqlens must rise"),
    ({"denominator": torch.tensor(torch.nan)}, ValueError, "denominator = nan: must be finite"),
    ({"denominator": torch.tensor(-3.0)}, ValueError, "denominator = -3.0: .*not negative"),
    ({"denominator": torch.ones((), device="meta")}, ValueError, "denominator must be one number"),
    ({"denominator": 10**400}, ValueError, "denominator = 1000"),
    ({"icepop_ratio_high": 10**400}, ValueError, "icepop_ratio_high = 1000.*too large"),
    ({"logprobs": torch.zeros(0, 3), "rollout": torch.zeros(0, 3), "cu_seqlens": None}, ValueError,
     "logprobs has no sequence"),
    ({"preset": "grpo+tis", "prox": torch.zeros(6), "rollout": torch.full((6,), torch.nan)}, ValueError,
     "position 0: rollout is nan"),
    ({"preset": "grpo+tis", "prox": torch.zeros(6), "rollout": torch.full((6,), -torch.inf)}, ValueError,
     "position 0: rollout is -inf"),
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
    ({"rows": [0, 1]}, TypeError, "rows must be a tensor"),
    ({"rows": torch.arange(6, device="meta")}, ValueError, "rows is on meta, hidden on cpu"),
    ({"rows": torch.arange(6).int()}, ValueError, "rows must be int64"),
    ({"temperature": torch.ones(6, device="meta")}, ValueError, "temperature is on meta"),
    ({"temperature": torch.ones(6, dtype=torch.bool)}, ValueError, "temperature must be float32"),
    ({"temperature": 10**400}, ValueError, "temperature = 1000"),
    ({"hidden": torch.zeros(6, 0), "weight": torch.zeros(5, 0)}, ValueError, "must have numbers"),
    ({"weight": torch.zeros(0, 3)}, ValueError, "must have numbers"),
    ({"chunk_bytes": -1}, ValueError, "chunk_bytes = -1"),
    ({"chunk_bytes": 1.5}, TypeError, "chunk_bytes must be a whole number"),
    ({"invariant": "yes"}, TypeError, "invariant must be True or False"),
])
def test_a_mistake_in_a_head_is_named(change, kind, words):
    with pytest.raises(kind, match=words):
        head(**change)


def test_a_mistake_in_a_comparison_is_named():
    good = {"sequences": [{"pi": [-1.0, -2.0], "rollout": [-1.0, -1.5], "advantages": 1.0}]}
    for arguments, kind, words in [
            ((good, "icepop"), TypeError, "presets must be a list"), ((good, 3), TypeError, "presets must be"),
            ((good, ["nope"]), ValueError, "no preset nope"),
            (({"sequences": [{"pi": {1}}]},), TypeError, "batch: must hold lists"),
            (({"sequences": []},), ValueError, "batch is empty")]:
        with pytest.raises(kind, match=words):
            leeway.compare(*arguments)
    for target, kind in [(-0.1, ValueError), (1.0, ValueError), (torch.nan, ValueError), ("x", TypeError)]:
        with pytest.raises(kind, match="target_masked"):
            leeway.compare(good, target_masked=target)
    with pytest.raises(TypeError, match="parts must be a list"):
        leeway.join_metrics(None)
    leeway.correction("ones")(lambda tokens: torch.ones_like(tokens.pi))
    for batch, words in [({"sequences": []}, "batch is empty"), ({"sequences": 3}, "not expected"),
                         ({"sequences": [{"rollout": [-1.0]}]}, 'has no "pi"')]:
        with pytest.raises(ValueError, match=words):
            leeway.compare(batch, ["reinforce+ones"])


@pytest.mark.parametrize("options,kind,words", [
    ({"keys": [1]}, TypeError, "keys and ranges are dicts"),
    ({"keys": {"k": None}}, ValueError, "a default is a finite number"),
    ({"keys": {"k": ()}}, ValueError, "a default is a finite number"),
    ({"keys": {"k": torch.nan}}, ValueError, "a default is a finite number"),
    ({"keys": {"k": 5.0}, "ranges": {"k": (0, 1)}}, ValueError, "k = 5.0 is not in its range"),
    ({"keys": {"k": 1.0}, "ranges": {"k": (2, 1)}}, ValueError, "not in its range"),
    ({"keys": {"k": 1.0}, "ranges": {"k": 3}}, ValueError, r"must be \(lowest, highest\)"),
    ({"keys": {"k": 1.0}, "ranges": {"l": (0, 1)}}, ValueError, "'l', which is no key"),
    ({"reads": "rollout"}, TypeError, "reads must be a list of streams"),
    ({"reads": None}, TypeError, "reads must be a list of streams")])
def test_a_mistake_in_a_correction_is_named(options, kind, words):
    with pytest.raises(kind, match=f"correction faulty: .*{words}"):
        leeway.correction("faulty", **options)(lambda tokens: None)


@pytest.mark.parametrize("function,kind,words", [
    (lambda tokens: tokens.pi.to(torch.complex64), ValueError, "its weights must be real"),
    (lambda tokens: leeway.Effect(metrics=[1]), TypeError, "its metrics must be a dict"),
    (lambda tokens: leeway.Effect(metrics={"a": tokens.pi}), ValueError, "its metric a must be one number"),
    (lambda tokens: leeway.Effect(metrics={"a": "x"}), ValueError, "its metric a must be one number"),
    (lambda tokens: tokens.rollout.mul_(0), ValueError, "in place")])
def test_what_a_correction_does_wrong_is_named(function, kind, words):
    leeway.correction("faulty")(function)
    with pytest.raises(kind, match=f"correction faulty: .*{words}"):
        loss(preset="icepop+faulty")


def test_names_of_corrections_in_other_code_bases_presets_are_taken():
    for name in ("rollout_is", "vanilla_tis", "mis"):
        with pytest.raises(ValueError, match=f"correction {name}: a preset of another code base"):
            leeway.correction(name)(lambda tokens: tokens.pi)


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


@pytest.mark.parametrize("offsets,right", [([0, 2, 6], True), ([0, 0, 6], True), ([0, 2, 7], False),
                                           ([1, 2, 6], False), ([0, 7, 6], False), ([0, -2, 6], False)])
def test_offsets_that_nobody_looks_at_stay_inside_the_batch(offsets, right):
    usable, ordered = usable_offsets(torch.tensor(offsets), 6)
    assert bool(ordered) == right
    assert usable.tolist() == (offsets if right else [0, 6, 6])
