// Invalid batches, golden files and arguments: each is refused with exit code 2 and a message that
// says what and where; harmless ones are accepted with the same result as without them.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include "cli_helpers.h"

namespace leeway {
namespace {

// ---------------------------------------------------------------------------------------------
// Batches that are refused

struct Row {
  std::string name, text;
  std::vector<std::string> words;  // expected in the message, besides the file name
};

// Names only: brackets in gtest's test list would confuse CMake, which parses it.
void PrintTo(const Row& row, std::ostream* stream) { *stream << row.name; }

std::string row_name(const testing::TestParamInfo<Row>& info) { return info.param.name; }

class BadBatch : public testing::TestWithParam<Row> {};

TEST_P(BadBatch, IsRefusedWithItsPlace) {
  const TempFolder folder;
  const std::string file = folder.write("bad.json", GetParam().text);
  std::vector<std::string> words = GetParam().words;
  words.push_back(file);
  for (const char* command : {"eval", "compare"}) {
    SCOPED_TRACE(command);
    expect_mistake(run_program({"loss", command, "--preset", "icepop", "--batch", file}), words);
  }
}

// One sequence, on line 2, with these members.
std::string one(const std::string& members) { return "{\"sequences\": [\n{" + members + "}]}\n"; }

const std::string kGood = R"("pi": [-1, -2], "rollout": [-1, -2], "advantages": 1)";

const std::vector<Row> kMalformed = {
    {"AnEmptyFile", "", {"line 1, column 1"}},
    {"NothingButSpaces", " \n \n", {"line 3, column 1"}},
    {"CutOffInAList", "{\"sequences\": [\n{\"pi\": [-1, -2", {"line 2, column 15"}},
    {"CutOffInAString", "{\"sequences\": [\n{\"pi", {"line 2"}},
    {"ACommaBeforeTheEnd", "{\"sequences\": [\n{\"pi\": [-1, ]}]}", {"line 2, column 13"}},
    {"SingleQuotes", "{'sequences': []}", {"line 1, column 2"}},
    {"AComment", "// batch\n{\"sequences\": []}", {"line 1, column 1"}},
    {"TextAfterTheEnd", one(kGood) + "more", {"line 3, column 1"}},
    {"ANulByteAfterTheEnd", one(kGood) + std::string("\0more", 5), {"line 3, column 1"}},
    {"ANulByteAtTheEnd", one(kGood) + std::string("\0", 1), {"line 3, column 1"}},
    {"ANulByteInside", std::string("{\"sequences\": [\0]}", 18), {"line 1, column 16"}},
    {"ANumberTooLarge", one(R"("pi": [-1e999], "advantages": 1)"), {"line 2"}},
    {"APlusSign", one(R"("pi": [+1], "advantages": 1)"), {"line 2, column 9"}},
    {"LowerCaseNan", one(R"("pi": [nan], "advantages": 1)"), {"line 2, column"}},
    {"AMissingColon", one(R"("pi" [-1], "advantages": 1)"), {"line 2, column 7"}},
    {"AMissingComma", one(R"("pi": [-1 -2], "advantages": 1)"), {"line 2, column 12"}},
    {"BracesThatDoNotMatch", "{\"sequences\": [\n{\"pi\": [-1}]}", {"line 2, column 11"}},
};
INSTANTIATE_TEST_SUITE_P(Malformed, BadBatch, testing::ValuesIn(kMalformed), row_name);

const std::vector<Row> kWrongTypes = {
    {"AListForTheBatch", "[]", {"line 1", "sequences"}},
    {"ANumberForTheBatch", "3", {"line 1", "number"}},
    {"TextForTheBatch", "\"batch\"", {"line 1", "text"}},
    {"NullForTheBatch", "null", {"line 1"}},
    {"ANumberForSequences", "{\"sequences\": 3}", {"line 1", "number"}},
    {"AnObjectForSequences", "{\"sequences\": {}}", {"line 1", "object"}},
    {"NullForSequences", "{\"sequences\": null}", {"line 1"}},
    {"AListForASequence", "{\"sequences\": [\n[]]}", {"line 2", "sequence 0", "list"}},
    {"ANumberForASequence", "{\"sequences\": [\n3]}", {"line 2", "sequence 0", "number"}},
    {"ANumberForPi", one(R"("pi": -1, "advantages": 1)"), {"line 2", "sequence 0", "\"pi\""}},
    {"TextForPi", one(R"("pi": "x", "advantages": 1)"), {"line 2", "text", "\"pi\""}},
    {"AnObjectForPi", one(R"("pi": {}, "advantages": 1)"), {"line 2", "object"}},
    {"TextInPi", one(R"("pi": [-1, "x"], "advantages": 1)"), {"line 2", "text", "\"pi\""}},
    {"AListInPi", one(R"("pi": [[-1]], "advantages": 1)"), {"line 2", "list"}},
    {"ABooleanInPi", one(R"("pi": [true], "advantages": 1)"), {"line 2", "true or false"}},
    {"TextForAdvantages", one(R"("pi": [-1], "advantages": "x")"), {"\"advantages\""}},
    {"TextInAdvantages", one(R"("pi": [-1], "advantages": ["x"])"), {"\"advantages\""}},
    {"ABooleanForAdvantages", one(R"("pi": [-1], "advantages": true)"), {"true or false"}},
    {"AFractionInMask", one(kGood + R"(, "mask": [1, 0.5])"), {"\"mask\"", "0.5"}},
    {"NullInMask", one(kGood + R"(, "mask": [1, null])"), {"\"mask\"", "nan"}},
    {"ANumberForMask", one(kGood + R"(, "mask": 1)"), {"\"mask\"", "list"}},
    {"TextInWeights", one(kGood + R"(, "weights": ["1", 1])"), {"\"weights\"", "text"}},
    {"AFractionInVersions", one(kGood + R"(, "versions": [1, 1.5])"), {"\"versions\"", "1.5"}},
    {"AVersionTooLarge", one(kGood + R"(, "versions": [1, 3e9])"), {"line 2", "\"versions\""}},
    {"AListForGroup", one(kGood + R"(, "group": [1])"), {"line 2", "list"}},
    {"ABooleanForGroup", one(kGood + R"(, "group": true)"), {"line 2", "true or false"}},
    {"AnObjectForRolloutId", one(kGood + R"(, "rollout_id": {})"), {"line 2", "object"}},
};
INSTANTIATE_TEST_SUITE_P(WrongTypes, BadBatch, testing::ValuesIn(kWrongTypes), row_name);

const std::string kOther = "{" + kGood + "},\n{";  // a good sequence before, so the bad one is 1

const std::vector<Row> kIncomplete = {
    {"NoSequencesKey", "{}", {"\"sequences\""}},
    {"NoSequences", "{\"sequences\": []}", {"empty", "no sequences"}},
    {"OneSequenceOfNoTokens", one(R"("pi": [], "rollout": [], "advantages": 1)"), {"no tokens"}},
    {"SequencesOfNoTokens",
     R"({"sequences": [{"pi": [], "advantages": []}, {"pi": [], "advantages": 2}]})",
     {"no tokens"}},
    {"NoPi", one(R"("rollout": [-1], "advantages": 1)"), {"line 2", "sequence 0", "\"pi\""}},
    {"NullForPi", one(R"("pi": null, "rollout": [-1], "advantages": 1)"), {"sequence 0", "\"pi\""}},
    {"NoAdvantages", one(R"("pi": [-1], "rollout": [-1])"), {"sequence 0", "\"advantages\""}},
    {"AnEmptySequence", "{\"sequences\": [\n{}]}", {"line 2", "sequence 0", "\"pi\""}},
    {"NoAdvantagesInTheSecond",
     "{\"sequences\": [\n" + kOther + R"("pi": [-1], "rollout": [-1]}]})",
     {"line 3", "sequence 1", "\"advantages\""}},
    {"RolloutMissingInTheSecond",
     "{\"sequences\": [\n" + kOther + R"("pi": [-1], "advantages": 1}]})",
     {"line 3", "sequence 1", "\"rollout\"", "earlier"}},
    {"RefOnlyInTheSecond",
     "{\"sequences\": [\n" + kOther + kGood + R"(, "ref": [-1, -1]}]})",
     {"line 3", "sequence 1", "\"ref\"", "earlier"}},
    {"GroupOnlyInTheSecond",
     "{\"sequences\": [\n" + kOther + kGood + R"(, "group": 1}]})",
     {"line 3", "sequence 1", "\"group\"", "every sequence"}},
    {"RolloutIdOnlyInTheFirst",
     "{\"sequences\": [\n{\"rollout_id\": 1, " + kOther.substr(1) + kGood + "}]}",
     {"line 3", "sequence 1", "\"rollout_id\"", "every sequence"}},
};
INSTANTIATE_TEST_SUITE_P(Incomplete, BadBatch, testing::ValuesIn(kIncomplete), row_name);

std::vector<Row> mismatched_lengths() {
  std::vector<Row> rows;
  for (const char* key :
       {"rollout", "prox", "ref", "teacher", "advantages", "mask", "weights", "versions"}) {
    for (const char* values : {"[]", "[1, 1, 1]"}) {
      const bool longer = values[1] != ']';
      rows.push_back(
          {fmt::format("{}{}", key, longer ? "Longer" : "Shorter"),
           one(fmt::format(R"("pi": [-1, -2], {}"{}": {})",
                           std::string_view(key) == "advantages" ? "" : "\"advantages\": 1, ", key,
                           values)),
           {"line 2", "sequence 0", fmt::format("\"{}\" has {}", key, longer ? 3 : 0),
            "\"pi\" has 2"}});
    }
  }
  return rows;
}
INSTANTIATE_TEST_SUITE_P(Lengths, BadBatch, testing::ValuesIn(mismatched_lengths()), row_name);

std::vector<Row> duplicate_keys() {
  std::vector<Row> rows = {{"Sequences",
                            one(kGood).substr(0, one(kGood).size() - 2) + ", \"sequences\": []}",
                            {"\"sequences\"", "twice"}},
                           {"AdvantagesInBothForms",
                            one(kGood + R"(, "advantages": [1, 1])"),
                            {"line 2", "\"advantages\"", "twice"}}};
  const std::map<std::string, std::string> values = {
      {"pi", "[-1, -2]"},  {"rollout", "[-1, -2]"}, {"prox", "[-1, -2]"},
      {"ref", "[-1, -2]"}, {"mask", "[1, 1]"},      {"weights", "[1, 1]"},
      {"group", "1"},      {"rollout_id", "1"},     {"versions", "[1, 1]"}};
  for (const auto& [key, value] : values) {
    const std::string member = fmt::format(", \"{}\": {}", key, value);
    rows.push_back(
        {key, one(kGood + member + member), {"line 2", "sequence 0", "\"" + key + "\"", "twice"}});
  }
  return rows;
}
INSTANTIATE_TEST_SUITE_P(Duplicates, BadBatch, testing::ValuesIn(duplicate_keys()), row_name);

std::string repeated(std::string_view part, size_t times) {
  std::string out;
  out.reserve(part.size() * times);
  for (size_t i = 0; i < times; ++i) out += part;
  return out;
}

const std::vector<Row> kDeep = {
    {"HundredThousandBrackets", repeated("[", 100000), {"line 1"}},
    {"HundredThousandObjects", repeated("{\"a\":", 100000), {"line 1"}},
    {"BracketsInAStream",
     one("\"pi\": " + repeated("[", 100000) + repeated("]", 100000)),
     {"line 2", "list"}},
};
INSTANTIATE_TEST_SUITE_P(Deep, BadBatch, testing::ValuesIn(kDeep), row_name);

// ---------------------------------------------------------------------------------------------
// Batches that are accepted with a note on stderr

TEST(OddBatch, IgnoresUnknownKeysWithAWarningThatNamesTheNearestOne) {
  const RunResult plain = eval("icepop", one(kGood));
  const RunResult odd =
      eval("icepop", one(kGood + R"(, "rolout_id": 7, "advantage": [[1, {"a": [true]}], "x"])"));
  EXPECT_EQ(odd.code, 0) << odd;
  EXPECT_EQ(odd.out, plain.out);
  EXPECT_TRUE(contains(odd.err, "warning")) << odd.err;
  EXPECT_TRUE(contains(odd.err, "\"rolout_id\"")) << odd.err;
  EXPECT_TRUE(contains(odd.err, "did you mean rollout_id?")) << odd.err;
  EXPECT_TRUE(contains(odd.err, "did you mean advantages?")) << odd.err;
}

TEST(OddBatch, WarnsOncePerUnknownKey) {
  const std::string sequence = "{" + kGood + R"(, "reward": 1})";
  const RunResult odd =
      eval("icepop", "{\"sequences\": [" + sequence + "," + sequence + "," + sequence + "]}");
  EXPECT_EQ(odd.code, 0) << odd;
  EXPECT_EQ(lines_of(odd.err).size(), 1u) << odd.err;
}

TEST(OddBatch, SuggestsNoNameThatIsNotNear) {
  for (const char* key : {"x", "zz", "id", "reward"}) {
    const RunResult odd = eval("icepop", one(kGood + ", \"" + key + "\": 1"));
    EXPECT_EQ(odd.code, 0) << odd;
    EXPECT_FALSE(contains(odd.err, "did you mean")) << odd.err;
  }
  // Keys of a sequence do not belong at the level of the batch.
  const RunResult odd = eval("icepop", "{\"pj\": 1, " + one(kGood).substr(1));
  EXPECT_EQ(odd.code, 0) << odd;
  EXPECT_FALSE(contains(odd.err, "did you mean")) << odd.err;
}

TEST(OddBatch, SkipsDeepNestingUnderAnUnknownKey) {
  const std::string deep = repeated("[", 100000) + repeated("]", 100000);
  const std::string objects = repeated("{\"a\": ", 100000) + "1" + repeated("}", 100000);
  for (const std::string& value : {deep, objects}) {
    const RunResult odd = eval("icepop", one(kGood + ", \"unknown\": " + value));
    EXPECT_EQ(odd.code, 0) << odd;
    EXPECT_EQ(odd.out, eval("icepop", one(kGood)).out);
  }
}

TEST(OddBatch, TakesLogProbabilitiesAboveZeroWithAWarning) {
  const RunResult odd =
      eval("icepop", one(R"("pi": [0.5, 0.25, -1], "rollout": [-1, -2, 0.125], "advantages": 1)"));
  EXPECT_EQ(odd.code, 0) << odd;
  EXPECT_TRUE(contains(odd.err, "warning")) << odd.err;
  for (const char* word : {"\"pi\"", "2", "\"rollout\"", "1", "above 0"}) {
    EXPECT_TRUE(contains(odd.err, word)) << word << " is not in " << odd.err;
  }
}

TEST(OddBatch, TakesWholeStreamsOfNullAsAbsent) {
  const RunResult odd = eval("icepop", one(kGood + R"(, "prox": null, "group": null)"));
  expect_quiet_success(odd);
  EXPECT_EQ(odd.out, eval("icepop", one(kGood)).out);
  expect_mistake(eval("ppo", one(kGood + R"(, "prox": null)")), {"ppo", "\"prox\""});
}

TEST(OddBatch, TakesASequenceOfNoTokensAmongOthers) {
  const std::string empty = R"({"pi": [], "rollout": [], "prox": [], "advantages": 1})";
  const std::string full = R"({"pi": [-1], "rollout": [-2], "prox": [-1.5], "advantages": 1})";
  for (const std::string& preset : names().native) {
    for (const char* reduction : {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum"}) {
      SCOPED_TRACE(preset + " " + reduction);
      const std::vector<std::string> sets = {fmt::format("reduction={}", reduction)};
      const RunResult alone = eval(preset, "{\"sequences\": [" + full + "]}", sets);
      for (const std::string& both : {empty + "," + full, full + "," + empty}) {
        const RunResult odd = eval(preset, "{\"sequences\": [" + both + "]}", sets);
        expect_quiet_success(odd);
        const Document got = json_of(odd.out), expected = json_of(alone.out);
        EXPECT_EQ(text_of(got["loss"]), text_of(expected["loss"]));
        EXPECT_EQ(text_of(got["metrics"]), text_of(expected["metrics"]));
        EXPECT_EQ(got["grad"].Size(), 2u);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Values that are not finite

const std::vector<std::string> kComposed = {"grpo+tis", "ppo+icepop_tis", "icepop+off_policy_is",
                                            "reinforce+off_policy_is+tis"};
const std::vector<std::string> kPoisons = {"NaN", "Infinity", "-Infinity", "null", "-1e300"};

std::vector<std::string> native_and_composed() {
  std::vector<std::string> presets = names().native;
  presets.insert(presets.end(), kComposed.begin(), kComposed.end());
  return presets;
}

// Two sequences with every stream. `value` is at position 1 of sequence 1 in `stream` ("" for every
// stream and the advantages); that token has this `mask` and `weight`.
std::string batch_with(const std::string& stream, const std::string& value, int mask, int weight) {
  auto at = [&](const std::string& name, const char* good) {
    return stream.empty() || stream == name ? value : std::string(good);
  };
  return fmt::format(
      R"({{"sequences": [
        {{"pi": [-1.0, -0.5], "rollout": [-1.1, -0.4], "prox": [-1.05, -0.45],
          "ref": [-1.2, -0.6], "teacher": [-0.9, -0.3], "advantages": [0.5, -1]}},
        {{"pi": [-0.3, {}, -0.8], "rollout": [-0.35, {}, -0.9], "prox": [-0.3, {}, -0.85],
          "ref": [-0.4, {}, -0.7], "teacher": [-0.2, {}, -0.6], "advantages": [1.5, {}, -0.25],
          "mask": [1, {}, 1], "weights": [1, {}, 2]}}]}})",
      at("pi", "-1.5"), at("rollout", "-1.4"), at("prox", "-1.45"), at("ref", "-1.6"),
      at("teacher", "-1.2"), at("advantages", "0.75"), mask,
      stream == "weights" ? value : std::to_string(weight));
}

// Enables every sequence statistic and denominator that the presets have.
std::vector<std::vector<std::string>> settings_for(const std::string& preset) {
  std::vector<std::vector<std::string>> all = {
      {}, {"reduction=seq_mean_token_mean"}, {"teacher_tau=0.5", "reduction=sum"}};
  if (preset == "gspo") all.push_back({"gradient=through_mean"});
  if (preset == "grpo") all.push_back({"ref_kl=0.1", "dual_clip=3"});
  if (preset == "icepop") all.push_back({"icepop_rollout_min_ratio=0.01", "denominator=kept"});
  if (preset == "grpo+tis") all.push_back({"tis_level=geometric"});
  if (preset == "grpo+tis") all.push_back({"tis_level=sequence"});
  return all;
}

TEST(NotFinite, IsInertOnAMaskedToken) {
  for (const std::string& preset : native_and_composed()) {
    for (const auto& sets : settings_for(preset)) {
      const std::string expected = eval(preset, batch_with("", "0", 0, 1), sets).out;
      ASSERT_FALSE(expected.empty()) << preset;
      for (const std::string& poison : kPoisons) {
        const RunResult result = eval(preset, batch_with("", poison, 0, 1), sets);
        EXPECT_EQ(result.code, 0) << preset << " " << poison << " " << result;
        EXPECT_TRUE(result.out == expected) << preset << " " << poison << "\n"
                                            << result.out << "instead of\n"
                                            << expected;
      }
    }
  }
}

TEST(NotFinite, IsInertOnATokenOfWeightZero) {
  for (const std::string& preset : native_and_composed()) {
    const std::string expected = eval(preset, batch_with("", "0", 0, 1)).out;
    for (const std::string& poison : kPoisons) {
      const RunResult result = eval(preset, batch_with("", poison, 1, 0));
      EXPECT_EQ(result.code, 0) << preset << " " << poison << " " << result;
      EXPECT_TRUE(result.out == expected) << preset << " " << poison << "\n"
                                          << result.out << "instead of\n"
                                          << expected;
    }
  }
}

TEST(NotFinite, IsInertInTheWeightOfAMaskedToken) {
  for (const std::string& preset : native_and_composed()) {
    const std::string expected = eval(preset, batch_with("", "0", 0, 1)).out;
    for (const std::string& poison : kPoisons) {
      const RunResult result = eval(preset, batch_with("weights", poison, 0, 1));
      EXPECT_TRUE(result.out == expected) << preset << " " << poison << " " << result;
    }
  }
}

TEST(NotFinite, IsRefusedOnATrainedTokenOfAStreamThatIsRead) {
  for (const std::string& preset : native_and_composed()) {
    const Document explained = json_of(run_program({"loss", "explain", preset, "--json"}).out);
    std::vector<std::string> read = strings_of(explained["reads"]);
    read.insert(read.end(), {"advantages", "weights"});
    for (const std::string& stream : read) {
      for (const char* poison : {"NaN", "Infinity", "-Infinity", "null"}) {
        SCOPED_TRACE(preset + " " + stream + " " + poison);
        const RunResult result = eval(preset, batch_with(stream, poison, 1, 1));
        EXPECT_EQ(result.code, 2) << result;
        EXPECT_TRUE(result.out.empty()) << result.out;
        EXPECT_TRUE(contains(result.err, "sequence 1, position 1: " + stream)) << result.err;
        EXPECT_TRUE(contains(result.err, "mask the token or repair the value")) << result.err;
      }
    }
  }
}

TEST(NotFinite, IsNotLookedAtInAStreamThatIsNotRead) {
  for (const std::string& preset : native_and_composed()) {
    const Document explained = json_of(run_program({"loss", "explain", preset, "--json"}).out);
    const std::vector<std::string> read = strings_of(explained["reads"]);
    const Document expected = json_of(eval(preset, batch_with("none", "", 1, 1)).out);
    for (const std::string& stream : kStreams) {
      if (has(read, stream)) continue;
      for (const std::string& poison : kPoisons) {
        SCOPED_TRACE(preset + " " + stream + " " + poison);
        const RunResult result = eval(preset, batch_with(stream, poison, 1, 1));
        ASSERT_EQ(result.code, 0) << result;
        const Document got = json_of(result.out);
        EXPECT_EQ(text_of(got["loss"]), text_of(expected["loss"]));
        EXPECT_EQ(text_of(got["grad"]), text_of(expected["grad"]));
      }
    }
  }
}

// If a code base lets masked positions take part, so does its preset, and NaN there is an error;
// everywhere else masked positions do not matter.
TEST(NotFinite, IsEitherInertOrRefusedOnAMaskedTokenOfAForeignPreset) {
  for (const std::string& preset : names().foreign) {
    SCOPED_TRACE(preset);
    const RunResult nan = eval(preset, batch_with("", "NaN", 0, 1));
    if (nan.code != 0) {
      expect_mistake(nan, {"sequence 1, position 1"});
      continue;
    }
    const RunResult zeros = eval(preset, batch_with("", "0", 0, 1));
    const RunResult other = eval(preset, batch_with("", "-7.5", 0, 1));
    const Document with_nan = json_of(nan.out);
    for (const RunResult* run : {&zeros, &other}) {
      ASSERT_EQ(run->code, 0) << *run;
      const Document expected = json_of(run->out);
      EXPECT_EQ(text_of(with_nan["loss"]), text_of(expected["loss"]));
      EXPECT_EQ(text_of(with_nan["grad"]), text_of(expected["grad"]));
    }
  }
  for (const char* preset :
       {"cookbook/gspo", "cookbook_PR169/grpo", "cookbook_PR169/gspo", "tinker/dro"}) {
    expect_mistake(eval(preset, batch_with("", "NaN", 0, 1)), {"sequence 1, position 1"});
  }
}

TEST(NotFinite, NamesTheTokenWhoseRatioOverflows) {
  const RunResult result =
      eval("is", one(R"("pi": [-1, -1], "rollout": [-1, -1e4], "advantages": 1)"));
  expect_mistake(result, {"/dev/stdin", "sequence 0, position 1", "ratio", "log_clamp"});
}

// Finite inputs and finite token losses, but a sum or shared gradient that overflows.
TEST(NotFinite, IsRefusedWhereOnlyTheSumOverflows) {
  const std::string huge =
      one(R"("pi": [-1, -1], "rollout": [-1, -1], "prox": [-1, -1], "advantages": 1.5e308)");
  expect_mistake(eval("is", huge, {"reduction=sum"}), {"/dev/stdin", "finite"});
  expect_mistake(eval("gspo", huge, {"reduction=sum", "gradient=through_mean"}),
                 {"/dev/stdin", "finite"});
}

TEST(Weights, OfZeroTakeATokenOutOfMaskAndDenominator) {
  for (const std::string& preset : native_and_composed()) {
    for (const auto& sets : settings_for(preset)) {
      SCOPED_TRACE(preset);
      const RunResult masked = eval(preset, batch_with("none", "", 0, 1), sets);
      const RunResult weightless = eval(preset, batch_with("none", "", 1, 0), sets);
      expect_quiet_success(weightless);
      EXPECT_EQ(weightless.out, masked.out);
    }
  }
}

TEST(AllMasked, HasLossZeroWhateverThePreset) {
  const std::string streams =
      R"("pi": [-1, NaN], "rollout": [-1, 3], "prox": [-2, -1], "ref": [-1, -1],
         "teacher": [-1, -1], "advantages": 1)";
  for (const std::string& preset : native_and_composed()) {
    for (const char* reduction :
         {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "sum"}) {
      for (const char* none :
           {R"(, "mask": [0, 0])", R"(, "mask": [false, false])", R"(, "weights": [0, 0.0])"}) {
        SCOPED_TRACE(preset + " " + reduction + none);
        const RunResult result =
            eval(preset, one(streams + none), {fmt::format("reduction={}", reduction)});
        ASSERT_EQ(result.code, 0) << result;
        const Document json = json_of(result.out);
        EXPECT_EQ(json["loss"].GetDouble(), 0.0);
        EXPECT_EQ(text_of(json["grad"]), text_of(json_of("[[0, 0]]")));
      }
    }
  }
}

TEST(AllMasked, IsComparedWithoutNumbersThatMeanNothing) {
  const RunResult compared = run_program(
      {"loss", "compare", "--batch", "/dev/stdin", "--target-masked", "1%"},
      {.input = one(R"("pi": [-1, -2], "rollout": [-1, -3], "advantages": 1, "mask": [0, 0])")});
  EXPECT_EQ(compared.code, 0) << compared;
  EXPECT_FALSE(contains(compared.out, " inf")) << compared.out;
  EXPECT_FALSE(contains(compared.out, " nan")) << compared.out;
}

// ---------------------------------------------------------------------------------------------
// Golden files

class BadGolden : public testing::TestWithParam<Row> {};

TEST_P(BadGolden, IsRefused) {
  const TempFolder folder;
  const std::string file = folder.write("bad.json", GetParam().text);
  std::vector<std::string> words = GetParam().words;
  words.push_back(file);
  expect_mistake(run_program({"loss", "check", file}), words);
}

std::string golden(const std::string& fixture, const std::string& cases) {
  return "{\"fixture\": {" + fixture + "},\n\"cases\": " + cases + "}";
}

const std::vector<Row> kBadGoldens = {
    {"AnEmptyFile", "", {"line 1, column 1"}},
    {"CutOff", "{\"fixture\": {},\n\"cases\": [", {"line 2, column 11"}},
    {"AList", "[]", {"\"fixture\"", "\"cases\""}},
    {"NoFixture", "{\"cases\": []}", {"\"fixture\""}},
    {"NoCases", "{\"fixture\": {\"pi\": [[-1]]}}", {"\"cases\""}},
    {"CasesAreNoList", golden(R"("pi": [[-1]])", "{}"), {"\"cases\""}},
    {"NoPi", golden(R"("rollout": [[-1]])", "[]"), {"\"pi\""}},
    {"PiIsNoList", golden(R"("pi": 3)", "[]"), {"fixture.pi"}},
    {"TextInPi", golden(R"("pi": [["x"]])", "[]"), {"fixture.pi"}},
    {"AStreamTooShort",
     golden(R"("pi": [[-1, -2]], "rollout": [[-1]])", "[]"),
     {"fixture.rollout", "sequence 0"}},
    {"AStreamWithTooFewSequences",
     golden(R"("pi": [[-1], [-2]], "prox": [[-1]])", "[]"),
     {"fixture.prox", "1", "2"}},
    {"AStreamWithTooManySequences",
     golden(R"("pi": [[-1]], "ref": [[-1], [-1]])", "[]"),
     {"fixture.ref"}},
    {"AdvantagesOfAnotherLength",
     golden(R"("pi": [[-1], [-2]], "adv_seq": [1])", "[]"),
     {"adv_seq"}},
    {"ACaseWithoutAName",
     golden(R"("pi": [[-1]])", R"([{"name": "is"}, {"loss": 1}])"),
     {"case 1", "\"name\""}},
    {"ACaseThatIsNoObject", golden(R"("pi": [[-1]])", "[3]"), {"case 0", "\"name\""}},
    {"ANameThatIsNoText", golden(R"("pi": [[-1]])", R"([{"name": 3}])"), {"case 0", "\"name\""}},
    {"ANulByteAfterTheEnd", golden(R"("pi": [[-1]])", "[]") + std::string("\0{", 2), {"line 2"}},
};
INSTANTIATE_TEST_SUITE_P(Table, BadGolden, testing::ValuesIn(kBadGoldens), row_name);

TEST(BadGoldenCase, IsReportedAndTheOthersAreComputed) {
  const TempFolder folder;
  const std::string file = folder.write(
      "golden.json", golden(R"("pi": [[-1, -2]], "rollout": [[-1, NaN]], "adv_seq": [1])",
                            R"([{"name": "is"}, {"name": "reinforce", "config": 3},
                                {"name": "reinforce", "config": {"adv_tau": "x"}},
                                {"name": "reinforce", "loss": "x"},
                                {"name": "areal/prox_approx", "config": {"versions": [1, 2, 3],
                                                                 "current_version": 1}},
                                {"name": "reinforce"}])"));
  const RunResult result = run_program({"loss", "check", file});
  EXPECT_EQ(result.code, 1) << result;
  EXPECT_TRUE(contains(result.out, "position 1")) << result.out;
  EXPECT_TRUE(contains(result.out, "1 agree, 5 differ")) << result.out;
}

TEST(BadGoldenFixture, OfAMillionBracketsDoesNotExhaustTheStack) {
  const size_t depth = 1000000;
  const TempFolder folder;
  const std::string deep = repeated("[", depth) + repeated("]", depth);
  const std::string file = folder.write("deep.json", golden("\"pi\": [" + deep + "]", "[]"));
  const RunResult result = run_program({"loss", "check", file});
  EXPECT_TRUE(result.code == 0 || result.code == 2) << result;
}

// ---------------------------------------------------------------------------------------------
// Files

TEST(Files, AreNamedWhereTheyAreMissingOrFolders) {
  const TempFolder folder;
  const std::string missing = folder / "missing", directory = folder.path().string();
  for (const auto& [file, reason] :
       std::map<std::string, std::string>{{missing, "No such file"}, {directory, "directory"}}) {
    SCOPED_TRACE(file);
    expect_mistake(run_program({"loss", "eval", "--preset", "is", "--batch", file}),
                   {file, reason});
    expect_mistake(run_program({"loss", "eval", "--config", file, "--batch", file}),
                   {file, reason});
    expect_mistake(run_program({"loss", "compare", "--batch", file}), {file, reason});
    expect_mistake(run_program({"loss", "check", file}), {file, reason});
    expect_mistake(run_program({"config", file}), {file, reason});
  }
  const std::string batch = folder.write("batch.json", kBatch);
  expect_mistake(run_program({"loss", "compare", "--batch", batch, "--html", directory}),
                 {directory});
}

TEST(Files, OfTwentyMegabytesAreRead) {
  constexpr size_t kSequences = 700, kTokens = 1000;
  std::string text = "{\"sequences\": [";
  for (size_t s = 0; s < kSequences; ++s) {
    std::string pi, rollout;
    for (size_t t = 0; t < kTokens; ++t) {
      const char* comma = t > 0 ? ", " : "";
      pi += fmt::format("{}-{:.10f}", comma, 0.001 * static_cast<double>((s * 7 + t) % 997));
      rollout += fmt::format("{}-{:.10f}", comma, 0.001 * static_cast<double>((s * 5 + t) % 991));
    }
    text += fmt::format("{}{{\"pi\": [{}], \"rollout\": [{}], \"advantages\": {}}}",
                        s > 0 ? ",\n" : "", pi, rollout, s % 2 == 0 ? 1 : -1);
  }
  text += "]}";
  ASSERT_GT(text.size(), 20u << 20);
  const TempFolder folder;
  const std::string file = folder.write("large.json", text);
  const RunResult result = run_program({"loss", "eval", "--preset", "icepop", "--batch", file});
  ASSERT_EQ(result.code, 0) << result.err;
  const Document json = json_of(result.out);
  EXPECT_EQ(json["metrics"]["tokens"].GetDouble(), static_cast<double>(kSequences * kTokens));
  EXPECT_EQ(json["grad"].Size(), kSequences);

  // A syntax error at the end is reported at its position.
  text.replace(text.size() - 3, 1, "x");
  folder.write("large.json", text);
  expect_mistake(run_program({"loss", "eval", "--preset", "icepop", "--batch", file}),
                 {fmt::format("line {}, column", kSequences)});
}

}  // namespace
}  // namespace leeway
