// A model small enough for runs of milliseconds, as a configuration table. A macro, so that it can
// be concatenated with adjacent string literals.
#pragma once

#define LEEWAY_TINY_MODEL     \
  "[model]\n"                 \
  "tokenizer = \"byte\"\n"    \
  "vocab_size = 128\n"        \
  "hidden_size = 32\n"        \
  "intermediate_size = 64\n"  \
  "num_hidden_layers = 1\n"   \
  "num_attention_heads = 2\n" \
  "num_key_value_heads = 1\n" \
  "head_dim = 16\n"           \
  "max_position_embeddings = 48\n"
