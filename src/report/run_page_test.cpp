#include "report/run_page.h"

#include <gtest/gtest.h>

#include <cctype>

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

// What a browser passes to JSON.parse: everything up to the first end tag.
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

}  // namespace
}  // namespace leeway
