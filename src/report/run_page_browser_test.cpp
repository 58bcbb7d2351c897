// The page of `leeway report` in headless Chromium. These tests run alone (RUN_SERIAL): a browser
// beside another test on two cores takes many times as long.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>

#include "base/files.h"
#include "report/run_folder.h"
#include "report/run_page.h"
#include "report/test_support.h"

namespace leeway {
namespace {

// Opens the page of the folders in a browser and uses it; scripts/check_report says how.
struct Check {
  int code;
  std::string said;
};

Check check_page(const std::string& file, const std::string& options = "") {
  const std::string said = file + ".txt";
  const std::string command = LEEWAY_SOURCE_DIR "/scripts/check_report '" + file + "' " + options +
                              " > '" + said + "' 2>&1";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(said)};
}

// 77: no browser; 127: no node.
bool can_check(const Check& check) { return check.code != 77 && check.code != 127; }

Check check_folders(const std::string& name, const std::vector<std::string>& folders) {
  const std::string file = LEEWAY_BINARY_DIR "/report_pages/" + name + ".html";
  write_file_atomically(file, run_page(run_folders_json(folders)));
  return check_page(file);
}

void check_in_browser(const std::string& name, const std::vector<std::string>& folders) {
  const Check check = check_folders(name, folders);
  if (!can_check(check)) GTEST_SKIP() << "no node or no Chromium on this machine";
  EXPECT_EQ(check.code, 0) << name << "\n" << check.said;
}

TEST(RunPage, ThatDoesNotWorkIsRefusedWithWhatWasWaitedFor) {
  const std::string folder = fresh_folder("broken");
  put_file(folder + "/empty.html", "<!DOCTYPE html><p>nothing here</p>");
  const Check empty = check_page(folder + "/empty.html", "--patience 3");
  if (!can_check(empty)) GTEST_SKIP() << "no node or no Chromium on this machine";
  EXPECT_EQ(empty.code, 1);
  EXPECT_NE(empty.said.find("s in vain for the page to load"), std::string::npos) << empty.said;

  make_run(folder + "/run", {.steps = 10, .has_warm_start = false});
  std::string page = run_page(run_folders_json(std::vector{folder + "/run"}));
  const size_t button = page.find("id=\"theme\"");
  ASSERT_NE(button, std::string::npos);
  page.insert(button, "disabled ");
  put_file(folder + "/button.html", page);
  const Check broken = check_page(folder + "/button.html", "--patience 5");
  EXPECT_EQ(broken.code, 1);
  EXPECT_NE(broken.said.find("in vain for another background after a click on the theme button"),
            std::string::npos)
      << broken.said;
}

// Its metrics contain one that an environment has invented, which is chosen for a chart.
TEST(RunPage, OfOneRunWorksInABrowser) {
  const std::string folder = fresh_folder("one");
  make_run(folder, {});
  ASSERT_NE(read_file(folder + "/metrics.jsonl").find("env_metrics/"), std::string::npos);
  check_in_browser("one_run", {folder});
}

TEST(RunPage, OfSeveralRunsWorksInABrowser) {
  const std::string folder = fresh_folder("several");
  make_run(folder + "/icepop", {});
  make_run(folder + "/grpo", {.seed = 2, .preset = "grpo", .speed = 0.8, .drift = 2.5});
  make_run(folder + "/cispo",
           {.seed = 3, .steps = 140, .preset = "cispo", .speed = 1.2, .has_warm_start = false});
  check_in_browser("several_runs", {folder + "/icepop", folder + "/grpo", folder + "/cispo"});
}

// 11 charts of every run, 3 of metrics that the reader may choose, and 2 of ranks.
TEST(RunPage, OfARunWithRanksHasTheirCharts) {
  const std::string folder = fresh_folder("ranks");
  make_run(folder, {.steps = 15, .has_warm_start = false, .has_ranks = true});
  const Check check = check_folders("ranks", {folder});
  if (!can_check(check)) GTEST_SKIP() << "no node or no Chromium on this machine";
  EXPECT_EQ(check.code, 0) << check.said;
  EXPECT_NE(check.said.find(" 15 steps, 16 charts, "), std::string::npos) << check.said;
}

TEST(RunPage, OfOneStepAndMissingMetricsWorksInABrowser) {
  const std::string folder = fresh_folder("small");
  make_run(folder + "/one_step",
           {.steps = 1, .eval_every = 0, .rollouts_every = 1, .has_warm_start = false});
  put_file(folder + "/bare/metrics.jsonl", "{\"step\": 1, \"reward/all/mean\": null}\n");
  put_file(folder + "/fresh/metrics.jsonl", "");
  put_file(folder + "/warm/sft.jsonl", "{\"step\": 1, \"loss\": 2.5}\n{\"step\": 2, \"loss\": 2");
  // Markup in every string that the page shows.
  const std::string hostile = "<img src=x onerror=console.error(1)>";
  put_file(folder + "/hostile/metrics.jsonl",
           "{\"step\": 1, \"" + hostile + "\": 1}\n{\"step\": 2, \"" + hostile + "\": null}\n");
  put_file(folder + "/hostile/config.toml", "[" + hostile + "]\n" + hostile + "\n");
  put_file(folder + "/hostile/objective.txt", hostile);
  put_file(folder + "/hostile/rollouts/step_1.jsonl",
           fmt::format(R"({{"step": 1, "environment": "{0}", "finish": "{0}", "reward": null,)"
                       R"( "rewards": {{"{0}": 1}}, "samples": [{{"tokens": ["{0}", "b"],)"
                       R"( "loss_mask": [0, 1], "pi": [0, -1], "rollout": [0, -2]}}]}})",
                       hostile));
  check_in_browser("one_step", {folder + "/one_step"});
  for (const char* name : {"bare", "fresh", "warm", "hostile"}) {
    check_in_browser(name, {folder + "/" + name});
  }
  check_in_browser("mixed", {folder + "/one_step", folder + "/bare", folder + "/fresh",
                             folder + "/warm", folder + "/hostile"});
}

// A long run fills its lines to the limit of points; that the others are short saves a minute of
// drawing. Its rows are too many to show all, which the page says with the name of the file: a path
// without a place to break that is wider than a narrow window.
TEST(RunPage, OfSixRunsWorksInABrowser) {
  const std::string folder = fresh_folder("six/" + std::string(90, 'x'));
  std::vector<std::string> folders;
  for (uint64_t k = 0; k < 6; ++k) {
    const int steps = k == 0 ? 5000 : 120;
    folders.push_back(fmt::format("{}/run_{}", folder, k));
    make_run(folders.back(), {.seed = k,
                              .steps = steps,
                              .max_steps = steps,
                              .speed = 0.7 + 0.1 * static_cast<double>(k),
                              .eval_every = steps / 20,
                              .rollouts_every = steps / 10});
  }
  check_in_browser("six_runs", folders);
}

}  // namespace
}  // namespace leeway
