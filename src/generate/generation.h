// Completions by the engine: with text, stop texts and streaming, or plain token ids.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "generate/model_text.h"
#include "generate/text_stream.h"

namespace leeway {

// What the caller says; the folder decides the rest.
struct GenerationFlags {
  std::optional<float> temperature, top_p, min_p;
  std::optional<int64_t> top_k, max_new_tokens;
  std::vector<std::string> stop_texts;  // end a completion, and are not part of its text
  std::vector<int32_t> stop_ids;        // beside the folder's
};

struct GenerationSettings {
  SamplingSettings sampling;
  int64_t max_new_tokens = 0;
  bool limit_is_given = false;  // else it gives way to what fits the model
  std::vector<int32_t> stop_ids;
  std::vector<std::string> stop_texts;
};

// New tokens where neither the caller nor the folder says how many.
inline constexpr int64_t kUsualNewTokens = 1024;

// Flags first, then generation_config.json, then the engine's defaults. Throws Error for values out
// of range and for an empty stop text.
GenerationSettings generation_settings(const GenerationFlags& flags, const ModelText& text);

// What of it came from the folder, in a line for people: renderer, sampling, end tokens.
std::string settings_text(const GenerationFlags& flags, const ModelText& text);

// Where the positions of a model or of the KV cache end.
int64_t most_positions(const Engine& engine, const ModelConfig& config);

// Throws Error if a prompt of so many tokens leaves no room for a reply, or none for a given limit.
void check_room(size_t prompt_tokens, const GenerationSettings& settings, int64_t positions);

// One completion.
struct Generated {
  SampledSequence sequence;  // finish is `stop` also where a stop text ended it
  std::string text;          // without the stop id or the stop text that ended it
};

struct GenerationEvents {
  // The next piece of the text of a sample.
  std::function<void(int64_t sample, const TextPiece& piece)> on_text;
  // Tokens of all samples so far, and the most there can be; after every pass.
  std::function<void(size_t sampled, size_t most)> on_pass;
  // Asked after every pass; true ends all samples as cancelled.
  std::function<bool()> stop;
};

struct GenerationPrompt {
  std::vector<int32_t> ids;
  int64_t samples = 1;
  uint64_t seed = 0;
};

// Runs the engine until every sample has ended; in order of the samples. The engine must be idle.
// `positions`: most_positions(). Throws Error as check_room does, and what the engine throws; the
// engine is idle then too.
std::vector<Generated> generate(Engine& engine, const Tokenizer& tokenizer, int64_t positions,
                                const GenerationPrompt& prompt, const GenerationSettings& settings,
                                const GenerationEvents& events);

// Runs the engine until all that was submitted to it has ended; in order of requests and samples.
// `on_pass` gets the number of tokens so far.
std::vector<SampledSequence> run_to_end(Engine& engine,
                                        const std::function<void(size_t sampled)>& on_pass);

}  // namespace leeway
