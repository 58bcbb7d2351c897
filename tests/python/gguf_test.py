"""`leeway convert` beside the public packages gguf and tokenizers.

Runs in a virtual environment that has both (tests/gguf_python_test.cpp makes it). LEEWAY_PROGRAM is the
program, LEEWAY_MODEL the folder of a real model, if there is one."""
import json
import os
import pathlib
import random
import subprocess
import tempfile
import unittest

import gguf
import numpy as np
import tokenizers
from gguf.quants import dequantize, quantize

PROGRAM = os.environ["LEEWAY_PROGRAM"]
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
# Where in a block the tops of its half-precision scales lie: cleared, so that scales are finite.
SCALE_TOPS = {"F32": [3], "F16": [1], "BF16": [1], "Q8_0": [1], "Q4_0": [1], "Q4_1": [1, 3], "Q5_0": [1],
              "Q5_1": [1, 3], "Q4_K": [1, 3], "Q5_K": [1, 3], "Q6_K": [209]}
HIDDEN, INNER, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD = 256, 512, 300, 2, 4, 2, 64
RULES = ["gpt-2", "smollm", "llama-bpe", "qwen2"]


def leeway(*args, text=None):
    result = subprocess.run([PROGRAM, *map(str, args)], input=text, capture_output=True, text=True)
    if result.returncode != 0:
        raise AssertionError(f"leeway {args}: {result.stderr}")
    return result.stdout


def shapes(architecture):
    table = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,), "output.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        block = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,),
                 "attn_q.weight": (HEADS * HEAD, HIDDEN), "attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
                 "attn_v.weight": (KV_HEADS * HEAD, HIDDEN), "attn_output.weight": (HIDDEN, HEADS * HEAD),
                 "ffn_gate.weight": (INNER, HIDDEN), "ffn_up.weight": (INNER, HIDDEN),
                 "ffn_down.weight": (HIDDEN, INNER)}
        if architecture == "qwen2":
            block |= {"attn_q.bias": (HEADS * HEAD,), "attn_k.bias": (KV_HEADS * HEAD,),
                      "attn_v.bias": (KV_HEADS * HEAD,)}
        if architecture == "qwen3":
            block |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
        table |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return table


def corpus():
    random.seed(3)
    words = "the quick brown fox don't we'll jump over 12 lazy dogs and 345 cats in ueber naive cafe".split()
    return [" ".join(random.choices(words, k=12)) + random.choice(["\n", ".\n\n", "! ", "\t"]) for _ in range(400)]


def trained_tokenizer():
    """Merges and vocabulary of a small byte-level BPE, with three added tokens."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(corpus(), trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for text, kind in [("<|begin|>", 3), ("<|end|>", 3), ("<think>", 4)]:
        tokens.append(text)
        kinds.append(gguf.TokenType(kind))
    while len(tokens) < VOCAB:
        tokens.append(f"[PAD{len(tokens)}]")
        kinds.append(gguf.TokenType.UNUSED)
    return tokens, kinds, merges


def write_model(path, architecture, kind, rule):
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    tokens, kinds, merges = trained_tokenizer()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|begin|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, shape in shapes(architecture).items():
        if len(shape) == 1:
            writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
            continue
        quant = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[quant]
        blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
        for top in SCALE_TOPS[kind]:
            blocks[:, :, top] &= 0xBF
        data = blocks.reshape(shape[0], -1)
        if kind == "F32":
            data = data.view(np.float32)
        elif kind == "F16":
            data = data.view(np.float16)
        writer.add_tensor(name, data, raw_dtype=None if kind in ("F32", "F16") else quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_folder(folder):
    """The tensors of a model.safetensors in float32."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[8 + length + begin:8 + length + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


FOLDER_MODULES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
                  "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
                  "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
                  "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
                  "ffn_down": "mlp.down_proj"}


def folder_name(name):
    base, kind = name.rsplit(".", 1)
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    if base in whole:
        return f"{whole[base]}.{kind}"
    _, layer, module = base.split(".")
    return f"model.layers.{layer}.{FOLDER_MODULES[module]}.{kind}"


def interleaved(values, name):
    """transformers' order of a head's rows in that of GGUF files, as gguf's converters have it."""
    heads = HEADS if "attn_q" in name else KV_HEADS
    return values.reshape(heads, 2, HEAD // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def expected_order(values, name, architecture):
    return interleaved(values, name) if architecture == "llama" and (".attn_q." in name or ".attn_k." in name) else values


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def strings(count):
    random.seed(11)
    parts = ["the ", " The", "don't", "WE'LL", " 12345", "3.14", "\n\n", "\r\n", "\t ", "   x", "\u00dcber", "\u65e5\u672c\u8a9e",
             "\U0001f389", "e\u0301", "<|end|>", "<think>", "<|begin|>", "_snake_case", "CamelCase", "!?...", "\u00b2",
             "\u2167", " ", "a", "\u00a0", "\u3000", "0x7f", "\u0661\u0662", "quick brown", "\u2028", "'s", "\u017f",
             "\x04", "t\x04he", "\x00", "\x7f", "\U00040000"]
    return ["".join(random.choices(parts, k=random.randint(1, 9))) for _ in range(count)]


class Weights(unittest.TestCase):
    def test_every_type_and_architecture_has_the_packages_bits(self):
        for number, kind in enumerate(TYPES):
            architecture = ["llama", "qwen2", "qwen3"][number % 3]
            with self.subTest(kind), tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                write_model(folder / "in.gguf", architecture, kind, "smollm")
                leeway("convert", folder / "in.gguf", folder / "model")
                found = read_folder(folder / "model")
                reader = gguf.GGUFReader(folder / "in.gguf")
                self.assertEqual(len(found), len(reader.tensors))
                for tensor in reader.tensors:
                    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
                    own = found[folder_name(tensor.name)]
                    self.assertTrue(same_bits(expected_order(own, tensor.name, architecture), values.reshape(own.shape)), tensor.name)

    def test_what_is_written_has_the_packages_bits(self):
        for architecture in ["llama", "qwen2", "qwen3"]:
            with tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                write_model(folder / "in.gguf", architecture, "Q4_K", "qwen2")
                leeway("convert", folder / "in.gguf", folder / "model")
                weights = read_folder(folder / "model")
                for kind in ["f16", "bf16", "q8_0"]:
                    leeway("convert", folder / "model", folder / f"{kind}.gguf", "--type", kind)
                    reader = gguf.GGUFReader(folder / f"{kind}.gguf")
                    for tensor in reader.tensors:
                        values = expected_order(weights[folder_name(tensor.name)], tensor.name, architecture)
                        wanted = gguf.GGMLQuantizationType[kind.upper() if values.ndim > 1 else "F32"]
                        self.assertEqual(tensor.tensor_type, wanted)
                        data = quantize(np.ascontiguousarray(values), wanted)
                        self.assertEqual(tensor.data.tobytes(), data.tobytes(), tensor.name)
                    before = gguf.GGUFReader(folder / "in.gguf")
                    for key in [f"{architecture}.{k}" for k in ("block_count", "context_length", "embedding_length",
                                "feed_forward_length", "attention.head_count", "attention.head_count_kv",
                                "attention.layer_norm_rms_epsilon", "rope.freq_base")] + [
                                "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges",
                                "tokenizer.ggml.pre", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id",
                                "tokenizer.chat_template"]:
                        self.assertEqual(reader.fields[key].contents(), before.fields[key].contents(), key)
                        self.assertEqual(reader.fields[key].types, before.fields[key].types, key)


class Tokens(unittest.TestCase):
    def compare(self, folder, texts):
        path = folder / "tokenizer.json"
        theirs = tokenizers.Tokenizer.from_file(str(path))
        lines = leeway("tokenize", "--tokenizer", path, text="".join(json.dumps(t) + "\n" for t in texts)).splitlines()
        self.assertEqual(len(lines), len(texts))
        for text, line in zip(texts, lines):
            self.assertEqual(json.loads(line), theirs.encode(text, add_special_tokens=False).ids, repr(text))
        return theirs

    def test_the_library_reads_the_tokenizer_and_agrees(self):
        for rule in RULES:
            with self.subTest(rule), tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                write_model(folder / "in.gguf", "llama", "Q8_0", rule)
                leeway("convert", folder / "in.gguf", folder / "model")
                theirs = self.compare(folder / "model", strings(300))
                tokens = gguf.GGUFReader(folder / "in.gguf").fields["tokenizer.ggml.tokens"].contents()
                for text in strings(50):
                    for token in theirs.encode(text, add_special_tokens=False).ids:
                        self.assertEqual(theirs.id_to_token(token), tokens[token])
                begins = theirs.encode("a").ids[0] == tokens.index("<|begin|>")
                self.assertEqual(begins, rule == "llama-bpe")

    @unittest.skipUnless(os.environ.get("LEEWAY_MODEL"), "no real model")
    def test_a_real_model_agrees(self):
        self.compare(pathlib.Path(os.environ["LEEWAY_MODEL"]), strings(500) + corpus()[:100])


if __name__ == "__main__":
    unittest.main()
