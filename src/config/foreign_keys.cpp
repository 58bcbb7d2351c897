#include "config/foreign_keys.h"

#include <fmt/format.h>

#include <algorithm>

namespace leeway {
namespace {

std::string_view last_part(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

// Whether `name` is `tail` or ends with a dot and `tail`.
bool ends_with_path(std::string_view name, std::string_view tail) {
  return name == tail || (name.size() > tail.size() && name.ends_with(tail) &&
                          name[name.size() - tail.size() - 1] == '.');
}

// How well a foreign key fits an unknown one. 2: its whole name with its tables is there. 1: its
// last part is, and that is more than a common word, which half of all programs use. 0: neither.
int likeness(std::string_view name, const ForeignKey& key) {
  const std::string_view whole = key.key, last = last_part(whole);
  if (whole != last && ends_with_path(name, whole)) return 2;
  const bool telling = whole == last || last.find('_') != std::string_view::npos;
  return telling && last_part(name) == last ? 1 : 0;
}

std::string joined(const std::vector<const char*>& names, const char* quote) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i) {
    out += i == 0 ? "" : i + 1 == names.size() ? " and " : ", ";
    out += fmt::format("{}{}{}", quote, names[i], quote);
  }
  return out;
}

std::string cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) {
    text.replace(at, 1, "\\|");
  }
  return text;
}

}  // namespace

std::string foreign_hint(std::string_view name) {
  int most = 0;
  for (const ForeignKey& key : foreign_keys()) most = std::max(most, likeness(name, key));
  if (most == 0) return "";
  // Code bases that agree are named together, in the words of the first.
  struct Group {
    const ForeignKey* first;
    std::vector<const char*> code_bases;
  };
  std::vector<Group> groups;
  for (const ForeignKey& key : foreign_keys()) {
    if (likeness(name, key) != most) continue;
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
      const auto text = [](const char* word) { return std::string_view(word); };
      return std::equal(key.ours.begin(), key.ours.end(), group.first->ours.begin(),
                        group.first->ours.end(),
                        [&](const char* a, const char* b) { return text(a) == text(b); });
    });
    if (same == groups.end()) {
      groups.push_back({&key, {key.code_base}});
    } else {
      same->code_bases.push_back(key.code_base);
    }
  }
  std::string out;
  for (const Group& group : groups) {
    const ForeignKey& key = *group.first;
    const std::string_view note = key.note;
    if (!out.empty()) out += "; ";
    out += fmt::format("{} is a key of {}, ", last_part(name), joined(group.code_bases, ""));
    if (key.ours.empty()) {
      out += fmt::format("without a counterpart here: {}", note);
    } else {
      out += fmt::format("here {}{}", joined(key.ours, ""),
                         note.empty() ? "" : fmt::format(" ({})", note));
    }
  }
  return out;
}

bool is_foreign_path(std::string_view name) {
  return std::any_of(foreign_keys().begin(), foreign_keys().end(),
                     [&](const ForeignKey& key) { return likeness(name, key) == 2; });
}

bool is_foreign_table(std::string_view name) {
  return std::any_of(foreign_keys().begin(), foreign_keys().end(), [&](const ForeignKey& key) {
    const std::string_view whole = key.key;
    for (size_t dot = 0; (dot = whole.find('.', dot)) != std::string_view::npos; ++dot) {
      if (ends_with_path(name, whole.substr(0, dot))) return true;
    }
    return false;
  });
}

std::string migration_markdown() {
  std::string out =
      "<!-- keys: printed by `leeway config --migration`; a test compares what is between the "
      "markers -->\n";
  std::string_view code_base;
  for (const ForeignKey& key : foreign_keys()) {
    if (key.code_base != code_base) {
      code_base = key.code_base;
      out += fmt::format("\n### Keys of {}\n\n| {} | here | notes |\n|---|---|---|\n", code_base,
                         code_base);
    }
    out += fmt::format("| `{}` | {} | {} |\n", key.key,
                       key.ours.empty() ? "none" : joined(key.ours, "`"), cell(key.note));
  }
  return out + "\n<!-- end of keys -->\n";
}

}  // namespace leeway
