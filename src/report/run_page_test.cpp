#include "report/run_page.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cctype>
#include <cstdlib>

#include "base/files.h"
#include "report/embedded_files.h"
#include "report/run_folder.h"
#include "report/test_support.h"

namespace leeway {
namespace {

constexpr std::string_view kDataOpen = R"(<script type="application/json" id="runs-data">)";

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

size_t count_of(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

// What a browser hands to JSON.parse: everything up to the first end tag.
std::string data_of(const std::string& page) {
  const size_t open = page.find(kDataOpen);
  if (open == std::string::npos) return "no data element";
  const size_t begin = open + kDataOpen.size();
  return page.substr(begin, lower(page).find("</script", begin) - begin);
}

std::string shell() {
  std::string text;
  for (const std::string_view part : {run_page_template(), run_page_css(), run_page_js(),
                                      run_page_charts_js(), run_page_rollouts_js()}) {
    text += part;
  }
  return text;
}

TEST(RunPage, HoldsItsPartsAndNoPlaceholder) {
  const std::string page = run_page("{\"runs\": []}");
  EXPECT_EQ(page.find("<!DOCTYPE html>"), 0u);
  EXPECT_EQ(data_of(page), "{\"runs\": []}");
  EXPECT_EQ(page.find("@leeway_"), std::string::npos);
  for (const std::string_view part :
       {run_page_css(), run_page_js(), run_page_charts_js(), run_page_rollouts_js(), chart_js()}) {
    EXPECT_EQ(count_of(page, part), 1u);
    EXPECT_EQ(lower(part).find("</script"), std::string::npos);
    EXPECT_EQ(lower(part).find("</style"), std::string::npos);
  }
}

TEST(RunPage, KeepsHostileStringsInside) {
  const size_t end_tags = count_of(lower(run_page("{}")), "</script");
  for (const std::string_view hostile :
       {"</script><script>alert(1)</script>", "</SCRIPT ><b>bold</b>", "<!--<script>", "-->",
        "@leeway_chart_js@ @leeway_runs_json@", "\"'`\\", "<img src=x onerror=alert(1)>"}) {
    JsonWriter json;
    json.begin_object().key("name").value(hostile).end_object();
    const std::string page = run_page(json.text());
    EXPECT_EQ(count_of(lower(page), "</script"), end_tags) << hostile;
    const rapidjson::Document data = parse_json("page", data_of(page));
    EXPECT_EQ(std::string_view(data["name"].GetString()), hostile);
  }
}

TEST(RunPage, LoadsNothingAndShowsDataAsTextOnly) {
  const std::string text = shell();
  for (const char* reference : {"src=",           "href=",          ".src",
                                ".href",          "action=",        "http:",
                                "https:",         "url(",           "@import",
                                "fetch(",         "XMLHttpRequest", "<link",
                                "<base",          "<iframe",        "<object",
                                "innerHTML",      "outerHTML",      "insertAdjacentHTML",
                                "document.write", "eval(",          "Function("}) {
    EXPECT_EQ(text.find(reference), std::string::npos) << reference;
  }
  EXPECT_NE(text.find("default-src 'none'"), std::string::npos);
  for (const char c : text) ASSERT_LT(static_cast<unsigned char>(c), 0x80);
}

// Opens the page of the folders in a browser and uses it; scripts/check_report says how.
void check_in_browser(const std::string& name, const std::vector<std::string>& folders) {
  const std::string file = LEEWAY_BINARY_DIR "/report_pages/" + name + ".html";
  write_file_atomically(file, run_page(run_folders_json(folders)));
  const std::string command = LEEWAY_SOURCE_DIR "/scripts/check_report '" + file + "' 2>&1";
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  const int code = WEXITSTATUS(status);
  // 77: no browser; 127: no node.
  if (code == 77 || code == 127) GTEST_SKIP() << "no node or no Chromium on this machine";
  EXPECT_EQ(code, 0) << file;
}

TEST(RunPage, OfOneRunWorksInABrowser) {
  const std::string folder = fresh_folder("one");
  make_run(folder, {});
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

TEST(RunPage, OfSixLongRunsWorksInABrowser) {
  const std::string folder = fresh_folder("long");
  std::vector<std::string> folders;
  for (uint64_t k = 0; k < 6; ++k) {
    folders.push_back(fmt::format("{}/run_{}", folder, k));
    make_run(folders.back(), {.seed = k,
                              .steps = 5000,
                              .max_steps = 5000,
                              .speed = 0.7 + 0.1 * static_cast<double>(k),
                              .eval_every = 250,
                              .rollouts_every = 500});
  }
  check_in_browser("six_long_runs", folders);
}

}  // namespace
}  // namespace leeway
