#include <fmt/format.h>

#include <chrono>
#include <optional>

#include "cli/choice_option.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/terminal_progress.h"
#include "cli/text_options.h"
#include "generate/input.h"
#include "generate/model_text.h"
#include "generate/scoring.h"
#include "generate/scoring_text.h"
#include "generate/token_lists.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "run/devices.h"
#include "run/durations.h"

namespace leeway {
namespace {

struct Options {
  ModelTextOptions text;
  std::string adapter;
  std::string tokens, text_file, messages;
  std::optional<std::string> given;  // --text
  bool json = false;
  Numerics numerics = Numerics::exact;
  Device device = Device::cpu;
  TrainingPrecision precision = TrainingPrecision::float32;
  int threads = 0;
};

void check_options(const Options& options) {
  const int inputs = (options.tokens.empty() ? 0 : 1) + (options.given ? 1 : 0) +
                     (options.text_file.empty() ? 0 : 1) + (options.messages.empty() ? 0 : 1);
  if (inputs != 1) {
    throw Error("logprobs: give one of --text, --text-file, --messages and --tokens");
  }
  if (!options.tokens.empty() && options.json) {
    throw Error("--json with --tokens: its output is JSON without that");
  }
  if (!options.tokens.empty() && !options.text.tokenizer.empty()) {
    throw Error("--tokenizer with --tokens: ids in, numbers out: there is no text");
  }
  if (options.messages.empty() && !options.text.renderer.empty()) {
    throw Error("--renderer without --messages: there is no conversation to write");
  }
  if (options.device == Device::cpu && options.precision == TrainingPrecision::bf16) {
    throw Error("--precision bf16: works on the GPU only; the CPU computes in float32");
  }
  check_device(options.device, "--device cuda");
}

// With progress and speed on stderr.
std::vector<std::vector<float>> score(const Options& options, const Parameters& parameters,
                                      const std::vector<std::vector<int32_t>>& lists,
                                      const std::string& name) {
  size_t total = 0;
  for (const auto& list : lists) total += list.size();
  TerminalProgress progress;
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::vector<float>> scores;
  try {
    scores = score_tokens(
        parameters, lists,
        {.numerics = options.numerics,
         .threads = options.threads,
         .backend = training_backend(options.device, options.precision)},
        [&](size_t done) { progress.count("log-probabilities", "tokens", done, total); });
  } catch (const Error& error) {
    throw Error(fmt::format("{}, {}: {}", options.text.folder, name, error.what()));
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  say(fmt::format("{} tokens in {}, {:.0f} tokens/s", total, duration_text(seconds),
                  static_cast<double>(total) / std::max(seconds, 1e-9)));
  return scores;
}

void score_ids(const Options& options) {
  const Parameters parameters = load_named_policy(options.text.folder, options.adapter);
  const auto lists = read_token_lists(options.tokens, parameters.config());
  print(scores_json(score(options, parameters, lists, options.tokens)));
}

void score_text(const Options& options) {
  ModelTextOptions text_options = options.text;
  text_options.needs_renderer = !options.messages.empty();
  const ModelConfig config = load_model_config(model_folder_of(options.text.folder));
  const ModelText text = load_model_text(text_options, config);
  ScoredText scored;
  std::string name = "--text";
  if (options.given) {
    scored.ids = plain_prompt(text, name, *options.given);
  } else {
    const Input input = read_input(options.messages.empty() ? options.text_file : options.messages);
    name = input.name;
    if (options.messages.empty()) {
      scored.ids = plain_prompt(text, name, input.text);
    } else {
      const RenderRequest request = read_conversation(name, input.text);
      Rendered rendered = render_conversation(text, name, request);
      scored.ids = std::move(rendered.ids);
      scored.sampled = std::move(rendered.sampled);
    }
  }
  const auto size = static_cast<int64_t>(scored.ids.size());
  if (size > config.max_position_embeddings) {
    throw Error(fmt::format("{}: {} tokens, but the model's max_position_embeddings is {}", name,
                            size, config.max_position_embeddings));
  }
  const Parameters parameters = load_named_policy(options.text.folder, options.adapter);
  scored.logprobs = score(options, parameters, {scored.ids}, name).front();
  print(options.json ? scored_json(scored, *text.tokenizer)
                     : scored_table(scored, *text.tokenizer));
}

}  // namespace

void add_logprobs(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "logprobs",
      "Log-probability of every token given those before it, float32, as the trainer computes it.\n"
      "  leeway logprobs MODEL --text 'The capital of France is Paris.'\n"
      "A text, or a conversation as the model's chat format writes it, gives a row per token, the\n"
      "total and the perplexity. Token ids: --tokens reads {\"tokens\": [[1, 2, ..], ..]} and "
      "prints\n"
      "{\"logprobs\": [[null, ..], ..]}.");
  auto options = std::make_shared<Options>();
  add_model_option(*command, options->text.folder);
  // By a function, since an empty text is one too.
  const auto set_text = [options](const std::string& text) { options->given = text; };
  command->add_option_function<std::string>("--text", set_text, "The text")->type_name("WORDS");
  command->add_option("--text-file", options->text_file, "A file with the text, or - for stdin");
  command->add_option("--messages", options->messages,
                      "A conversation: a JSON file, or - for stdin; see docs/formats.md");
  command->add_option("--tokens", options->tokens, "JSON file with token ids, or - for stdin");
  add_text_options(*command, options->text);
  add_adapter_option(*command, options->adapter);
  command->add_flag("--json", options->json,
                    "Print JSON: tokens, text, logprobs, total, perplexity");
  add_choice(*command, "--numerics", options->numerics,
             "On the CPU. exact: bit for bit what sampling records; fast: products by the BLAS");
  add_choice(*command, "--device", options->device, "Device to run on; cuda needs a GPU");
  add_choice(*command, "--precision", options->precision, "Dtype of the passes on cuda",
             {"float32", "bf16"});
  command->add_option("--threads", options->threads, "0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->callback([options] {
    check_model_option(options->text.folder, options->adapter);
    check_options(*options);
    options->tokens.empty() ? score_text(*options) : score_ids(*options);
  });
}

}  // namespace leeway
