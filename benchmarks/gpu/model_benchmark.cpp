// Whole training steps and sampling of a Qwen3-shaped model of 0.6 billion parameters through the
// program's own trainer and engine, as benchmarks/gpu/model.py measures transformers. Prints one
// JSON object a line.
//   gpu_model_benchmark [--device cuda|cpu] [--model 0.6B|tiny] [--repeats N] [--only train|sample]
//                       [--recompute off|selective|layer] [--optimizer-state float32|int8]
//                       [--sequences N] [--prompt TOKENS] [--new TOKENS] [--cases N:PROMPT:NEW,..]
//                       [--precision bf16|fp8]
// The last five are of sampling; with --cases there is nothing else, and each case has a process of
// its own. The memory in use is the process's: with --only it is that of training or of sampling
// alone.

#include <sys/wait.h>
#include <unistd.h>

#include <cinttypes>
#include <cmath>
#include <cstdlib>

#include "../report.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "engine/engine.h"
#include "leeway/presets.h"
#include "run/devices.h"
#include "trainer/trainer.h"

#ifdef LEEWAY_CUDA
#include <cuda_runtime_api.h>
#endif

namespace leeway {
namespace {

constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;

struct Options {
  Device device = Device::cuda;
  std::string model = "0.6B", only;
  int repeats = 5;
  Recompute recompute = Recompute::off;
  OptimizerState optimizer_state = OptimizerState::float32;
  int64_t sequences = 0, prompt = 0, fresh = 0;  // of sampling; 0: the workload's
  std::string cases;
  Precision precision = Precision::bf16;  // of sampling
};

struct Workload {
  ModelConfig config;
  int64_t sequences, length;                   // of a training step
  int64_t prompts, prompt_length, new_tokens;  // of sampling
};

Workload workload_of(const Options& options) {
  const bool tiny = options.model == "tiny";
  ModelConfig config;
  config.vocab_size = tiny ? 320 : 151936;
  config.hidden_size = tiny ? 64 : 1024;
  config.intermediate_size = tiny ? 160 : 3072;
  config.num_hidden_layers = tiny ? 2 : 28;
  config.num_attention_heads = tiny ? 4 : 16;
  config.num_key_value_heads = tiny ? 2 : 8;
  config.head_dim = tiny ? 16 : 128;
  config.max_position_embeddings = tiny ? 256 : 40960;
  config.rope_theta = 1e6;
  config.tie_word_embeddings = true;
  config.qk_norm = true;
  Workload work{config, 8, 2048, 256, 128, 128};
  if (tiny) work = {config, 4, 64, 8, 16, 16};
  if (options.sequences > 0) work.prompts = options.sequences;
  if (options.prompt > 0) work.prompt_length = options.prompt;
  if (options.fresh > 0) work.new_tokens = options.fresh;
  return work;
}

// The same scale as `initialise`, but uniform and by all cores: drawing 0.6 billion normal numbers
// would take longer than everything that is measured here.
Parameters weights_of(const ModelConfig& config) {
  Parameters weights(config);
  ThreadPool pool(0);
  for (size_t i = 0; i < weights.table().size(); ++i) {
    const ParameterInfo& info = weights.table()[i];
    const std::span<float> values = weights.of(i);
    if (info.role == ParameterInfo::Role::norm || info.role == ParameterInfo::Role::bias) {
      std::ranges::fill(values, info.role == ParameterInfo::Role::norm ? 1.0f : 0.0f);
      continue;
    }
    double deviation = 1.0 / std::sqrt(static_cast<double>(info.shape.back()));
    if (info.name.find("o_proj") != std::string::npos ||
        info.name.find("down_proj") != std::string::npos) {
      deviation /= std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers));
    }
    const double width = deviation * std::sqrt(12.0);
    constexpr size_t kPart = size_t{1} << 18;
    pool.run((values.size() + kPart - 1) / kPart, [&](size_t part) {
      Rng rng(i << 32 | part);
      const size_t end = std::min(values.size(), (part + 1) * kPart);
      for (size_t k = part * kPart; k < end; ++k) {
        values[k] = static_cast<float>(width * (rng.uniform() - 0.5));
      }
    });
  }
  return weights;
}

std::vector<int32_t> random_ids(const ModelConfig& config, int64_t count, Rng& rng) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) {
    id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(config.vocab_size)));
  }
  return ids;
}

// Waits for the device, so that the next clock reading includes all of its work.
void finish_device_work(const Options& options) {
#ifdef LEEWAY_CUDA
  if (options.device != Device::cpu) cudaDeviceSynchronize();
#endif
  static_cast<void>(options);
}

// Device memory in use. Allocators keep what they once had, so after a step this is the step's
// peak.
double used_gib(const Options& options) {
#ifdef LEEWAY_CUDA
  size_t free = 0, total = 0;
  if (options.device != Device::cpu && cudaMemGetInfo(&free, &total) == cudaSuccess) {
    return static_cast<double>(total - free) / kGibi;
  }
#endif
  static_cast<void>(options);
  return kNone;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

using Fields = std::vector<std::pair<const char*, double>>;

void print(const std::string& name, const Fields& fields) {
  JsonWriter json;
  json.begin_object().key("name").value(name);
  for (const auto& [key, value] : fields) json.key(key).value(value);
  std::printf("%s\n", json.end_object().text().c_str());
  std::fflush(stdout);
}

// ---------------------------------------------------------------------------------------------
// Training

// With `uneven` sequences have a quarter to seven quarters of the length, and the same sum.
std::vector<Sample> samples_of(const Workload& work, double trained_share, bool uneven = false) {
  Rng rng(3);
  std::vector<Sample> samples(static_cast<size_t>(work.sequences));
  int64_t left = work.sequences * work.length;
  for (size_t i = 0; i < samples.size(); ++i) {
    Sample& sample = samples[i];
    const double share = static_cast<double>(i) / static_cast<double>(samples.size() - 1);
    int64_t length = work.length;
    if (uneven) length = std::llround(static_cast<double>(work.length) * (0.25 + 1.5 * share));
    if (i + 1 == samples.size()) length = left;
    left -= length;
    sample.ids = random_ids(work.config, length, rng);
    sample.advantages.assign(sample.ids.size(), 1.0f);
    sample.loss_mask.assign(sample.ids.size(), 0);
    for (size_t t = 1; t < sample.ids.size(); ++t) {
      sample.loss_mask[t] = rng.uniform() < trained_share;
    }
  }
  return samples;
}

// Rollouts of a slightly different policy, and advantages of both signs.
void make_off_policy(Trainer& trainer, std::vector<Sample>& samples) {
  Rng rng(5);
  const TokenValues logprobs = trainer.forward(samples);
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].rollout = logprobs[i];
    for (float& value : samples[i].rollout) value += static_cast<float>(0.05 * rng.normal());
    for (float& value : samples[i].advantages) value = static_cast<float>(rng.normal());
  }
}

void train_case(const Options& options, const Workload& work, Trainer& trainer,
                const std::string& name, std::span<const Sample> samples) {
  std::vector<double> passes, steps;
  double loss = 0.0;
  for (int round = -2; round < options.repeats; ++round) {  // two to warm up
    finish_device_work(options);
    const double pass = seconds_of([&] {
      const PassResult result = trainer.forward_backward(samples, {});
      if (!result.failure.empty()) throw Error(name + ": " + result.failure);
      loss = result.loss;
      finish_device_work(options);
    });
    const double step = seconds_of([&] {
      const OptimResult result = trainer.optim_step();
      if (!result.failure.empty()) throw Error(name + ": " + result.failure);
      finish_device_work(options);
    });
    if (round >= 0) passes.push_back(pass), steps.push_back(step);
  }
  const double tokens = static_cast<double>(work.sequences * work.length);
  const double pass = median(passes), step = median(steps);
  const char* moments = options.optimizer_state == OptimizerState::int8 ? ", int8 moments" : "";
  print("ours, train, " + name + moments, {{"tokens", tokens},
                                           {"forward_backward_seconds", pass},
                                           {"optimizer_seconds", step},
                                           {"tokens_per_second", tokens / (pass + step)},
                                           {"forward_backward_tokens_per_second", tokens / pass},
                                           {"used_gib", used_gib(options)},
                                           {"loss", loss}});
}

void train(const Options& options, const Workload& work, const Parameters& weights) {
  choose_device_memory(options.device, /*shares_weights=*/false);  // as `leeway train` does
  const MakeTrainingBackend backend = training_backend(options.device, TrainingPrecision::bf16);
  TrainerTable table;
  table.max_tokens = work.sequences * work.length;  // one pass
  table.recompute_activations = options.recompute;
  table.optimizer_state = options.optimizer_state;
  table.optimizer.learning_rate = 1e-6;  // the policy stays where the rollouts are
  {
    // -A log pi with A = 1: the mean token loss that transformers computes.
    Trainer trainer(weights, Catalog().make_spec("reinforce", {}), table, backend);
    train_case(options, work, trainer, "mean token loss", samples_of(work, 1.0));
    train_case(options, work, trainer, "mean token loss, uneven lengths",
               samples_of(work, 1.0, true));
  }
  Trainer trainer(weights, Catalog().make_spec("icepop", {}), table, backend);
  for (const auto& [name, share] :
       {std::pair{"icepop", 1.0}, std::pair{"icepop, 40 % trainable", 0.4}}) {
    std::vector<Sample> samples = samples_of(work, share);
    make_off_policy(trainer, samples);
    train_case(options, work, trainer, name, samples);
  }
}

// ---------------------------------------------------------------------------------------------
// Sampling

struct SamplingTime {
  double seconds = 0.0, decode_seconds = 0.0;  // decode: steps without prefill rows
  int64_t sampled = 0, decoded = 0;
};

SamplingTime sample_all(Engine& engine, const Workload& work) {
  Rng rng(7);
  for (int64_t i = 0; i < work.prompts; ++i) {
    engine.submit({.prompt = random_ids(work.config, work.prompt_length, rng),
                   .max_new_tokens = work.new_tokens,
                   .seed = static_cast<uint64_t>(i)});
  }
  SamplingTime time;
  while (!engine.idle()) {
    StepReport report;
    const double seconds = seconds_of([&] { report = engine.step(); });
    time.seconds += seconds;
    time.sampled += report.sampled;
    if (report.prompt_rows > 0) continue;
    time.decode_seconds += seconds;
    time.decoded += report.sampled;
  }
  int64_t tokens = 0;
  for (const SampledSequence& finished : engine.take_finished()) {
    tokens += static_cast<int64_t>(finished.ids.size());
  }
  if (tokens != work.prompts * work.new_tokens) throw Error("sampling returned too few tokens");
  return time;
}

void sample(const Options& options, const Workload& work, const Parameters& weights) {
  const ModelConfig& config = work.config;
  EngineOptions engine_options;
  engine_options.max_sequences = work.prompts;
  engine_options.max_rows_per_step = 8192;
  // What the sequences fill, in blocks of kBlockKeys; the CPU's cache is float32.
  const int64_t blocks = (work.prompt_length + work.new_tokens + kBlockKeys - 1) / kBlockKeys;
  const int64_t bytes = options.device == Device::cpu ? 4 : 2;
  engine_options.kv_bytes = work.prompts * blocks * kBlockKeys * config.num_hidden_layers *
                            config.num_key_value_heads * config.head_dim * 2 * bytes;
  engine_options.backend = sampling_backend(options.device, options.precision);
  Engine engine(weights, 0, engine_options);
  std::vector<double> whole, decode, prompts;
  for (int round = -1; round < std::min(options.repeats, 3); ++round) {
    const SamplingTime time = sample_all(engine, work);
    if (round < 0) continue;  // to warm up
    whole.push_back(static_cast<double>(time.sampled) / time.seconds);
    decode.push_back(time.decoded > 0 ? static_cast<double>(time.decoded) / time.decode_seconds
                                      : kNone);
    prompts.push_back(time.seconds - time.decode_seconds);
  }
  print(options.precision == Precision::fp8 ? "ours, sample, fp8" : "ours, sample",
        {{"sequences", static_cast<double>(work.prompts)},
         {"prompt_tokens", static_cast<double>(work.prompt_length)},
         {"new_tokens", static_cast<double>(work.new_tokens)},
         {"tokens_per_second", median(whole)},  // new tokens; the time includes the prompts
         {"decode_tokens_per_second", median(decode)},
         {"prompt_seconds", median(prompts)},  // of passes with prompts; some sample as well
         {"kv_gib", static_cast<double>(engine_options.kv_bytes) / kGibi},
         {"used_gib", used_gib(options)}});
}

// ---------------------------------------------------------------------------------------------

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--device" && (value == "cuda" || value == "cpu")) {
      options.device = *value_named<Device>(value);
    } else if (name == "--model" && (value == "0.6B" || value == "tiny")) {
      options.model = value;
    } else if (name == "--repeats" && std::atoi(value.c_str()) > 0) {
      options.repeats = std::atoi(value.c_str());
    } else if (name == "--recompute" && value_named<Recompute>(value)) {
      options.recompute = *value_named<Recompute>(value);
    } else if (name == "--optimizer-state" && value_named<OptimizerState>(value)) {
      options.optimizer_state = *value_named<OptimizerState>(value);
    } else if (name == "--sequences" && std::atoi(value.c_str()) > 0) {
      options.sequences = std::atoi(value.c_str());
    } else if (name == "--prompt" && std::atoi(value.c_str()) > 0) {
      options.prompt = std::atoi(value.c_str());
    } else if (name == "--new" && std::atoi(value.c_str()) > 0) {
      options.fresh = std::atoi(value.c_str());
    } else if (name == "--precision" && (value == "bf16" || value == "fp8")) {
      options.precision = *value_named<Precision>(value);
    } else if (name == "--cases" && !value.empty()) {
      options.cases = value;
    } else if (name == "--only" && (value == "train" || value == "sample")) {
      options.only = value;
    } else {
      throw Error(
          "gpu_model_benchmark: " + name + " " + value +
          ": unknown option; options are --device cuda|cpu, --model 0.6B|tiny, --repeats N, "
          "--only train|sample, --recompute off|selective|layer, "
          "--optimizer-state float32|int8, --sequences N, --prompt TOKENS, --new TOKENS, "
          "--cases N:PROMPT:NEW,.., --precision bf16|fp8");
    }
  }
  return options;
}

// The weights are made once, before a device is touched: processes share them.
void sample_cases(const Options& options) {
  const Parameters weights = weights_of(workload_of(options).config);
  for (size_t at = 0; at < options.cases.size();) {
    const size_t end = std::min(options.cases.find(',', at), options.cases.size());
    const std::string text = options.cases.substr(at, end - at);
    at = end + 1;
    Options one = options;
    if (std::sscanf(text.c_str(), "%" SCNd64 ":%" SCNd64 ":%" SCNd64, &one.sequences, &one.prompt,
                    &one.fresh) != 3) {
      throw Error("--cases: " + text + ": a case is SEQUENCES:PROMPT:NEW, such as 32:128:128");
    }
    const pid_t child = fork();
    if (child < 0) throw Error("--cases: no process for " + text);
    if (child == 0) {
      int status = 0;
      try {
        check_device(one.device, std::string("--device ") + name_of(one.device));
        sample(one, workload_of(one), weights);
      } catch (const Error& error) {
        std::fprintf(stderr, "%s: %s\n", text.c_str(), error.what());
        status = 2;
      }
      std::fflush(nullptr);
      _exit(status);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0)
      throw Error("--cases: " + text + " failed");
  }
}

void run(const Options& options) {
  if (!options.cases.empty()) return sample_cases(options);
  check_device(options.device, std::string("--device ") + name_of(options.device));
  const Workload work = workload_of(options);
  const Parameters weights = weights_of(work.config);
  if (options.only != "sample") train(options, work, weights);
  if (options.only != "train") sample(options, work, weights);
}

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  try {
    leeway::run(leeway::parse(argc, argv));
    return 0;
  } catch (const leeway::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
