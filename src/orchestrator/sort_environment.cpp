#include <fmt/format.h>

#include <algorithm>

#include "leeway/error.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/generated_environment.h"

namespace leeway {
namespace {

constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz";

Example make_example(Rng& rng, int64_t min_length, int64_t max_length) {
  const auto span = static_cast<uint64_t>(max_length - min_length + 1);
  const size_t length = static_cast<size_t>(min_length) + rng.below(span);
  // The start of a shuffle: a draw without replacement in random order.
  std::string letters(kLetters);
  for (size_t i = 0; i < length; ++i) {
    std::swap(letters[i], letters[i + rng.below(letters.size() - i)]);
  }
  letters.resize(length);
  Example example;
  example.messages = {{.role = Role::user, .content = letters + "="}};
  std::sort(letters.begin(), letters.end());
  example.answer = letters + "\n";
  example.demonstration = {{.role = Role::assistant, .content = example.answer}};
  return example;
}

}  // namespace

std::unique_ptr<Environment> make_sort_environment(const EnvironmentTable& table, uint64_t seed) {
  const int64_t least = table.min_length, most = table.max_length;
  const std::string keys = fmt::format("min_length = {} and max_length = {}", least, most);
  if (least < 1 || most < least || most > static_cast<int64_t>(kLetters.size())) {
    throw Error(fmt::format("{}: letters are distinct, so 1 <= min_length <= max_length <= {}",
                            keys, kLetters.size()));
  }
  Generator generator;
  generator.make = [=](Rng& rng) { return make_example(rng, least, most); };
  generator.start = [](const Example& example) { return make_exact_episode(example.answer); };
  generator.keys = keys;
  return make_generated_environment(std::move(generator), seed);
}

}  // namespace leeway
