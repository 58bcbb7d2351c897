"""Shapes of models, in the words of config.json; their weights are random everywhere."""


def qwen3(hidden_size, intermediate_size, layers, heads, tied=True, vocabulary=151936, kv_heads=8,
          head_dim=128):
    return {"hidden_size": hidden_size, "intermediate_size": intermediate_size,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocabulary,
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
            "tie_word_embeddings": tied}


SHAPES = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
             "vocab_size": 49152, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
             "tie_word_embeddings": True},
    "0.6B": qwen3(1024, 3072, 28, 16),
    "1.7B": qwen3(2048, 6144, 28, 16),
    "4B": qwen3(2560, 9728, 36, 32),
    "8B": qwen3(4096, 12288, 36, 32, tied=False),
    "tiny": qwen3(64, 160, 2, 4, vocabulary=512, kv_heads=2, head_dim=16),  # for a test on a CPU
}
