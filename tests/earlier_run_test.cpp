// A run folder that an earlier version of the program wrote, stopped in the middle, is reported and
// goes on: tests/data/earlier_run, made by commit c2f03e7 with the run.toml beside it. The folder
// is never written anew; a format that changes keeps reading this one.

#include "leeway/evaluator.h"
#include "resume_support.h"

namespace leeway {
namespace {

// What sums are rounded to depends on the width of the machine's vectors. Where it is that of the
// machine which wrote the folder, the numbers of the folder have to be met exactly.
constexpr const char* kWrittenAt = "AVX2";

class EarlierRunTest : public ResumeFixture {
 protected:
  void SetUp() override {
    ResumeFixture::SetUp();
    fs::copy(kData, directory(),
             fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    fs::permissions(path("run"), fs::perms::owner_all, fs::perm_options::add);
  }
  static bool is_same_machine() { return simd_levels().front() == kWrittenAt; }

  // Each value that both rows have is the same. Versions may differ in what else they write.
  static void expect_same_values(const std::vector<std::string>& then,
                                 const std::vector<std::string>& now) {
    ASSERT_EQ(then.size(), now.size());
    for (size_t i = 0; i < then.size(); ++i) {
      const Document before = json_of(then[i]), after = json_of(now[i]);
      int compared = 0;
      for (const auto& member : before.GetObject()) {
        const char* name = member.name.GetString();
        if (!after.HasMember(name)) continue;
        EXPECT_EQ(text_of(member.value), text_of(after[name])) << name << " of row " << i + 1;
        ++compared;
      }
      EXPECT_GT(compared, 10);
    }
  }

  const std::string kData = LEEWAY_SOURCE_DIR "/tests/data/earlier_run";
};

TEST_F(EarlierRunTest, IsReported) {
  expect_readable();
  EXPECT_TRUE(contains(read_file(folder_ / "page.html"), "stopped"));
  const Outcome before = outcome(6);
  EXPECT_EQ(before.metrics.size(), 6u);
}

TEST_F(EarlierRunTest, GoesOnAndEndsLikeARunThatWasNeverStopped) {
  const RunResult result = resume();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "resumed from step 6")) << result.err;
  const Outcome resumed = outcome(10);
  EXPECT_EQ(resumed.metrics.size(), 10u);
  expect_readable();
  expect_no_leftovers();

  // Whatever the machine: once more from the same folder gives the same.
  fs::remove_all(path("run"));
  fs::copy(kData, directory(), fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  ASSERT_EQ(resume().code, 0);
  expect_same(outcome(10), resumed);

  fs::remove_all(path("run"));
  const Outcome fresh = undisturbed({}, 10);
  if (!is_same_machine()) {
    std::cout << "vectors of " << simd_levels().front() << ", not " << kWrittenAt
              << ": the weights are not compared with those of a run that was never stopped\n";
    return;
  }
  EXPECT_TRUE(resumed.weights == fresh.weights);
  EXPECT_TRUE(resumed.rollouts.at("step_10.jsonl") == fresh.rollouts.at("step_10.jsonl"));
  expect_same_values(resumed.metrics, fresh.metrics);
  expect_same_values(resumed.evaluations, fresh.evaluations);
}

}  // namespace
}  // namespace leeway
