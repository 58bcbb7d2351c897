#include "trainer/sample_checks.h"

#include <cmath>
#include <functional>

#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::expect_refused;
using testing::kNan;

Sample good_sample() {
  Sample sample;
  sample.ids = {4, 5, 6, 7};
  sample.loss_mask = {0, 1, 0, 1};
  sample.advantages = {0.5f};
  sample.rollout = {kNan, -1.0f, kNan, -2.0f};
  sample.versions = {-1, 3, -1, 3};
  return sample;
}

TEST(Samples, AreTakenAsDescribed) {
  const ModelConfig config = testing::small_config(Family::llama);
  std::vector<Sample> samples(3, good_sample());
  samples[1].advantages = {kNan, 1.0f, kNan, 0.0f};
  samples[2].ids = {4};
  samples[2].loss_mask = {0};
  samples[2].rollout = {kNan};
  samples[2].versions = {-1};
  EXPECT_NO_THROW(check_samples(config, samples));
  for (Sample& sample : samples) sample.rollout.clear(), sample.versions.clear();
  EXPECT_NO_THROW(check_samples(config, samples));
  EXPECT_NO_THROW(check_samples(config, {}));
}

TEST(Samples, AreRefusedByNumberAndList) {
  const ModelConfig config = testing::small_config(Family::llama);
  struct Case {
    std::function<void(Sample&)> spoil;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {[](Sample& s) { s.ids.clear(); }, {"ids"}},
      {[](Sample& s) {
         s.ids.assign(129, 1), s.loss_mask.assign(129, 0), s.advantages = {1.0f};
         s.rollout.assign(129, 0.0f), s.versions.assign(129, 0);
       },
       {"129", "128", "positions"}},
      {[](Sample& s) { s.ids[2] = 50; }, {"ids[2]", "50", "vocabulary"}},
      {[](Sample& s) { s.ids[2] = -1; }, {"ids[2]", "-1"}},
      {[](Sample& s) { s.loss_mask.pop_back(); }, {"loss_mask", "3", "4"}},
      {[](Sample& s) { s.loss_mask[0] = 1; }, {"loss_mask[0]", "first"}},
      {[](Sample& s) { s.loss_mask[3] = 2; }, {"loss_mask[3]", "2"}},
      {[](Sample& s) { s.advantages.clear(); }, {"advantages", "0"}},
      {[](Sample& s) {
         s.advantages = {1.0f, 2.0f};
       },
       {"advantages", "2"}},
      {[](Sample& s) { s.advantages = {kNan}; }, {"advantages[1]", "nan"}},
      {[](Sample& s) {
         s.advantages = {0, 0, 0, HUGE_VALF};
       },
       {"advantages[3]", "inf"}},
      {[](Sample& s) { s.rollout.pop_back(); }, {"rollout", "3"}},
      {[](Sample& s) { s.rollout[3] = kNan; }, {"rollout[3]", "nan"}},
      {[](Sample& s) { s.rollout[1] = -HUGE_VALF; }, {"rollout[1]", "inf"}},
      {[](Sample& s) { s.rollout.clear(); }, {"rollout", "sample 0"}},
      {[](Sample& s) { s.versions.push_back(1); }, {"versions", "5"}},
      {[](Sample& s) { s.versions.clear(); }, {"versions", "sample 0"}},
      {[](Sample& s) { s.temperature = 0.0f; }, {"temperature", "0"}},
      {[](Sample& s) { s.temperature = -1.0f; }, {"temperature", "-1"}},
      {[](Sample& s) { s.temperature = kNan; }, {"temperature", "nan"}},
      {[](Sample& s) { s.temperature = HUGE_VALF; }, {"temperature", "inf"}},
      {[](Sample& s) { s.temperature = 1e-40f; }, {"temperature"}},  // has no finite inverse
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    std::vector<Sample> samples(3, good_sample());
    cases[i].spoil(samples[2]);
    std::vector<std::string> words = cases[i].words;
    words.push_back("sample 2");
    expect_refused([&] { check_samples(config, samples); }, words);
  }
}

TEST(SamplesByRollout, KeepTogetherInTheOrderOfTheFirst) {
  std::vector<Sample> samples(7);
  const std::vector<int32_t> ids{5, -1, 0, 5, -1, 0, 7};
  for (size_t i = 0; i < ids.size(); ++i) samples[i].rollout_id = ids[i];
  const std::vector<std::vector<size_t>> expected{{0, 3}, {1}, {2, 5}, {4}, {6}};
  EXPECT_EQ(samples_by_rollout(samples), expected);
}

}  // namespace
}  // namespace leeway
