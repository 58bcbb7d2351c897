// The names of parameters in GGUF files, and the order of rows that differs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "model/model_config.h"

namespace leeway {

// The GGUF name of a parameter of `parameter_table`: "model.layers.3.mlp.up_proj.weight" is
// "blk.3.ffn_up.weight".
std::string gguf_name_of(std::string_view parameter);

// llama's query and key projections have another order of rows in GGUF files: RoPE rotates
// neighbouring rows there, and rows half a head apart in Hugging Face's. qwen2 and qwen3 have the
// same order in both.
bool has_interleaved_rows(Family family, std::string_view parameter);

// Whole heads in, whole heads out: rows 2i and 2i+1 of a head become rows i and i + head_dim/2, or
// the other way. A row has `row_length` numbers.
void deinterleave_heads(std::span<const float> gguf, std::span<float> hugging_face,
                        int64_t head_dim, int64_t row_length);
void interleave_heads(std::span<const float> hugging_face, std::span<float> gguf, int64_t head_dim,
                      int64_t row_length);

}  // namespace leeway
