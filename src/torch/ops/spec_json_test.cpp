#include "torch/ops/spec_json.h"

#include <gtest/gtest.h>

#include "leeway/error.h"
#include "leeway/presets.h"

namespace leeway {
namespace {

std::string error_of(const std::string& text) {
  try {
    spec_from_json(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(SpecJson, IsTheSpecOfThePresetAndItsKeys) {
  const LossSpec plain = spec_from_json(R"({"preset": "icepop"})");
  EXPECT_EQ(plain.settings, Catalog().make_spec("icepop", {}).settings);
  const LossSpec set = spec_from_json(
      R"({"icepop_ratio_low": 0.5, "preset": "icepop", "icepop_rollout_min_ratio": "off",
          "reduction": "sum"})");
  EXPECT_EQ(set.preset, "icepop");
  EXPECT_EQ(set.gates.at(0).keep.low, 0.5);
  EXPECT_EQ(set.reduction.kind, ReductionKind::sum);
  EXPECT_EQ(spec_from_json(R"({"preset": "ppo+tis", "tis_cap": Infinity})").corrections.size(), 1u);
  // Foreign presets take true and false.
  EXPECT_NE(
      spec_from_json(R"({"preset": "verl/vanilla+IS", "batch_norm": true})").weight_normalisation,
      WeightNormalisation::none);
}

TEST(SpecJson, RefusesWithTheNameOfTheArgumentTheKeyAndTheRemedy) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> rows = {
      {"", {"spec_json line 1"}},
      {"{\"preset\": \"icepop\"", {"spec_json line 1"}},
      {"{\"preset\":\n \"icepop\",}", {"spec_json line 2"}},
      {std::string("{}\0", 3), {"NUL"}},
      {"[]", {"spec_json", "an object"}},
      {"3", {"spec_json", "an object"}},
      {"{}", {"spec_json", "no \"preset\""}},
      {R"({"preset": 3})", {"spec_json: preset", "text"}},
      {R"({"preset": null})", {"spec_json: preset", "text"}},
      {R"({"preset": ""})", {"spec_json", "preset"}},
      {R"({"preset": "icepoop"})", {"spec_json", "icepoop", "did you mean icepop?"}},
      {R"({"preset": "icepop", "preset": "is"})", {"\"preset\"", "twice"}},
      {R"({"preset": "is", "log_clamp": 1, "log_clamp": 2})", {"\"log_clamp\"", "twice"}},
      {R"({"preset": "icepop", "icepop_ratio_lo": 1})",
       {"spec_json: icepop_ratio_lo = 1", "did you mean icepop_ratio_low?"}},
      {R"({"preset": "icepop", "eps_clip": 0.2})", {"spec_json: eps_clip = 0.2"}},
      {R"({"preset": "icepop", "icepop_ratio_low": -1})",
       {"spec_json: icepop_ratio_low = -1", "at least 0"}},
      {R"({"preset": "icepop", "icepop_ratio_low": "x"})",
       {"spec_json: icepop_ratio_low = \"x\"", "number"}},
      {R"({"preset": "icepop", "icepop_ratio_low": true})", {"icepop_ratio_low = true"}},
      {R"({"preset": "icepop", "icepop_ratio_low": [1]})",
       {"spec_json: icepop_ratio_low", "number"}},
      {R"({"preset": "icepop", "icepop_ratio_low": {"a": 1}})", {"spec_json: icepop_ratio_low"}},
      {R"({"preset": "icepop", "reduction": "mean"})", {"spec_json: reduction", "token_mean"}},
  };
  for (const auto& [text, words] : rows) {
    const std::string error = error_of(text);
    for (const std::string& word : words) {
      EXPECT_NE(error.find(word), std::string::npos)
          << text << "\n\"" << word << "\" is not in: " << error;
    }
    EXPECT_EQ(error.find("spec_json"), error.rfind("spec_json")) << error;
  }
}

}  // namespace
}  // namespace leeway
