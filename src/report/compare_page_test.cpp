#include "report/compare_page.h"

#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <string_view>

#include "base/json.h"
#include "report/embedded_files.h"

namespace leeway {
namespace {

constexpr std::string_view kDataOpen = R"(<script type="application/json" id="compare-data">)";

size_t count_of(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::string without_spaces(std::string text) {
  std::erase_if(text, [](unsigned char c) { return std::isspace(c) != 0; });
  return text;
}

// What a browser passes to JSON.parse: everything up to the first end tag.
std::string data_of(const std::string& page) {
  const size_t open = page.find(kDataOpen);
  if (open == std::string::npos) return "no data element";
  const size_t begin = open + kDataOpen.size();
  return page.substr(begin, lower(page).find("</script", begin) - begin);
}

std::string comparison(std::string_view preset, std::string_view unavailable = "") {
  JsonWriter writer;
  writer.begin_object().key("batch").value("batch.json").key("tokens").value(700000.0);
  writer.key("presets").begin_array().begin_object();
  writer.key("preset").value(preset).key("unavailable").value(unavailable);
  writer.key("kept_share").value(0.984375).end_object().end_array().end_object();
  return writer.text();
}

TEST(ComparePage, HoldsTheDataAndChartJs) {
  const std::string json = comparison("icepop");
  const std::string page = compare_page(json);
  EXPECT_EQ(page.find("<!DOCTYPE html>"), 0u);
  EXPECT_EQ(data_of(page), json);
  EXPECT_NE(page.find("0.984375"), std::string::npos);
  EXPECT_NE(page.find("Chart.js v"), std::string::npos);
  EXPECT_NE(page.find("Released under the MIT License"), std::string::npos);
  EXPECT_NE(page.find(chart_js()), std::string::npos);
  EXPECT_EQ(count_of(page, "</html>"), 1u);
}

TEST(ComparePage, LeavesNoPlaceholder) {
  const std::string page = compare_page(comparison("icepop"));
  EXPECT_EQ(page.find("@leeway_"), std::string::npos);
}

TEST(ComparePage, DoesNotReplaceMarksInTheData) {
  const std::string json = comparison("@leeway_chart_js@ @leeway_compare_json@");
  const std::string page = compare_page(json);
  EXPECT_EQ(data_of(page), json);
  EXPECT_EQ(count_of(page, chart_js()), 1u);
}

TEST(ComparePage, LoadsNothing) {
  const std::string shell = without_spaces(lower(compare_page_template()));
  for (const char* reference : {"src=\"", "src='", ".src=", "href=\"", "href='",
                                ".href=", "action=", "http:", "https:", "url(", "@import", "fetch(",
                                "xmlhttprequest", "<link", "<base", "<iframe", "<object"}) {
    EXPECT_EQ(shell.find(reference), std::string::npos) << reference;
  }
  // Chart.js mentions its home page in a comment, but no attribute of the page refers to another
  // file.
  const std::string page = without_spaces(lower(compare_page(comparison("icepop"))));
  for (const char* reference : {"src=\"http", "src='http", "src=http", "src=\"//", "href=\"http",
                                "href='http", "href=http", "href=\"//"}) {
    EXPECT_EQ(page.find(reference), std::string::npos) << reference;
  }
  // The content security policy tells the browser the same.
  EXPECT_NE(page.find("content-security-policy"), std::string::npos);
  EXPECT_NE(page.find("default-src'none'"), std::string::npos);
}

TEST(ComparePage, KeepsHostileStringsInside) {
  const size_t end_tags = count_of(lower(compare_page(comparison("icepop"))), "</script");
  for (const std::string_view hostile :
       {"</script><script>alert(1)</script>", "</SCRIPT ><b>bold</b>", "<!--<script>", "-->", "]]>",
        "\"'`", "\\", "\\u003c", "<b>bold</b>", "<img src=x onerror=alert(1)>", "$& $1 \n\t"}) {
    const std::string page = compare_page(comparison(hostile, hostile));
    EXPECT_EQ(count_of(lower(page), "</script"), end_tags) << hostile;
    const std::string data = data_of(page);
    EXPECT_EQ(data.find('<'), std::string::npos) << hostile;
    const rapidjson::Document document = parse_json("page", data);
    const auto& preset = document["presets"][0];
    EXPECT_EQ(std::string_view(preset["preset"].GetString()), hostile);
    EXPECT_EQ(std::string_view(preset["unavailable"].GetString()), hostile);
  }
}

TEST(ComparePage, ShowsDataAsTextOnly) {
  const std::string_view shell = compare_page_template();
  for (const char* sink :
       {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("}) {
    EXPECT_EQ(shell.find(sink), std::string_view::npos) << sink;
  }
}

TEST(ComparePage, TemplateIsAscii) {
  for (const char c : compare_page_template()) ASSERT_LT(static_cast<unsigned char>(c), 0x80);
}

}  // namespace
}  // namespace leeway
