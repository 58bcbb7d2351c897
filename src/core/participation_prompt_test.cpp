// Prompts: positions before a sequence's first nonzero weight, and `prompt_len` in files. They
// never reach a loss, whatever they contain, even one that looks past the mask.

#include <gtest/gtest.h>

#include "core/batch_json.h"
#include "core/foreign/foreign.h"
#include "core/test_support.h"
#include "leeway/error.h"
#include "leeway/evaluator.h"
#include "leeway/metrics.h"

namespace leeway {
namespace {

using testing::behind_prompts;
using testing::NamedPreset;
using testing::random_batch;

Catalog catalog;

std::vector<NamedPreset> everything() {
  std::vector<NamedPreset> list = testing::native_list(catalog);
  for (NamedPreset& foreign : testing::foreign_list(catalog)) list.push_back(std::move(foreign));
  return list;
}

// The gradient of the sequences behind their prompts, where it must be 0.
template <class T>
std::vector<T> without_prompts(const std::vector<T>& grad, const Batch& with_prompts) {
  std::vector<T> out;
  for (size_t i = 0; i < grad.size(); ++i) {
    if (with_prompts.weights[i] != 0.0) {
      out.push_back(grad[i]);
    } else {
      EXPECT_EQ(grad[i], T(0)) << "position " << i;
    }
  }
  return out;
}

TEST(Prompts, ChangeNoPresetsLossGradientOrMetrics) {
  const Batch bare = testing::rounded(random_batch(3, {17, 5, 33, 8}, true));
  const Batch prompted = behind_prompts(bare);
  Evaluator evaluator(2);
  for (const NamedPreset& named : everything()) {
    const LossSpec spec = catalog.make_spec(named.preset, named.settings);
    MetricSums bare_sums, prompted_sums, float_sums;
    const LossResult expected = evaluate_reference(spec, bare.view(), {}, &bare_sums, true);
    const LossResult got = evaluate_reference(spec, prompted.view(), {}, &prompted_sums, true);
    EXPECT_EQ(got.loss, expected.loss) << named.label();
    EXPECT_EQ(got.denominator, expected.denominator) << named.label();
    EXPECT_EQ(without_prompts(got.grad, prompted), expected.grad) << named.label();
    EXPECT_EQ(prompted_sums.flatten(), bare_sums.flatten()) << named.label();
    if (named.preset.find('/') != std::string::npos) {
      const auto metrics = foreign_metrics(spec, prompted.view(), got);
      const auto wanted = foreign_metrics(spec, bare.view(), expected);
      ASSERT_EQ(metrics.size(), wanted.size());
      for (size_t m = 0; m < metrics.size(); ++m) {
        EXPECT_EQ(metrics[m].values, wanted[m].values) << named.label() << " " << metrics[m].name;
      }
    }

    const FloatBatch floats(prompted), bare_floats(bare);
    std::vector<float> grad(prompted.pi.size(), -77.0f), bare_grad(bare.pi.size(), -77.0f);
    const double loss = evaluator.evaluate(spec, floats.view(), grad, {}, &float_sums);
    const double wanted = evaluator.evaluate(spec, bare_floats.view(), bare_grad, {}, nullptr);
    // The same tokens in other lanes: sums differ by their order alone.
    EXPECT_NEAR(loss, wanted, 1e-5 * (1.0 + std::abs(wanted))) << named.label();
    const std::vector<float> kept = without_prompts(grad, prompted);
    for (size_t i = 0; i < kept.size(); ++i) {
      ASSERT_NEAR(kept[i], bare_grad[i], 1e-5f * (1.0f + std::abs(bare_grad[i])))
          << named.label() << " token " << i;
    }
    EXPECT_EQ(float_sums[Slot::tokens], bare_sums[Slot::tokens]) << named.label();
  }
}

TEST(Prompts, AreNamedInBatchFiles) {
  const Batch batch = parse_batch("b.json", R"({"sequences": [
      {"pi": [null, -9, -0.5, -0.2], "rollout": [0, 0, -0.4, -0.2], "prox": [0, 0, -0.5, -0.2],
       "advantages": 1, "mask": [0, 0, 1, 1], "prompt_len": 2},
      {"pi": [-1], "rollout": [-1], "prox": [-1], "advantages": -1}]})")
                          .batch;
  EXPECT_EQ(batch.weights, (std::vector<double>{0, 0, 1, 1, 1}));
  const LossSpec spec =
      catalog.make_spec("cookbook_PR169/cispo", {{"tis_level", std::string("sequence"), ""}});
  MetricSums sums;
  const LossResult result = evaluate_reference(spec, batch.view(), {}, &sums);
  EXPECT_EQ(sums[Slot::tokens], 3.0);
  // The weight is e^(mean of -0.1 and 0), of the response alone; the other sequence's is 1.
  EXPECT_NEAR(result.loss, -2.0 * std::exp(-0.05) + 1.0, 1e-6);
  EXPECT_EQ(result.grad[0], 0.0);
  EXPECT_EQ(result.grad[1], 0.0);
}

TEST(Prompts, ThatCannotBeAreRefused) {
  const auto problem = [](const std::string& fields) -> std::string {
    try {
      parse_batch("b.json",
                  R"({"sequences": [{"pi": [-1, -2], "advantages": 1, )" + fields + "}]}");
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  for (const char* bad : {"-1", "3", "0.5", "null, \"prompt_len\": 1e300"}) {
    EXPECT_NE(problem(std::string("\"prompt_len\": ") + bad).find("sequence 0: \"prompt_len\" is"),
              std::string::npos)
        << bad << ": " << problem(std::string("\"prompt_len\": ") + bad);
  }
  EXPECT_NE(problem(R"("prompt_len": 1, "prompt_len": 1)").find("twice"), std::string::npos);
  EXPECT_NE(problem(R"("prompt_len": [1])").find("a list is not expected"), std::string::npos);
  EXPECT_NE(problem(R"("prompt_len": "1")").find("text where a number"), std::string::npos);
  EXPECT_NE(problem(R"("mask": [1, 1], "prompt_len": 1)").find("trains position 0"),
            std::string::npos);
  EXPECT_EQ(problem(R"("mask": [0, 1], "prompt_len": 1)"), "");
  EXPECT_EQ(problem(R"("prompt_len": 0)"), "");
  EXPECT_EQ(problem(R"("prompt_len": 2)"), "");
}

}  // namespace
}  // namespace leeway
