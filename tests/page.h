// A documentation page as the tests read it: what it refers to, and the commands it shows.
#pragma once

#include <cctype>
#include <filesystem>
#include <regex>
#include <set>

#include "cli_helpers.h"

namespace leeway {

namespace fs = std::filesystem;

inline const fs::path kRoot = LEEWAY_SOURCE_DIR;

struct Span {
  size_t line;
  std::string text;
};

// The parts of a page that can be checked.
struct Page {
  std::vector<Span> code;       // `in backticks`, outside fences
  std::vector<Span> links;      // targets of [text](target), outside fences
  std::vector<Span> shell;      // lines of sh fences, continued ones joined
  std::set<std::string> slugs;  // anchors of its headings, as GitHub makes them
};

inline std::string slug_of(const std::string& heading) {
  std::string slug;
  for (const char c : heading) {
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-') {
      slug += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (c == ' ') {
      slug += '-';
    }
  }
  return slug;
}

inline Page parse_page(const std::string& text) {
  static const std::regex kCode("`([^`]+)`"), kLink(R"(\]\(([^)\s]+)\))");
  Page page;
  std::string fence;  // the language, while inside one
  bool inside = false, continued = false;
  const std::vector<std::string> lines = lines_of(text);
  for (size_t i = 0; i < lines.size(); ++i) {
    std::string line = lines[i];
    const size_t indent = line.find_first_not_of(' ');
    if (indent != std::string::npos && line.compare(indent, 3, "```") == 0) {
      inside = !inside;
      fence = line.substr(indent + 3);
      continued = false;
      continue;
    }
    if (inside) {
      if (fence != "sh") continue;
      if (indent != std::string::npos && !continued) line.erase(0, indent);
      const bool goes_on = line.ends_with("\\");
      if (goes_on) line.pop_back();
      if (continued) {
        page.shell.back().text += line;
      } else {
        page.shell.push_back({i + 1, line});
      }
      continued = goes_on;
      continue;
    }
    if (line.starts_with("#")) {
      page.slugs.insert(slug_of(line.substr(std::min(line.find_first_not_of("# "), line.size()))));
    }
    for (std::sregex_iterator it(line.begin(), line.end(), kCode), end; it != end; ++it) {
      page.code.push_back({i + 1, (*it)[1]});
    }
    for (std::sregex_iterator it(line.begin(), line.end(), kLink), end; it != end; ++it) {
      page.links.push_back({i + 1, (*it)[1]});
    }
  }
  return page;
}

// F.json, YOURS.toml, PRESET, "..": placeholders for the reader to fill in.
inline bool is_placeholder(const std::string& word) {
  static const std::regex kCapitals(R"([A-Z][A-Z0-9_]*(\.[a-z]+)?)");
  return word == ".." || word == "..." || word.find_first_of("<>[]") != std::string::npos ||
         std::regex_match(word, kCapitals);
}

inline bool has_placeholder(const std::string& command) {
  static const std::regex kSeparators(R"([\s=,:/]+)");
  const std::string words = command.substr(0, command.find(" #"));
  for (std::sregex_token_iterator it(words.begin(), words.end(), kSeparators, -1), end; it != end;
       ++it) {
    if (is_placeholder(*it)) return true;
  }
  return false;
}

struct Command {
  size_t line;
  std::string text;
  int exit_code;
};

// Pages that are followed from top to bottom, in a folder of their own: transcripts_test.
inline const std::set<std::string> kTranscripts = {"tutorial.md", "your-model.md", "corrections.md",
                                                   "migration.md", "text.md"};

// Lines that run the program and can be run as written.
inline std::vector<Command> commands_of(const Page& page) {
  static const std::regex kExit(R"(#\s*exit (\d+)\s*$)");
  std::vector<Command> commands;
  for (const Span& span : page.shell) {
    std::string text = span.text;
    if (text.starts_with("$ ")) text.erase(0, 2);
    if (!text.starts_with("leeway ") && !text.starts_with("build/leeway ")) continue;
    if (has_placeholder(text)) continue;
    std::smatch match;
    const bool says = std::regex_search(text, match, kExit);
    commands.push_back({span.line, text, says ? std::stoi(match[1]) : 0});
  }
  return commands;
}

// A copy of the tree in which commands may write; their inputs are linked or copied.
inline void fill_copy(const fs::path& copy) {
  for (const auto& entry : fs::directory_iterator(kRoot)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".") || name.starts_with("build") || name == "runs") continue;
    if (name == "docs" || name == "examples") {
      fs::copy(entry.path(), copy / name, fs::copy_options::recursive);
    } else {
      fs::create_symlink(entry.path(), copy / name);
    }
  }
  fs::create_directory(copy / "build");
  fs::create_symlink(leeway_program(), copy / "build" / "leeway");
}

}  // namespace leeway
