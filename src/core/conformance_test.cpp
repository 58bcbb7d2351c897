// The goldens of public implementations, and the checker itself.

#include "core/conformance.h"

#include <gtest/gtest.h>

#include <map>

#include "base/files.h"
#include "leeway/error.h"

namespace leeway {
namespace {

const std::string kGolden = LEEWAY_SOURCE_DIR "/tests/data/losses_golden.json";

TEST(Conformance, EveryGoldenCaseAgreesInLossGradientAndOwedMetrics) {
  const Catalog catalog;
  const auto results = run_golden(catalog, kGolden, read_file(kGolden));
  std::map<std::string, int> families;
  int numbers = 0;
  for (const CaseResult& result : results) {
    EXPECT_TRUE(result.ok) << result.name << ": " << result.difference;
    ++families[result.name.substr(0, result.name.find('/'))];
    numbers += result.compared_numbers;
  }
  EXPECT_EQ(results.size(), 183u);
  EXPECT_EQ(
      families["prime"] + families["slime"] + families["cookbook"] + families["cookbook_PR169"],
      72);
  EXPECT_GT(numbers, 3500);
}

TEST(Conformance, AChangedNumberIsSeen) {
  const Catalog catalog;
  const std::string text = R"({"fixture": {"pi": [[-1.0, -2.0]], "rollout": [[-1.1, -2.0]],
    "masks": [[1, 1]], "adv_seq": [1.0]}, "cases": [
    {"name": "prime/PR2401_icepop/a", "loss": -1.0525854590378239},
    {"name": "prime/PR2401_icepop/b", "loss": -1.0525964590378239},
    {"name": "prime/PR2401_icepop/c", "grad": [[-0.5525854590378239, -0.5]]},
    {"name": "prime/PR2401_icepop/d", "grad": [[-0.5525854590378239]]},
    {"name": "prime/PR2401_icepop/e", "metrics": {"is_masked": [0.0]}},
    {"name": "prime/PR2401_icepop/f", "metrics": {"is_masked": [0.5]}},
    {"name": "prime/PR2401_icepop/g", "metrics": {"no_such_metric": 1}},
    {"name": "prime/PR2401_icepop"},
    {"name": "verl/vanilla/needs_prox"},
    {"name": "nobody/knows"}]})";
  const std::vector<bool> expected = {true,  false, true, false, true,
                                      false, false, true, false, false};
  const auto results = run_golden(catalog, "made up", text);
  ASSERT_EQ(results.size(), expected.size());
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].ok, expected[i]) << results[i].name << ": " << results[i].difference;
  }
  EXPECT_TRUE(results[7].has_loss);  // everything but the name is optional
}

TEST(Conformance, BadFilesAreErrors) {
  const Catalog catalog;
  for (const char* text : {"", "[]", "{}", R"({"fixture": {}, "cases": []})", R"({"cases": []})",
                           R"({"fixture": {"pi": [[1]], "rollout": [[1, 2]]}, "cases": []})",
                           R"({"fixture": {"pi": [[1]]}, "cases": [{}]})",
                           R"({"fixture": {"pi": [["x"]]}, "cases": []})"}) {
    EXPECT_THROW(run_golden(catalog, "bad", text), Error) << text;
  }
}

// The same formulas on other numbers: the reference is exact under scaling of the advantages.
TEST(Conformance, ForeignPresetsAreLinearInTheAdvantageWhereTheirSourceIs) {
  const Catalog catalog;
  for (const char* preset :
       {"slime/ppo", "verl/vanilla", "areal/ppo", "cookbook/is", "prime/PR2401_icepop"}) {
    Batch batch;
    batch.offsets = {0, 3};
    batch.pi = {-1.0, -0.5, -2.0};
    batch.prox = {-1.2, -0.4, -2.5};
    batch.rollout = {-1.1, -0.6, -2.2};
    batch.advantages = {1.0, -0.5, 2.0};
    const auto one = evaluate_reference(catalog.make_spec(preset, {}), batch.view());
    for (double& a : batch.advantages) a *= 3.0;
    const auto three = evaluate_reference(catalog.make_spec(preset, {}), batch.view());
    EXPECT_NEAR(three.loss, 3.0 * one.loss, 1e-12) << preset;
  }
}

}  // namespace
}  // namespace leeway
