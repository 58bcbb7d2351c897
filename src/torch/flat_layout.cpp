#include "torch/flat_layout.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "cuda/moment_codes.h"
#include "leeway/error.h"

namespace leeway {

using at::Tensor;

namespace {

constexpr int64_t kAlignment = 64;  // numbers; kernels load several at once

int64_t aligned(int64_t offset, int64_t to = kAlignment) { return (offset + to - 1) / to * to; }

bool decays(const ParameterInfo& info) {
  return info.role != ParameterInfo::Role::norm && info.role != ParameterInfo::Role::bias;
}

// Whether a parameter continues the stack that the one before it begins. Of an adapter that is A.
bool continues_stack(const ParameterInfo& info) {
  if (info.name.ends_with(".lora_B.weight")) return false;
  const auto is = [&](std::string_view projection) {
    return info.name.find(projection) != std::string::npos;
  };
  return is(".k_proj.") || is(".v_proj.") || is(".up_proj.");
}

// The host's values as a tensor that shares their memory; only read where they are const.
Tensor host_view(std::span<const float> values, const std::vector<int64_t>& shape) {
  return at::from_blob(const_cast<float*>(values.data()), shape, at::TensorOptions(at::kFloat));
}

}  // namespace

FlatLayout::FlatLayout(const ModelConfig& model, std::vector<ParameterInfo> parameters)
    : config(model), table(std::move(parameters)) {
  place();
}

FlatLayout::FlatLayout(const ModelConfig& model) : FlatLayout(model, parameter_table(model)) {}

FlatLayout FlatLayout::without_layer_matrices(const ModelConfig& config) {
  std::vector<ParameterInfo> kept = parameter_table(config);
  std::erase_if(kept, is_layer_matrix);
  return FlatLayout(config, std::move(kept));
}

bool is_layer_matrix(const ParameterInfo& info) {
  return decays(info) && info.name.starts_with("model.layers.");
}

FlatLayout::FlatLayout(const Parameters& parameters)
    : config(parameters.config()), table(parameters.table()) {
  if (parameters.lora() != nullptr) lora = *parameters.lora();
  place();
}

void FlatLayout::place() {
  offsets.resize(table.size());
  const auto place_those = [&](const auto& those) {
    for (size_t i = 0; i < table.size(); ++i) {
      if (!those(table[i])) continue;
      offsets[i] = continues_stack(table[i]) ? size : aligned(size);
      size = offsets[i] + table[i].size();
    }
    size = aligned(size);
  };
  if (lora) {  // A of all modules before B of all, so that those of a stack are adjacent
    place_those([](const ParameterInfo& info) { return is_lora_a(info.name); });
    place_those([](const ParameterInfo& info) { return !is_lora_a(info.name); });
    decaying = size;
  } else {
    place_those(decays);
    decaying = size;
    place_those([](const ParameterInfo& info) { return !decays(info); });
  }
  size = aligned(size, int64_t{kMostRanks} * cuda::kMomentBlock);
}

FlatRange FlatLayout::part_of(int rank, int ranks) const {
  LEEWAY_CHECK(ranks > 0 && kMostRanks % ranks == 0 && rank < ranks, "a rank of a power of two");
  return {size / ranks * rank, size / ranks};
}

std::vector<int64_t> FlatLayout::bounds_of(const FlatRange& range, int ranks) const {
  std::vector<int64_t> bounds;
  for (int r = 0; r < ranks; ++r) {
    bounds.push_back(std::clamp<int64_t>(part_of(r, ranks).begin - range.begin, 0, range.count));
  }
  bounds.push_back(range.count);
  return bounds;
}

std::vector<Tensor> parameter_views(const FlatLayout& layout, const Tensor& flat) {
  std::vector<Tensor> views;
  for (size_t i = 0; i < layout.table.size(); ++i) {
    const ParameterInfo& info = layout.table[i];
    views.push_back(flat.narrow(0, layout.offsets[i], info.size()).view(info.shape));
  }
  return views;
}

void copy_to_flat(const FlatLayout& layout, const Parameters& host, const Tensor& flat) {
  LEEWAY_CHECK(host.table().size() == layout.table.size(), "weights of another model");
  const at::NoGradGuard guard;
  const std::vector<Tensor> views = parameter_views(layout, flat);
  for (size_t i = 0; i < views.size(); ++i) {
    views[i].copy_(host_view(host.of(i), layout.table[i].shape));
  }
}

void copy_to_host(const FlatLayout& layout, const Tensor& flat, Parameters& host) {
  LEEWAY_CHECK(host.table().size() == layout.table.size(), "weights of another model");
  const at::NoGradGuard guard;
  const std::vector<Tensor> views = parameter_views(layout, flat);
  for (size_t i = 0; i < views.size(); ++i) {
    host_view(host.of(i), layout.table[i].shape).copy_(views[i]);
  }
}

namespace {

// Calls each(parameter's numbers on the host, the same numbers in `part`) for what lies in it.
template <class Each>
void for_numbers_of_part(const FlatLayout& layout, const Parameters& host, int64_t begin,
                         const Tensor& part, Each&& each) {
  LEEWAY_CHECK(host.table().size() == layout.table.size(), "weights of another model");
  const at::NoGradGuard guard;
  for (size_t i = 0; i < layout.table.size(); ++i) {
    const int64_t offset = layout.offsets[i], size = layout.table[i].size();
    const int64_t first = std::max(offset, begin);
    const int64_t end = std::min(offset + size, begin + part.numel());
    if (first >= end) continue;
    each(host_view(host.of(i), {size}).narrow(0, first - offset, end - first),
         part.narrow(0, first - begin, end - first));
  }
}

}  // namespace

void copy_to_flat_part(const FlatLayout& layout, const Parameters& host, int64_t begin,
                       const Tensor& part) {
  for_numbers_of_part(layout, host, begin, part,
                      [](const Tensor& from, const Tensor& to) { to.copy_(from); });
}

void copy_part_to_host(const FlatLayout& layout, int64_t begin, const Tensor& part,
                       Parameters& host) {
  for_numbers_of_part(layout, host, begin, part,
                      [](const Tensor& to, const Tensor& from) { to.copy_(from); });
}

namespace {

// A network whose pointers are the layout's offsets.
auto offsets_of(const FlatLayout& layout) {
  return network_by<const int64_t>(layout.config, [&](const std::string& name) {
    const auto at = std::find_if(layout.table.begin(), layout.table.end(),
                                 [&](const ParameterInfo& info) { return info.name == name; });
    return at == layout.table.end() ? nullptr : &layout.offsets[at - layout.table.begin()];
  });
}

}  // namespace

NetworkTensors network_views(const FlatLayout& layout, const Tensor& flat) {
  return network_views(
      layout, [&](int64_t offset, int64_t count) { return flat.narrow(0, offset, count); });
}

NetworkTensors network_views(const FlatLayout& layout,
                             const std::function<Tensor(int64_t, int64_t)>& numbers) {
  const ModelConfig& config = layout.config;
  const auto network = offsets_of(layout);
  const auto vector = [&](const int64_t* offset, int64_t count) {
    return offset == nullptr ? Tensor() : numbers(*offset, count);
  };
  const auto matrix = [&](const int64_t* offset, int64_t outputs, int64_t inputs) {
    return offset == nullptr ? Tensor()
                             : numbers(*offset, outputs * inputs).view({outputs, inputs});
  };
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t qkv = queries + 2 * config.num_key_value_heads * config.head_dim;
  NetworkTensors out;
  out.embedding = matrix(network.embedding, config.vocab_size, hidden);
  out.head = matrix(network.head, config.vocab_size, hidden);
  out.final_norm = vector(network.final_norm, hidden);
  for (const LayerPointers<const int64_t>& at : network.layers) {
    out.layers.push_back({.input_norm = vector(at.input_norm, hidden),
                          .post_norm = vector(at.post_norm, hidden),
                          .qkv = matrix(at.q, qkv, hidden),
                          .qkv_bias = vector(at.q_bias, qkv),
                          .q_norm = vector(at.q_norm, config.head_dim),
                          .k_norm = vector(at.k_norm, config.head_dim),
                          .o = matrix(at.o, hidden, queries),
                          .o_bias = vector(at.o_bias, hidden),
                          .gate_up = matrix(at.gate, 2 * inner, hidden),
                          .down = matrix(at.down, hidden, inner)});
  }
  return out;
}

NetworkRanges network_ranges(const FlatLayout& layout) {
  const ModelConfig& config = layout.config;
  const auto network = offsets_of(layout);
  const auto range = [](int64_t begin, int64_t end) {
    return FlatRange{begin, aligned(end) - begin};
  };
  const int64_t table = config.vocab_size * config.hidden_size;
  NetworkRanges ranges{range(*network.embedding, *network.embedding + table),
                       range(*network.head, *network.head + table),
                       {}};
  for (const LayerPointers<const int64_t>& at : network.layers) {
    const int64_t end = *at.down + config.hidden_size * config.intermediate_size;
    LEEWAY_CHECK(*at.q < *at.o && *at.o < *at.gate && *at.gate < *at.down, "a layer in one range");
    ranges.layers.push_back(range(*at.q, end));
  }
  return ranges;
}

AdapterTensors adapter_views(const FlatLayout& layout, const Tensor& flat) {
  LEEWAY_CHECK(layout.lora.has_value(), "the layout of an adapter");
  const ModelConfig& config = layout.config;
  const int64_t rank = layout.lora->rank;
  const auto offset_of = [&](const std::string& name) -> const int64_t* {
    const auto at = std::find_if(layout.table.begin(), layout.table.end(),
                                 [&](const ParameterInfo& info) { return info.name == name; });
    return at == layout.table.end() ? nullptr : &layout.offsets[at - layout.table.begin()];
  };
  struct Module {
    const char* name;
    int64_t outputs;
  };
  const auto matrix = [&](int64_t offset, int64_t height, int64_t width) {
    return flat.narrow(0, offset, height * width).view({height, width});
  };
  // Modules whose results are side by side.
  const auto stack_of = [&](int64_t layer, int64_t inputs, const std::vector<Module>& modules) {
    LowRankStack stack;
    const int64_t* first_a = nullptr;
    int64_t first = 0;
    for (const Module& module : modules) {
      const std::string name = "model.layers." + std::to_string(layer) + "." + module.name;
      if (const int64_t* a = offset_of(lora_a_name(name))) {
        if (first_a == nullptr) first_a = a;
        stack.parts.push_back(
            {first, module.outputs, matrix(*offset_of(lora_b_name(name)), module.outputs, rank)});
      }
      first += module.outputs;
    }
    if (first_a != nullptr) {
      stack.a = matrix(*first_a, static_cast<int64_t>(stack.parts.size()) * rank, inputs);
    }
    return stack;
  };
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  AdapterTensors out{layout.lora->scale(), {}};
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    out.layers.push_back(
        {.qkv = stack_of(i, hidden,
                         {{"self_attn.q_proj", queries},
                          {"self_attn.k_proj", keys},
                          {"self_attn.v_proj", keys}}),
         .o = stack_of(i, queries, {{"self_attn.o_proj", hidden}}),
         .gate_up = stack_of(i, hidden, {{"mlp.gate_proj", inner}, {"mlp.up_proj", inner}}),
         .down = stack_of(i, inner, {{"mlp.down_proj", hidden}})});
  }
  return out;
}

}  // namespace leeway
