#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/json.h"
#include "cli/choice_option.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/seed_option.h"
#include "cli/terminal_progress.h"
#include "cli/token_lists.h"
#include "engine/engine.h"
#include "leeway/error.h"
#include "run/devices.h"
#include "run/durations.h"

namespace leeway {
namespace {

struct Options {
  std::string model, tokens;
  Device device = Device::cpu;
  int64_t max_new_tokens = 0, samples = 1;
  SamplingSettings sampling;
  uint64_t seed = 0;
  bool stop_at_eos = false;
  std::vector<int32_t> stop_ids;
  EngineOptions engine;
};

void write_completions(const std::vector<SampledSequence>& completions) {
  JsonWriter json;
  const auto lists = [&](const char* key, auto member, auto write) {
    json.key(key).begin_array();
    for (const SampledSequence& completion : completions) {
      json.begin_array();
      for (const auto& value : completion.*member) write(value);
      json.end_array();
    }
    json.end_array();
  };
  const auto logprob = [&](float value) { json.value(value); };
  json.begin_object();
  lists("tokens", &SampledSequence::ids, [&](int32_t id) { json.value(static_cast<double>(id)); });
  lists("logprobs", &SampledSequence::raw_logprobs, logprob);
  lists("processed_logprobs", &SampledSequence::processed_logprobs, logprob);
  json.key("finish").begin_array();
  for (const SampledSequence& completion : completions) json.value(name_of(completion.finish));
  json.end_array().end_object();
  print(json.text() + "\n");
}

void run(const Options& options) {
  check_sampling(options.sampling);
  check_device(options.device, "--device cuda");
  if (options.device == Device::cuda && options.engine.precision == Precision::int8) {
    throw Error("--precision int8: works on the CPU only; with --device cuda use bf16 or float32");
  }
  const Parameters parameters = load_parameters(options.model);
  const auto prompts = read_token_lists(options.tokens, parameters.config());
  EngineOptions engine_options = options.engine;
  engine_options.backend = sampling_backend(options.device, engine_options.precision);
  Engine engine(parameters, 0, engine_options);
  std::vector<int32_t> stop_ids = options.stop_ids;
  if (options.stop_at_eos) {
    const auto& eos = parameters.config().eos_token_id;
    if (eos.empty()) {
      throw Error(
          fmt::format("{}/config.json has no eos_token_id to stop at; name ids with "
                      "--stop-id",
                      options.model));
    }
    stop_ids.insert(stop_ids.end(), eos.begin(), eos.end());
  }
  // Each prompt has its own random stream, independent of the others.
  for (size_t i = 0; i < prompts.size(); ++i) {
    try {
      engine.submit({.prompt = prompts[i],
                     .samples = options.samples,
                     .max_new_tokens = options.max_new_tokens,
                     .sampling = options.sampling,
                     .stop_ids = stop_ids,
                     .seed = options.seed + i});
    } catch (const Error& error) {
      throw Error(fmt::format("{}: tokens[{}]: {}", options.tokens, i, error.what()));
    }
  }
  TerminalProgress progress;
  const auto start = std::chrono::steady_clock::now();
  const auto most = prompts.size() * static_cast<size_t>(options.samples * options.max_new_tokens);
  size_t sampled = 0;
  std::vector<SampledSequence> completions;
  while (!engine.idle()) {
    sampled += static_cast<size_t>(engine.step().sampled);
    for (SampledSequence& completion : engine.take_finished()) {
      completions.push_back(std::move(completion));
    }
    progress.count("generate", "tokens", sampled, most);
  }
  std::sort(completions.begin(), completions.end(),
            [](const SampledSequence& a, const SampledSequence& b) {
              return std::pair(a.request, a.sample) < std::pair(b.request, b.sample);
            });
  write_completions(completions);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  say(fmt::format("{} tokens in {}, {:.0f} tokens/s", sampled, duration_text(seconds),
                  static_cast<double>(sampled) / std::max(seconds, 1e-9)));
}

}  // namespace

void add_generate(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "generate",
      "Samples new tokens after each prompt. Reads {\"tokens\": [[1, 2, ..], ..]}, prints\n"
      "{\"tokens\": new ids, \"logprobs\": of the model's own distribution, as `leeway logprobs` "
      "gives\nthem, \"processed_logprobs\": after temperature and filters, \"finish\"}, a list "
      "each\nper prompt (and sample).");
  auto options = std::make_shared<Options>();
  command->add_option("--model", options->model, "Hugging Face folder (Qwen3, Qwen2, Llama)")
      ->required();
  command->add_option("--tokens", options->tokens, "JSON file with prompts, or - for stdin")
      ->required();
  command
      ->add_option("--max-new-tokens", options->max_new_tokens,
                   "Maximum number of tokens to sample")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_option("--temperature", options->sampling.temperature, "0: greedy")
      ->capture_default_str();
  command->add_option("--top-k", options->sampling.top_k, "0: off")->capture_default_str();
  command->add_option("--top-p", options->sampling.top_p, "1: off")->capture_default_str();
  command->add_option("--min-p", options->sampling.min_p, "0: off")->capture_default_str();
  command->add_option("--seed", options->seed, "Prompt i uses seed + i: same seed, same tokens")
      ->check(not_negative())
      ->capture_default_str();
  command->add_option("--samples", options->samples, "Completions per prompt")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--stop-id", options->stop_ids, "Ids that end a completion");
  command->add_flag("--stop-at-eos", options->stop_at_eos, "End at the model's eos_token_id");
  add_choice(*command, "--precision", options->engine.precision,
             "Dtype of the weights while sampling");
  add_choice(*command, "--device", options->device, "Device to run on; cuda needs a GPU");
  command
      ->add_option("--kv-bytes", options->engine.kv_bytes,
                   "Memory for the KV cache; requests beyond it wait")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50))
      ->capture_default_str();
  command->add_option("--threads", options->engine.threads, "0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->callback([options] { run(*options); });
}

}  // namespace leeway
