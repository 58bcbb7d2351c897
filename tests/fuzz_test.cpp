// Seeded fuzzing of everything that reads files: for any bytes, a reader returns or throws
// leeway::Error.
//
// Each input is determined by its number, so a failure is reproduced with LEEWAY_FUZZ_SEED=NUMBER.
// A crash prints that number too.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <random>

#include "base/json.h"
#include "config/config.h"
#include "core/batch_json.h"
#include "core/conformance.h"
#include "leeway/error.h"
#include "run_program.h"

namespace leeway {
namespace {

using Random = std::mt19937_64;

size_t below(Random& random, size_t bound) { return bound == 0 ? 0 : random() % bound; }

template <class T>
const T& pick(Random& random, const std::vector<T>& from) {
  return from[below(random, from.size())];
}

// ---------------------------------------------------------------------------------------------
// Crashes

volatile sig_atomic_t fuzzing = 0;
volatile uint64_t current_seed = 0;
struct sigaction previous_actions[65];

// Prints the seed using only write(), then passes the signal to the previous handler.
void print_seed(int signal_number) {
  if (fuzzing) {
    char text[64] = "\ncrashed at LEEWAY_FUZZ_SEED=";
    size_t length = 0;
    while (text[length] != '\0') ++length;
    char digits[24];
    int count = 0;
    for (uint64_t rest = current_seed; count == 0 || rest > 0; rest /= 10) {
      digits[count++] = static_cast<char>('0' + rest % 10);
    }
    while (count > 0) text[length++] = digits[--count];
    text[length++] = '\n';
    [[maybe_unused]] const ssize_t put = ::write(STDERR_FILENO, text, length);
  }
  ::sigaction(signal_number, &previous_actions[signal_number], nullptr);
}

void install_crash_printer() {
  static bool installed = false;
  if (installed) return;
  installed = true;
  // A separate stack, since stack overflow is one of the crashes this looks for.
  static char stack[1 << 16];
  stack_t alternate{};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  ::sigaltstack(&alternate, nullptr);
  struct sigaction action {};
  action.sa_handler = print_seed;
  action.sa_flags = SA_ONSTACK;
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
    ::sigaction(number, &action, &previous_actions[number]);
  }
}

// ---------------------------------------------------------------------------------------------
// Mutations

const std::vector<std::string> kTokens = {"NaN",
                                          "Infinity",
                                          "-Infinity",
                                          "null",
                                          "true",
                                          "false",
                                          "1e999",
                                          "-1e999",
                                          "1e-999",
                                          "-0",
                                          "0",
                                          "-1",
                                          "1.5",
                                          "2147483648",
                                          "9223372036854775808",
                                          "1e308",
                                          "\"",
                                          "\"\"",
                                          "'",
                                          "\\",
                                          "\\u0000",
                                          "\\ud800",
                                          "{",
                                          "}",
                                          "[",
                                          "]",
                                          "[]",
                                          "{}",
                                          "[[",
                                          "]]",
                                          ",",
                                          ":",
                                          "=",
                                          ".",
                                          "+",
                                          "-",
                                          "#",
                                          "//",
                                          "\n",
                                          "\r\n",
                                          "\t",
                                          " ",
                                          std::string("\0", 1),
                                          "\xff",
                                          "\xc3",
                                          "\xef\xbb\xbf",
                                          "inf",
                                          "nan",
                                          "0x10",
                                          "1_000",
                                          "1979-05-27",
                                          "[trainer.loss]",
                                          "[[trainer.loss]]",
                                          "trainer",
                                          "loss",
                                          "preset",
                                          "\"pi\"",
                                          "\"rollout\"",
                                          "\"prox\"",
                                          "\"mask\"",
                                          "\"weights\"",
                                          "\"versions\"",
                                          "\"advantages\"",
                                          "\"group\"",
                                          "\"rollout_id\"",
                                          "\"sequences\"",
                                          "\"name\"",
                                          "\"config\"",
                                          "\"fixture\"",
                                          "\"cases\"",
                                          "\"loss\"",
                                          "\"grad\"",
                                          "\"metrics\"",
                                          "icepop",
                                          "grpo+tis",
                                          "verl/vanilla",
                                          "eps_low",
                                          "reduction",
                                          "fixed_length",
                                          "off",
                                          "prox",
                                          "rollout"};

const std::vector<std::string> kNumbers = {"NaN",
                                           "Infinity",
                                           "-Infinity",
                                           "null",
                                           "0",
                                           "-0.0",
                                           "1",
                                           "-1",
                                           "0.5",
                                           "-708.5",
                                           "-710",
                                           "710",
                                           "1e308",
                                           "-1e308",
                                           "5e-324",
                                           "-1e-300",
                                           "2147483647",
                                           "-2147483648",
                                           "9223372036854775807"};

// A range of bytes, usually short.
std::pair<size_t, size_t> stretch(Random& random, const std::string& text) {
  const size_t start = below(random, text.size() + 1);
  const size_t most =
      below(random, 8) == 0 ? text.size() - start : std::min<size_t>(16, text.size() - start);
  return {start, below(random, most + 1)};
}

// Replaces a number by `token`.
void replace_number(Random& random, std::string& text, const std::string& token) {
  const size_t at = text.find_first_of("-0123456789", below(random, text.size() + 1));
  if (at == std::string::npos) return;
  const size_t end = std::min(text.find_first_not_of("-+.0123456789eE", at), text.size());
  text.replace(at, end - at, token);
}

void mutate_once(Random& random, std::string& text, const std::vector<std::string>& seeds) {
  switch (below(random, 11)) {
    case 0:  // one bit
      if (!text.empty()) {
        char& c = text[below(random, text.size())];
        c = static_cast<char>(c ^ (1 << below(random, 8)));
      }
      return;
    case 1:  // one byte
      if (!text.empty()) text[below(random, text.size())] = static_cast<char>(random());
      return;
    case 2: text.resize(below(random, text.size() + 1)); return;
    case 3: {
      const auto [start, length] = stretch(random, text);
      text.erase(start, length);
      return;
    }
    case 4: {  // repeat a part
      const auto [start, length] = stretch(random, text);
      text.insert(start, text.substr(start, length));
      return;
    }
    case 5: {  // move a part
      const auto [start, length] = stretch(random, text);
      const std::string part = text.substr(start, length);
      text.erase(start, length);
      text.insert(below(random, text.size() + 1), part);
      return;
    }
    case 6: {  // the end of another seed
      const std::string& other = pick(random, seeds);
      text.resize(below(random, text.size() + 1));
      text += other.substr(below(random, other.size() + 1));
      return;
    }
    case 7: {  // deep nesting
      const size_t depth = size_t{1} << below(random, 13);
      const char open = below(random, 2) == 0 ? '[' : '{';
      const size_t at = below(random, text.size() + 1);
      std::string nest(depth, open);
      if (below(random, 2) == 0) nest += std::string(depth, open == '[' ? ']' : '}');
      text.insert(at, nest);
      return;
    }
    case 8: replace_number(random, text, pick(random, kTokens)); return;
    default: text.insert(below(random, text.size() + 1), pick(random, kTokens)); return;
  }
}

// Half of the inputs keep their structure and get hostile numbers, so that they get past the
// parser.
std::string mutated(uint64_t seed, const std::vector<std::string>& seeds) {
  Random random(seed);
  std::string text = pick(random, seeds);
  const size_t changes = 1 + below(random, below(random, 4) == 0 ? 30 : 3);
  const bool keep_shape = below(random, 2) == 0;
  for (size_t i = 0; i < changes; ++i) {
    if (keep_shape) {
      replace_number(random, text, pick(random, kNumbers));
    } else {
      mutate_once(random, text, seeds);
    }
  }
  if (text.size() > 100000) text.resize(100000);
  return text;
}

// Runs `read` on `count` mutations of `seeds`: about a second's worth. The limit of time for one of
// them finds a reader that hangs; no machine is so slow that it matters otherwise.
void fuzz(uint64_t count, const std::vector<std::string>& seeds,
          const std::function<void(const std::string&)>& read) {
  using Clock = std::chrono::steady_clock;
  install_crash_printer();
  for (const std::string& seed : seeds) {
    ASSERT_NO_THROW(read(seed)) << "a seed is itself refused:\n" << seed;
  }
  const char* only = std::getenv("LEEWAY_FUZZ_SEED");
  const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 1;
  uint64_t tried = 0, refused = 0;
  fuzzing = 1;
  for (uint64_t seed = first; tried < count; ++seed) {
    current_seed = seed;
    const testing::ScopedTrace trace(__FILE__, __LINE__,
                                     "LEEWAY_FUZZ_SEED=" + std::to_string(seed));
    const std::string text = mutated(seed, seeds);
    const auto start = Clock::now();
    try {
      read(text);
    } catch (const Error& error) {
      ++refused;
      EXPECT_STRNE(error.what(), "");
    } catch (const std::exception& error) {
      ADD_FAILURE() << "throws " << error.what() << "\n" << text;
    }
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(60)) << "it took too long";
    ++tried;
    if (only != nullptr || testing::Test::HasFailure()) break;
  }
  fuzzing = 0;
  std::cout << tried << " inputs, " << refused << " refused\n";
}

// ---------------------------------------------------------------------------------------------

const std::vector<std::string> kBatchSeeds = {
    R"({"sequences": [{"pi": [-1.0, -0.5], "rollout": [-1.1, -0.4], "advantages": 1.0}]})",
    R"({"sequences": [
      {"pi": [-1, -2, NaN], "rollout": [-1, -2, null], "prox": [-1, -2, Infinity],
       "ref": [-1, -2, -Infinity], "teacher": [-1, -2, 3], "advantages": [1, -1, 0],
       "mask": [1, true, 0], "weights": [1, 0.5, 0], "versions": [3, 4, 4], "group": "a",
       "rollout_id": 7, "unknown": {"a": [1, "b", {"c": null}]}},
      {"pi": [-0.1], "rollout": [-0.2], "prox": [-0.3], "ref": [-0.4], "teacher": [-0.5],
       "advantages": -2e-3, "mask": [false], "weights": [2], "versions": [5], "group": 3,
       "rollout_id": "8"}], "comment": "x"})",
    R"({"sequences": [{"pi": [], "advantages": []}, {"pi": [-1e-3], "advantages": 0}]})"};

// Presets that together read every stream and use every kind of statistic.
const std::vector<std::string> kFuzzedPresets = {
    "icepop", "reinforce", "grpo+tis",      "gspo",          "m2po",       "geo_mask",
    "kpop",   "seq_mis",   "cookbook/gspo", "verl/geo_mean", "liger/luspo"};

TEST(Fuzz, OfBatchesReturnsOrThrowsError) {
  fuzz(40000, kBatchSeeds, [](const std::string& text) { parse_batch("fuzz.json", text); });
}

// What parses is evaluated too: hostile numbers must not get past the reader and do harm later.
TEST(Fuzz, OfBatchesThatAreEvaluatedReturnsOrThrowsError) {
  const Catalog catalog;
  std::vector<LossSpec> specs;
  for (const std::string& preset : kFuzzedPresets) specs.push_back(catalog.make_spec(preset, {}));
  specs.push_back(catalog.make_spec(
      "gspo", {{"gradient", "through_mean", ""}, {"reduction", "seq_mean_token_sum", ""}}));
  fuzz(20000, kBatchSeeds, [&](const std::string& text) {
    const Batch batch = parse_batch("fuzz.json", text).batch;
    for (const LossSpec& spec : specs) {
      try {
        const LossResult result = evaluate_reference(spec, batch.view(), {}, nullptr, true);
        EXPECT_EQ(result.grad.size(), batch.pi.size());
        EXPECT_TRUE(std::isfinite(result.loss)) << spec.preset << "\n" << text;
        for (double g : result.grad) EXPECT_TRUE(std::isfinite(g)) << spec.preset << "\n" << text;
      } catch (const Error&) {
        // A stream may be missing or not finite; the next preset may not need it.
      }
    }
  });
}

TEST(Fuzz, OfConfigsReturnsOrThrowsError) {
  const Catalog catalog;
  const std::vector<std::string> seeds = {
      "[trainer.loss]\npreset = \"grpo+tis\"\neps_high = 0.28\nanchor = \"rollout\"\ntis_cap = 3\n",
      "# comment\n[trainer.loss]\npreset = 'icepop'\nicepop_ratio_low = 0.5\n"
      "icepop_ratio_high = inf\nreduction = \"fixed_length\"\nfixed_length = 1_000\n",
      "trainer.loss.preset = \"verl/vanilla\"\ntrainer.loss.clip_ratio = 0.3\n"
      "trainer.loss.note = \"\"\"a\nb\"\"\"\n",
      "trainer = {loss = {preset = \"cispo\", eps_low = 0.2, eps_high = 3e-1}}\n"};
  fuzz(3000, seeds, [&](const std::string& text) {
    for (const ConfigScope scope : {ConfigScope::whole, ConfigScope::loss_only}) {
      const Config config = parse_config(catalog, "fuzz.toml", text, {}, scope);
      EXPECT_FALSE(config_toml(config).empty());
    }
  });
}

TEST(Fuzz, OfAssignmentsReturnsOrThrowsError) {
  const std::vector<std::string> seeds = {"eps_low=0.2", "anchor=rollout", "a.b = \"c\"",
                                          "x=[1, 2]",    "x={a=1}",        "x=2024-01-01"};
  fuzz(40000, seeds, [](const std::string& text) {
    try {
      parse_assignment(text);
    } catch (const Error&) {
      if (text == "x=[1, 2]" || text == "x={a=1}" || text == "x=2024-01-01") return;
      throw;
    }
  });
}

// A golden file of a few cases: every mutation runs them all.
std::string small_golden(const std::vector<std::string>& kept) {
  rapidjson::Document golden =
      parse_json("golden", file_text(LEEWAY_SOURCE_DIR "/tests/data/losses_golden.json"));
  rapidjson::Value cases(rapidjson::kArrayType);
  for (rapidjson::Value& entry : golden["cases"].GetArray()) {
    for (const std::string& name : kept) {
      if (entry["name"].GetString() == name) cases.PushBack(entry, golden.GetAllocator());
    }
  }
  EXPECT_EQ(cases.Size(), kept.size());
  golden["cases"] = cases;
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  golden.Accept(writer);
  return buffer.GetString();
}

TEST(Fuzz, OfGoldenFilesReturnsOrThrowsError) {
  const Catalog catalog;
  const std::vector<std::string> seeds = {
      small_golden({"prime/default_dppo_kl/seqA", "areal/prox_approx"}),
      small_golden({"verl/offpolicy_metrics"}),
      R"({"fixture": {"pi": [[-1, -2], [-0.5]], "rollout": [[-1, -2], [-1]], "adv_seq": [1, -1],
          "prox": [[-1, -2], [-1]], "ref": [[-1, -2], [-1]], "masks": [[1, 0], [1]]},
          "cases": [{"name": "icepop"}, {"name": "slime/ppo", "config": {"eps_clip": 0.1}},
                    {"name": "cookbook_PR169/gspo", "loss": 0.5, "grad": [[1, 2], [3]]},
                    {"name": "areal/prox_approx", "config": {"versions": [[1, 2, 3]],
                     "current_version": 3}, "outputs": {"linear": [[1, 2, 3]]}}]})"};
  fuzz(20000, seeds, [&](const std::string& text) { run_golden(catalog, "fuzz.json", text); });
}

// ---------------------------------------------------------------------------------------------
// What is written is what is read

double any_number(Random& random) {
  switch (below(random, 12)) {
    case 0: return std::nan("");
    case 1: return kInfinity;
    case 2: return -kInfinity;
    case 3: return 0.0;
    case 4: return -1e-300 * static_cast<double>(below(random, 1000));
    case 5: return -1.7e308;
    default: return -std::uniform_real_distribution<double>(0.0, 20.0)(random);
  }
}

std::string number_text(Random& random, double value) {
  if (std::isnan(value)) return below(random, 2) == 0 ? "NaN" : "null";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return fmt::format("{}", value);
}

// A batch and one of the JSON texts that describe it.
std::pair<Batch, std::string> any_batch(Random& random) {
  Batch batch;
  const size_t sequences = 1 + below(random, 5);
  const char* optional[] = {"rollout", "prox", "ref", "teacher", "weights", "mask", "versions"};
  bool present[7];
  for (bool& p : present) p = below(random, 2) == 0;
  const bool groups = below(random, 2) == 0, rollouts = below(random, 2) == 0;
  const std::string space = pick<std::string>(random, {"", " ", "\n  ", "\t"});
  std::string text = "{" + space + "\"sequences\":" + space + "[";
  for (size_t s = 0; s < sequences; ++s) {
    // The first sequence holds a token, so that the batch is not empty.
    const size_t length = s == 0 ? 1 + below(random, 6) : below(random, 7);
    batch.offsets.push_back(batch.offsets.back() + static_cast<int64_t>(length));
    std::vector<std::string> members;
    auto list = [&](const char* key, auto value_of) {
      std::string values;
      for (size_t t = 0; t < length; ++t) values += (t > 0 ? "," + space : "") + value_of();
      members.push_back(fmt::format("\"{}\":{}[{}]", key, space, values));
    };
    auto stream = [&](const char* key, std::vector<double>& to) {
      list(key, [&] {
        to.push_back(any_number(random));
        return number_text(random, to.back());
      });
    };
    stream("pi", batch.pi);
    if (below(random, 2) == 0) {
      const double value = any_number(random);
      batch.advantages.insert(batch.advantages.end(), length, value);
      // A null for the whole list would mean that there are no advantages.
      members.push_back("\"advantages\": " +
                        (std::isnan(value) ? "NaN" : number_text(random, value)));
    } else {
      stream("advantages", batch.advantages);
    }
    std::vector<double>* streams[] = {&batch.rollout, &batch.prox, &batch.ref, &batch.teacher,
                                      &batch.weights};
    for (size_t k = 0; k < 5; ++k) {
      if (present[k]) stream(optional[k], *streams[k]);
    }
    if (present[5]) {
      list("mask", [&]() -> std::string {
        batch.mask.push_back(static_cast<uint8_t>(below(random, 2)));
        return below(random, 2) == 0 ? std::to_string(batch.mask.back())
               : batch.mask.back()   ? "true"
                                     : "false";
      });
    }
    if (present[6]) {
      list("versions", [&] {
        batch.versions.push_back(static_cast<int32_t>(random()));
        if (batch.versions.back() == INT32_MIN) batch.versions.back() = 0;
        return std::to_string(batch.versions.back());
      });
    }
    if (groups) {
      batch.groups.push_back(fmt::format("g{}", below(random, 3)));
      members.push_back("\"group\": \"" + batch.groups.back() + "\"");
    }
    if (rollouts) {
      // Rollouts are numbered in order of first appearance.
      const int32_t most =
          batch.rollout_ids.empty()
              ? 0
              : 1 + *std::max_element(batch.rollout_ids.begin(), batch.rollout_ids.end());
      batch.rollout_ids.push_back(
          static_cast<int32_t>(below(random, static_cast<size_t>(most) + 1)));
      members.push_back(fmt::format("\"rollout_id\": \"r{}\"", batch.rollout_ids.back()));
    }
    std::shuffle(members.begin(), members.end(), random);
    text += (s > 0 ? "," + space : "") + "{";
    for (size_t m = 0; m < members.size(); ++m) text += (m > 0 ? "," + space : "") + members[m];
    text += space + "}";
  }
  return {batch, text + "]" + space + "}" + space};
}

void expect_same(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(got[i])) << i;
    } else {
      EXPECT_EQ(got[i], expected[i]) << i;
    }
  }
}

TEST(Batches, AreReadAsTheyWereWritten) {
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    Random random(seed);
    const auto [batch, text] = any_batch(random);
    SCOPED_TRACE(fmt::format("seed {}\n{}", seed, text));
    const Batch read = parse_batch("batch.json", text).batch;
    EXPECT_EQ(read.offsets, batch.offsets);
    expect_same(read.pi, batch.pi);
    expect_same(read.prox, batch.prox);
    expect_same(read.rollout, batch.rollout);
    expect_same(read.ref, batch.ref);
    expect_same(read.teacher, batch.teacher);
    expect_same(read.advantages, batch.advantages);
    expect_same(read.weights, batch.weights);
    EXPECT_EQ(read.mask, batch.mask);
    EXPECT_EQ(read.versions, batch.versions);
    EXPECT_EQ(read.groups, batch.groups);
    EXPECT_EQ(read.rollout_ids, batch.rollout_ids);
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace leeway
