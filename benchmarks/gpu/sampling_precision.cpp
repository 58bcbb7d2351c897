// Sampling in fp8 beside bf16, for shapes of 0.6 and 8 billion parameters, with random weights that
// are made on the device. Prints one JSON object a line.
//   gpu_sampling_precision [--model 0.6B|8B|tiny] [--sequences N,..] [--precision bf16|fp8]
//                          [--prompt TOKENS] [--new TOKENS] [--device cuda|cpu]
// Without --precision both, one after the other. What a decode step cannot do without is to read
// all weights once, `weight_gb`; `weight_tb_per_second` is how fast it did.

#include <c10/core/InferenceMode.h>

#include <cstdlib>

#include "../report.h"
#include "base/rng.h"
#include "engine/engine.h"
#include "torch/device_weights.h"
#include "torch/torch_sampling.h"

namespace leeway {
namespace {

struct Options {
  std::string model = "0.6B";
  std::vector<int64_t> sequences;  // empty: the model's
  std::vector<Precision> precisions = {Precision::bf16, Precision::fp8};
  int64_t prompt = 128, fresh = 128;
  at::Device device = at::kCUDA;
};

ModelConfig config_of(const std::string& model) {
  ModelConfig config;
  const bool large = model == "8B";
  config.vocab_size = 151936;
  config.hidden_size = large ? 4096 : 1024;
  config.intermediate_size = large ? 12288 : 3072;
  config.num_hidden_layers = large ? 36 : 28;
  config.num_attention_heads = large ? 32 : 16;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.max_position_embeddings = 40960;
  config.rope_theta = 1e6;
  config.tie_word_embeddings = !large;
  config.qk_norm = true;
  if (model == "tiny") {
    config.vocab_size = 320, config.hidden_size = 64, config.intermediate_size = 160;
    config.num_hidden_layers = 2, config.num_attention_heads = 4, config.num_key_value_heads = 2;
    config.head_dim = 16, config.max_position_embeddings = 512;
  }
  return config;
}

// Of the scale of `initialise`.
PolicySnapshot weights_of(const ModelConfig& config, at::Device device) {
  const FlatLayout layout(config);
  at::Tensor flat = at::zeros({layout.size}, at::device(device).dtype(at::kBFloat16));
  const std::vector<at::Tensor> views = parameter_views(layout, flat);
  for (size_t i = 0; i < views.size(); ++i) {
    const ParameterInfo& info = layout.table[i];
    if (info.role == ParameterInfo::Role::norm) {
      views[i].fill_(1.0);
    } else if (info.role != ParameterInfo::Role::bias) {
      double deviation = 1.0 / std::sqrt(static_cast<double>(info.shape.back()));
      if (info.name.find("o_proj") != std::string::npos ||
          info.name.find("down_proj") != std::string::npos) {
        deviation /= std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers));
      }
      at::Tensor view = views[i];
      view.normal_(0.0, deviation);
    }
  }
  return {config, std::make_unique<TorchDeviceWeights>(layout, flat), 0};
}

// What a decode step reads: the layers and the head.
double weight_bytes(const ModelConfig& config, Precision precision) {
  double bytes = 0.0;
  for (const ParameterInfo& info : parameter_table(config)) {
    const bool embedding = info.name == "model.embed_tokens.weight";
    if (embedding && !config.tie_word_embeddings) continue;
    const bool coded = precision == Precision::fp8 && is_layer_matrix(info);
    bytes += static_cast<double>(info.size()) * (coded ? 1.0 : 2.0);
  }
  return bytes;
}

struct SamplingTime {
  double seconds = 0.0, decode_seconds = 0.0;  // decode: steps without prefill rows
  int64_t sampled = 0, decoded = 0, decode_steps = 0;
};

SamplingTime sample_all(Engine& engine, const ModelConfig& config, const Options& options,
                        int64_t sequences) {
  Rng rng(7);
  for (int64_t i = 0; i < sequences; ++i) {
    Request request;
    for (int64_t k = 0; k < options.prompt; ++k) {
      request.prompt.push_back(
          static_cast<int32_t>(rng.below(static_cast<uint64_t>(config.vocab_size))));
    }
    request.max_new_tokens = options.fresh, request.seed = static_cast<uint64_t>(i);
    engine.submit(request);
  }
  SamplingTime time;
  while (!engine.idle()) {
    StepReport report;
    const double seconds = seconds_of([&] { report = engine.step(); });
    time.seconds += seconds, time.sampled += report.sampled;
    if (report.prompt_rows > 0) continue;
    time.decode_seconds += seconds, time.decoded += report.sampled, ++time.decode_steps;
  }
  engine.take_finished();
  return time;
}

void sample(const Options& options, const ModelConfig& config, const PolicySnapshot& weights,
            Precision precision) {
  EngineOptions engine_options;
  engine_options.max_sequences = *std::ranges::max_element(options.sequences);
  engine_options.max_rows_per_step = 8192;
  const int64_t blocks = (options.prompt + options.fresh + kBlockKeys - 1) / kBlockKeys;
  engine_options.kv_bytes = engine_options.max_sequences * blocks * kBlockKeys *
                            config.num_hidden_layers * config.num_key_value_heads *
                            config.head_dim * 2 * 2;
  engine_options.backend =
      make_torch_sampling(options.device, at::kBFloat16, {.fp8 = precision == Precision::fp8});
  Engine engine(weights, engine_options);
  for (const int64_t sequences : options.sequences) {
    sample_all(engine, config, options, sequences);  // to warm up
    const SamplingTime time = sample_all(engine, config, options, sequences);
    const double bytes = weight_bytes(config, precision);
    const double step = time.decode_seconds / static_cast<double>(time.decode_steps);
    JsonWriter json;
    json.begin_object().key("name").value("ours, precision").key("model").value(options.model);
    json.key("precision").value(name_of(precision));
    const auto add = [&](const char* key, double value) { json.key(key).value(value); };
    add("sequences", static_cast<double>(sequences));
    add("prompt_tokens", static_cast<double>(options.prompt));
    add("new_tokens", static_cast<double>(options.fresh));
    add("tokens_per_second", static_cast<double>(time.sampled) / time.seconds);
    add("decode_tokens_per_second", static_cast<double>(time.decoded) / time.decode_seconds);
    add("prompt_seconds", time.seconds - time.decode_seconds);
    add("step_ms", 1e3 * step);
    add("weight_gb", 1e-9 * bytes);
    add("weight_tb_per_second", 1e-12 * bytes / step);
    std::printf("%s\n", json.end_object().text().c_str());
    std::fflush(stdout);
  }
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--model" && (value == "0.6B" || value == "8B" || value == "tiny")) {
      options.model = value;
    } else if (name == "--precision" && (value == "bf16" || value == "fp8")) {
      options.precisions = {*value_named<Precision>(value)};
    } else if (name == "--prompt" && std::atoll(value.c_str()) > 0) {
      options.prompt = std::atoll(value.c_str());
    } else if (name == "--new" && std::atoll(value.c_str()) > 1) {
      options.fresh = std::atoll(value.c_str());
    } else if (name == "--device" && (value == "cuda" || value == "cpu")) {
      options.device = value == "cuda" ? at::kCUDA : at::kCPU;
    } else if (name == "--sequences" && std::atoll(value.c_str()) > 0) {
      options.sequences.clear();
      for (size_t at = 0; at < value.size(); at = std::min(value.find(',', at), value.size()) + 1) {
        options.sequences.push_back(std::max(1LL, std::atoll(value.c_str() + at)));
      }
    } else {
      throw Error("gpu_sampling_precision: " + name + " " + value +
                  ": unknown option; options are --model 0.6B|8B|tiny, --sequences N,.., "
                  "--precision bf16|fp8, --prompt TOKENS, --new TOKENS, --device cuda|cpu");
    }
  }
  if (options.sequences.empty()) {
    options.sequences = {32, 64, 256, 1024};
    if (options.model == "8B") options.sequences = {8, 64, 256};
    if (options.model == "tiny") options.sequences = {4};
  }
  return options;
}

void run(const Options& options) {
  const ModelConfig config = config_of(options.model);
  const c10::InferenceMode inference;
  const PolicySnapshot weights = weights_of(config, options.device);
  for (const Precision precision : options.precisions) sample(options, config, weights, precision);
}

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  try {
    leeway::run(leeway::parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
