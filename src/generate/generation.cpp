#include "generate/generation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <utility>

#include "base/json.h"
#include "engine/sampler.h"
#include "kernels/attention.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// The running request: its samples' texts, and how many tokens of each have been read.
class Listener {
 public:
  Listener(Engine& engine, int64_t request, std::vector<TextStream> streams,
           const GenerationEvents& events)
      : engine_(engine),
        request_(request),
        streams_(std::move(streams)),
        read_(streams_.size(), 0),
        results_(streams_.size()),
        events_(events) {}

  // After a pass: reads the new tokens, ends samples that have reached a stop text.
  void listen() {
    for (size_t i = 0; i < streams_.size(); ++i) {
      const auto sample = static_cast<int64_t>(i);
      read(i, engine_.sampled(request_, sample));
      if (streams_[i].stopped()) engine_.cancel_sample(request_, sample);
    }
    for (SampledSequence& sequence : engine_.take_finished()) end(std::move(sequence));
  }

  size_t sampled() const {
    size_t sum = 0;
    for (const size_t count : read_) sum += count;
    return sum;
  }
  std::vector<Generated> take() { return std::move(results_); }

 private:
  void read(size_t i, std::span<const int32_t> ids) {
    for (; read_[i] < ids.size(); ++read_[i]) show(i, streams_[i].push(ids[read_[i]]));
  }

  void end(SampledSequence sequence) {
    const auto i = static_cast<size_t>(sequence.sample);
    std::span<const int32_t> ids = sequence.ids;
    const bool by_id = sequence.finish == Finish::stop;
    if (by_id) ids = ids.first(ids.size() - 1);
    read(i, ids);
    show(i, streams_[i].finish());
    read_[i] = sequence.ids.size();
    if (streams_[i].stopped() && !by_id) sequence.finish = Finish::stop;
    results_[i] = {std::move(sequence), streams_[i].text()};
  }

  void show(size_t i, const TextPiece& piece) {
    if (events_.on_text && !piece.text.empty()) events_.on_text(static_cast<int64_t>(i), piece);
  }

  Engine& engine_;
  int64_t request_;
  std::vector<TextStream> streams_;
  std::vector<size_t> read_;
  std::vector<Generated> results_;
  const GenerationEvents& events_;
};

// Leaves the engine without requests, whatever happens.
class Submitted {
 public:
  Submitted(Engine& engine, int64_t request) : engine_(engine), request_(request) {}
  ~Submitted() {
    // A pass without rows: it only takes the request out.
    if (engine_.cancel(request_)) engine_.step();
    engine_.take_finished();
  }
  Submitted(const Submitted&) = delete;
  Submitted& operator=(const Submitted&) = delete;

 private:
  Engine& engine_;
  int64_t request_;
};

std::string token_names(const ModelText& text, const std::vector<int32_t>& ids) {
  std::vector<std::string> names;
  for (const int32_t id : ids) {
    const bool known = id < text.tokenizer->vocab_size();
    std::string name = known ? text.tokenizer->decode(std::span(&id, 1)) : fmt::format("{}", id);
    if (name.find_first_of(" \t\r\n") != std::string::npos) {
      JsonWriter quoted;
      name = quoted.value(name).text();
    }
    names.push_back(std::move(name));
  }
  return fmt::format("{}", fmt::join(names, " "));
}

}  // namespace

GenerationSettings generation_settings(const GenerationFlags& flags, const ModelText& text) {
  const GenerationConfig& folder = text.generation;
  GenerationSettings settings;
  const auto choose = [](auto& value, const auto& flag, const auto& file) {
    value = flag ? *flag : file.value_or(value);
  };
  choose(settings.sampling.temperature, flags.temperature, folder.temperature);
  choose(settings.sampling.top_p, flags.top_p, folder.top_p);
  choose(settings.sampling.min_p, flags.min_p, folder.min_p);
  choose(settings.sampling.top_k, flags.top_k, folder.top_k);
  settings.max_new_tokens = kUsualNewTokens;
  choose(settings.max_new_tokens, flags.max_new_tokens, folder.max_new_tokens);
  settings.limit_is_given = flags.max_new_tokens.has_value();
  settings.stop_ids = text.end_ids;
  settings.stop_ids.insert(settings.stop_ids.end(), flags.stop_ids.begin(), flags.stop_ids.end());
  settings.stop_texts = flags.stop_texts;
  check_sampling(settings.sampling);
  for (const std::string& stop : flags.stop_texts) {
    if (stop.empty()) throw Error("--stop \"\": the text is empty");
  }
  return settings;
}

std::string settings_text(const GenerationFlags& flags, const ModelText& text) {
  const GenerationConfig& folder = text.generation;
  std::vector<std::string> parts;
  if (text.renderer) parts.push_back(fmt::format("renderer {}", text.renderer->name()));
  const auto add = [&](const char* name, const auto& flag, const auto& file) {
    if (!flag && file) parts.push_back(fmt::format("{} {}", name, *file));
  };
  add("temperature", flags.temperature, folder.temperature);
  add("top_k", flags.top_k, folder.top_k);
  add("top_p", flags.top_p, folder.top_p);
  add("min_p", flags.min_p, folder.min_p);
  add("max_new_tokens", flags.max_new_tokens, folder.max_new_tokens);
  parts.push_back(text.end_ids.empty() ? "no end token"
                                       : "ends at " + token_names(text, text.end_ids));
  if (!folder.not_applied.empty()) {
    parts.push_back(fmt::format("without {}", fmt::join(folder.not_applied, ", ")));
  }
  return fmt::format("{}: {}", text.folder, fmt::join(parts, ", "));
}

int64_t most_positions(const Engine& engine, const ModelConfig& config) {
  return std::min(config.max_position_embeddings, engine.blocks() * kBlockKeys);
}

void check_room(size_t prompt_tokens, const GenerationSettings& settings, int64_t positions) {
  const auto used = static_cast<int64_t>(prompt_tokens);
  if (used >= positions) {
    throw Error(fmt::format("{} tokens leave no room for a reply: there are {} positions", used,
                            positions));
  }
  if (settings.limit_is_given && settings.max_new_tokens > positions - used) {
    throw Error(fmt::format("{} tokens and max_new_tokens {} do not fit: there are {} positions",
                            used, settings.max_new_tokens, positions));
  }
}

std::vector<Generated> generate(Engine& engine, const Tokenizer& tokenizer, int64_t positions,
                                const GenerationPrompt& prompt, const GenerationSettings& settings,
                                const GenerationEvents& events) {
  check_room(prompt.ids.size(), settings, positions);
  const int64_t room = positions - static_cast<int64_t>(prompt.ids.size());
  Request request;
  request.prompt = prompt.ids;
  request.samples = prompt.samples;
  request.max_new_tokens = std::min(settings.max_new_tokens, room);
  request.sampling = settings.sampling;
  request.stop_ids = settings.stop_ids;
  request.seed = prompt.seed;
  const size_t most = static_cast<size_t>(request.samples * request.max_new_tokens);
  const bool thinking = ends_in_thinking(tokenizer, prompt.ids);
  std::vector<TextStream> streams;
  for (int64_t i = 0; i < prompt.samples; ++i) {
    streams.emplace_back(tokenizer, settings.stop_texts, thinking);
  }
  const int64_t id = engine.submit(std::move(request));
  const Submitted submitted(engine, id);
  Listener listener(engine, id, std::move(streams), events);
  while (!engine.idle()) {
    engine.step();
    listener.listen();
    if (events.on_pass) events.on_pass(listener.sampled(), most);
    if (events.stop && events.stop()) engine.cancel(id);
  }
  return listener.take();
}

std::vector<SampledSequence> run_to_end(Engine& engine,
                                        const std::function<void(size_t sampled)>& on_pass) {
  std::vector<SampledSequence> results;
  size_t sampled = 0;
  while (!engine.idle()) {
    sampled += static_cast<size_t>(engine.step().sampled);
    for (SampledSequence& result : engine.take_finished()) results.push_back(std::move(result));
    if (on_pass) on_pass(sampled);
  }
  std::sort(results.begin(), results.end(), [](const SampledSequence& a, const SampledSequence& b) {
    return std::pair(a.request, a.sample) < std::pair(b.request, b.sample);
  });
  return results;
}

}  // namespace leeway
