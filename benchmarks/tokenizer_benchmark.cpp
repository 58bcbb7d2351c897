// Bytes of text encoded and decoded per second on one core, with real vocabularies.
//   tokenizer_benchmark FOLDER [benchmark flags]     (FOLDER: what scripts/fetch_tokenizers made)

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/rng.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

// Words made from syllables, drawn by Zipf's law, in sentences: like English in word lengths and
// repetition, but with more words unknown to a vocabulary.
std::string english_like(size_t size) {
  static const char* const kCommon[] = {"the", "of",   "and", "to",   "in",   "that",  "is",
                                        "was", "for",  "it",  "with", "as",   "his",   "on",
                                        "be",  "they", "by",  "are",  "this", "which", "from"};
  static const char* const kSyllables[] = {"ta", "ing", "er",  "con", "pre", "st", "ment",
                                           "al", "re",  "ous", "in",  "ble", "de", "tion",
                                           "ly", "o",   "na",  "mi",  "ver", "est"};
  Rng rng(7);
  std::vector<std::string> words(std::begin(kCommon), std::end(kCommon));
  while (words.size() < 20'000) {
    std::string word;
    for (uint64_t count = 1 + rng.below(4); count > 0; --count) word += kSyllables[rng.below(20)];
    words.push_back(word);
  }
  std::string text;
  while (text.size() < size) {
    for (uint64_t count = 6 + rng.below(18); count > 0; --count) {
      const double rank = std::pow(static_cast<double>(words.size()), rng.uniform());
      text += words[static_cast<size_t>(rank) - 1];
      text += count == 1 ? ". " : rng.below(10) == 0 ? ", " : " ";
    }
    if (rng.below(6) == 0) text += "\n\n";
  }
  return text;
}

std::string markdown_of_this_repository() {
  std::vector<std::string> paths;
  for (const char* folder : {LEEWAY_SOURCE_DIR, LEEWAY_SOURCE_DIR "/docs"}) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".md") paths.push_back(entry.path().string());
    }
  }
  std::sort(paths.begin(), paths.end());
  std::string text;
  for (const std::string& path : paths) text += read_file(path);
  return text;
}

void encode(benchmark::State& state, const Tokenizer* tokenizer, const std::string* text) {
  size_t tokens = 0;
  for (auto _ : state) {
    tokens = tokenizer->encode(*text, SpecialTokens::as_text).size();
    benchmark::DoNotOptimize(tokens);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text->size()));
  state.counters["bytes_per_token"] =
      static_cast<double>(text->size()) / static_cast<double>(tokens);
}

void decode(benchmark::State& state, const Tokenizer* tokenizer, const std::string* text) {
  const std::vector<int32_t> ids = tokenizer->encode(*text, SpecialTokens::as_text);
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer->decode(ids));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text->size()));
}

void load(benchmark::State& state, const std::string& path) {
  for (auto _ : state) benchmark::DoNotOptimize(load_tokenizer(path));
}

int run(int count, char** arguments) {
  benchmark::Initialize(&count, arguments);
  if (count != 2) {
    std::fprintf(stderr, "usage: tokenizer_benchmark FOLDER [benchmark flags]\n");
    return 2;
  }
  const std::string english = english_like(size_t{2} << 20);
  const std::string markdown = markdown_of_this_repository();
  std::string chinese;
  while (chinese.size() < (size_t{1} << 20))
    chinese += "\u4E2D\u6587\u6587\u672C\u6CA1\u6709\u7A7A\u683C\uFF0C";
  std::vector<std::unique_ptr<Tokenizer>> tokenizers;
  for (const std::string family : {"qwen3", "llama3"}) {
    const std::string path = std::string(arguments[1]) + "/" + family + "/tokenizer.json";
    tokenizers.push_back(load_tokenizer(path));
    const Tokenizer* tokenizer = tokenizers.back().get();
    const std::pair<const char*, const std::string*> texts[] = {
        {"english_like", &english}, {"markdown", &markdown}, {"chinese", &chinese}};
    for (const auto& [name, text] : texts) {
      benchmark::RegisterBenchmark((family + "/encode/" + name).c_str(), encode, tokenizer, text);
      benchmark::RegisterBenchmark((family + "/decode/" + name).c_str(), decode, tokenizer, text);
    }
    benchmark::RegisterBenchmark((family + "/load").c_str(), load, path)
        ->Unit(benchmark::kMillisecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace leeway

int main(int count, char** arguments) { return leeway::run(count, arguments); }
