#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "cli/chat_terminal.h"
#include "cli/choice_option.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/seed_option.h"
#include "cli/terminal_progress.h"
#include "cli/text_options.h"
#include "engine/engine.h"
#include "engine/sampler.h"
#include "generate/completion_text.h"
#include "generate/generation.h"
#include "generate/input.h"
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
  std::string tokens, messages;
  std::optional<std::string> prompt;
  bool chat = false, json = false, quiet = false, no_thinking = false, stop_at_eos = false;
  GenerationFlags flags;
  Device device = Device::cpu;
  int64_t samples = 1;
  uint64_t seed = 0;
  EngineOptions engine;
};

void check_options(const Options& options) {
  const int inputs = (options.tokens.empty() ? 0 : 1) + (options.prompt ? 1 : 0) +
                     (options.messages.empty() ? 0 : 1) + (options.chat ? 1 : 0);
  if (inputs != 1) {
    throw Error("generate: give one of --prompt, --messages, --chat and --tokens");
  }
  const auto refuse = [](bool given, const char* option, const char* with, const char* why) {
    if (given) throw Error(fmt::format("{} with {}: {}", option, with, why));
  };
  const bool no_renderer = options.messages.empty() && !options.chat;
  refuse(options.chat && options.json, "--json", "--chat", "a chat is for people; use --messages");
  refuse(options.chat && options.samples > 1, "--samples", "--chat",
         "there is one reply at a time");
  if (!options.tokens.empty()) {
    const char* why = "ids in, ids out: there is no text";
    refuse(options.json, "--json", "--tokens", "its output is JSON without that");
    refuse(options.quiet, "--quiet", "--tokens", "it is for text");
    refuse(!options.flags.stop_texts.empty(), "--stop", "--tokens", why);
    refuse(!options.text.tokenizer.empty(), "--tokenizer", "--tokens", why);
    if (!options.flags.max_new_tokens) throw Error("--tokens: give --max-new-tokens too");
  } else {
    refuse(options.stop_at_eos, "--stop-at-eos", "text", "it always stops there");
  }
  refuse(no_renderer && !options.text.renderer.empty(), "--renderer", "a plain prompt",
         "it is for --messages and --chat");
  refuse(no_renderer && options.no_thinking, "--no-thinking", "a plain prompt",
         "it is for --messages and --chat");
  check_device(options.device, "--device cuda");
  check_precision(options.device, options.engine.precision);
}

EngineOptions engine_options(const Options& options) {
  EngineOptions engine = options.engine;
  engine.backend = sampling_backend(options.device, engine.precision);
  engine.max_rows_per_step = rows_per_step(options.device);
  engine.max_sequences = std::max(engine.max_sequences, options.samples);
  return engine;
}

void check_stop_ids(const Options& options, const ModelConfig& config) {
  for (const int32_t id : options.flags.stop_ids) {
    if (id >= 0 && id < config.vocab_size) continue;
    throw Error(
        fmt::format("--stop-id {}: the model's ids are 0 to {}", id, config.vocab_size - 1));
  }
}

// Says at its end how many tokens took how long.
class Speed {
 public:
  void say_for(size_t tokens) const {
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start_;
    say(fmt::format("{} tokens in {}, {:.0f} tokens/s", tokens, duration_text(time.count()),
                    static_cast<double>(tokens) / std::max(time.count(), 1e-9)));
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void generate_from_ids(const Options& options) {
  SamplingSettings sampling;
  sampling.temperature = options.flags.temperature.value_or(sampling.temperature);
  sampling.top_k = options.flags.top_k.value_or(sampling.top_k);
  sampling.top_p = options.flags.top_p.value_or(sampling.top_p);
  sampling.min_p = options.flags.min_p.value_or(sampling.min_p);
  check_sampling(sampling);
  check_stop_ids(options, load_model_config(model_folder_of(options.text.folder)));
  const Parameters parameters = load_named_policy(options.text.folder, options.adapter);
  const auto prompts = read_token_lists(options.tokens, parameters.config());
  std::vector<int32_t> stop_ids = options.flags.stop_ids;
  if (options.stop_at_eos) {
    const auto& eos = parameters.config().eos_token_id;
    if (eos.empty()) {
      throw Error(
          fmt::format("{}/config.json has no eos_token_id to stop at; name ids with "
                      "--stop-id",
                      options.text.folder));
    }
    stop_ids.insert(stop_ids.end(), eos.begin(), eos.end());
  }
  Engine engine(parameters, 0, engine_options(options));
  const int64_t limit = *options.flags.max_new_tokens;
  // Each prompt has its own random stream, independent of the others.
  for (size_t i = 0; i < prompts.size(); ++i) {
    try {
      engine.submit({.prompt = prompts[i],
                     .samples = options.samples,
                     .max_new_tokens = limit,
                     .sampling = sampling,
                     .stop_ids = stop_ids,
                     .seed = options.seed + i});
    } catch (const Error& error) {
      throw Error(fmt::format("{}: tokens[{}]: {}", options.tokens, i, error.what()));
    }
  }
  TerminalProgress progress;
  const Speed speed;
  const size_t most = prompts.size() * static_cast<size_t>(options.samples * limit);
  size_t sampled = 0;
  const auto sequences = run_to_end(engine, [&](size_t tokens) {
    sampled = tokens;
    progress.count("generate", "tokens", tokens, most);
  });
  print(sequences_json(sequences));
  speed.say_for(sampled);
}

// The prompt of --prompt or --messages, and the options it was rendered with.
std::vector<int32_t> prompt_of(const Options& options, const ModelText& text,
                               RenderOptions& render) {
  if (options.prompt) return plain_prompt(text, "--prompt", *options.prompt);
  const Input input = read_input(options.messages);
  RenderRequest request = read_conversation(input.name, input.text);
  request.options.add_generation_prompt = true;
  if (options.no_thinking) request.options.enable_thinking = false;
  render = request.options;
  return render_conversation(text, input.name, request).ids;
}

void print_generated(const Options& options, const std::vector<Generated>& all,
                     const Renderer* renderer, const RenderOptions& render) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (options.json) {
      print(generated_json(all[i], renderer, render));
    } else {
      print(fmt::format("[{}/{}]\n{}\n", i + 1, all.size(), all[i].text));
    }
  }
}

void generate_text(const Options& options) {
  ModelTextOptions text_options = options.text;
  text_options.needs_renderer = !options.prompt;
  const ModelConfig config = load_model_config(model_folder_of(options.text.folder));
  check_stop_ids(options, config);
  const ModelText text = load_model_text(text_options, config);
  if (options.no_thinking && !text.renderer->has_thinking()) {
    throw Error(fmt::format("--no-thinking: the renderer {} has no thinking; remove it",
                            text.renderer->name()));
  }
  const GenerationSettings settings = generation_settings(options.flags, text);
  const std::string source = options.prompt ? "--prompt" : "--messages " + options.messages;
  const auto named = [&](const auto& work) {
    try {
      work();
    } catch (const OutputError&) {
      throw;
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", source, error.what()));
    }
  };
  // Before the weights, which take long.
  RenderOptions render;
  std::vector<int32_t> prompt;
  if (!options.chat) {
    prompt = prompt_of(options, text, render);
    named([&] { check_room(prompt.size(), settings, config.max_position_embeddings); });
  }
  const bool quiet = options.json || options.quiet;
  if (!quiet) say(settings_text(options.flags, text));
  const Parameters parameters = load_named_policy(options.text.folder, options.adapter);
  Engine engine(parameters, 0, engine_options(options));
  const int64_t positions = most_positions(engine, config);
  if (options.chat) {
    ChatSession session(engine, text, positions, settings, options.seed);
    if (options.no_thinking) session.disable_thinking();
    TerminalChat terminal;
    return run_chat(session, terminal);
  }
  const bool streams = options.samples == 1 && !options.json;
  TerminalProgress progress;
  GenerationEvents events;
  size_t sampled = 0;
  if (streams) {
    events.on_text = [](int64_t, const TextPiece& piece) {
      print_piece(piece.text, piece.thinking);
    };
  }
  events.on_pass = [&](size_t tokens, size_t most) {
    sampled = tokens;
    if (!streams) progress.count("generate", "tokens", tokens, most);
  };
  const Speed speed;
  std::vector<Generated> all;
  named([&] {
    all = generate(engine, *text.tokenizer, positions,
                   {.ids = prompt, .samples = options.samples, .seed = options.seed}, settings,
                   events);
  });
  if (streams) print("\n");
  if (!streams) print_generated(options, all, text.renderer.get(), render);
  if (!quiet) speed.say_for(sampled);
}

void add_inputs(CLI::App& command, Options& options) {
  add_model_option(command, options.text.folder);
  // By a function, since an empty text is one too.
  const auto set_prompt = [&options](const std::string& text) { options.prompt = text; };
  command.add_option_function<std::string>("--prompt", set_prompt, "A text to continue")
      ->type_name("WORDS");
  command.add_option(
      "--messages", options.messages,
      "A conversation to reply to: a JSON file, or - for stdin; see docs/formats.md");
  command.add_flag("--chat", options.chat, "Talk with the model; /help lists the commands");
  command.add_option("--tokens", options.tokens,
                     "JSON file with prompts of token ids, or - for stdin");
}

void add_sampling(CLI::App& command, Options& options) {
  GenerationFlags& flags = options.flags;
  command
      .add_option("--max-new-tokens", flags.max_new_tokens,
                  "Most tokens to sample; default for text: the folder's, or 1024, and what fits")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command
      .add_option("--temperature", flags.temperature,
                  "0: greedy; default for text: the folder's, or 1")
      ->default_str("1");
  command.add_option("--top-k", flags.top_k, "0: off; default as above")->default_str("0");
  command.add_option("--top-p", flags.top_p, "1: off; default as above")->default_str("1");
  command.add_option("--min-p", flags.min_p, "0: off; default as above")->default_str("0");
  command
      .add_option("--seed", options.seed, "Prompt or reply i uses seed + i: same seed, same tokens")
      ->check(not_negative())
      ->capture_default_str();
  command.add_option("--samples", options.samples, "Completions per prompt")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str();
  command.add_option("--stop", flags.stop_texts, "A text that ends a completion; may be repeated")
      ->type_name("WORDS")
      ->allow_extra_args(false);
  command.add_option("--stop-id", flags.stop_ids, "Ids that end a completion");
  command.add_flag("--stop-at-eos", options.stop_at_eos,
                   "With --tokens: end at the model's eos_token_id, as text always does");
}

}  // namespace

void add_generate(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "generate",
      "Samples from a model: continues a text, replies to a conversation, or talks in the "
      "terminal.\n"
      "  leeway generate MODEL --chat\n"
      "  leeway generate MODEL --prompt 'Once upon a time' --max-new-tokens 50\n"
      "  leeway generate MODEL --messages talk.json --json\n"
      "Tokenizer, chat format, sampling defaults and end tokens come from the model's folder.\n"
      "--json prints an object per sample: text, content, reasoning, tool_calls, tokens, "
      "logprobs,\n"
      "processed_logprobs, finish.\n"
      "Token ids: --tokens reads {\"tokens\": [[1, 2, ..], ..]} and prints {\"tokens\": new ids,\n"
      "\"logprobs\": of the model's own distribution, as `leeway logprobs` gives them,\n"
      "\"processed_logprobs\": after temperature and filters, \"finish\"}, a list each per prompt\n"
      "(and sample).");
  auto options = std::make_shared<Options>();
  add_inputs(*command, *options);
  add_sampling(*command, *options);
  add_text_options(*command, options->text);
  add_adapter_option(*command, options->adapter);
  command->add_flag("--no-thinking", options->no_thinking,
                    "Ask the chat format for a reply without thinking");
  command->add_flag("--json", options->json, "Print JSON, one object per sample");
  command->add_flag("--quiet", options->quiet,
                    "Do not say what comes from the folder, nor the speed");
  add_choice(*command, "--precision", options->engine.precision,
             "Dtype of the weights while sampling; int8 is for cpu, fp8 for cuda");
  add_choice(*command, "--device", options->device, "Device to run on; cuda needs a GPU");
  command
      ->add_option("--kv-bytes", options->engine.kv_bytes,
                   "Memory for the KV cache; requests beyond it wait")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50))
      ->capture_default_str();
  command->add_option("--threads", options->engine.threads, "0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->callback([options] {
    check_model_option(options->text.folder, options->adapter);
    check_options(*options);
    options->tokens.empty() ? generate_text(*options) : generate_from_ids(*options);
  });
}

}  // namespace leeway
