#include "report/jsonl_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr double kNoValue = std::numeric_limits<double>::quiet_NaN();

struct Row {
  double step = 0.0;
  std::vector<std::pair<std::string, double>> values;
};

// Collects rows. Each bucket of `stride_` rows becomes one row of the table: its first one, with
// values it lacks filled in from the others.
class TableBuilder {
 public:
  void add(Row row) {
    if (!table_.step.empty() && row.step <= last_step_) cut_from(row.step);
    last_step_ = row.step;
    ++rows_;
    if (bucket_ == 0) {
      if (table_.step.size() >= kMostTableRows) halve();
      table_.step.push_back(row.step);
      for (auto& [name, values] : table_.columns) values.push_back(kNoValue);
    }
    bucket_ = (bucket_ + 1) % stride_;
    fill(row);
    last_ = std::move(row);
  }

  JsonlTable take(const std::string& path, ReportNotes& notes) {
    // The end of a run is what readers look at first, so the last row is kept as it was written.
    if (last_ && table_.step.back() != last_->step) {
      table_.step.push_back(last_->step);
      for (auto& [name, values] : table_.columns) values.push_back(kNoValue);
      fill(*last_);
    }
    if (stride_ > 1) {
      notes.push_back(
          fmt::format("{}: has {} rows; about every {}th is shown", path, rows_, stride_));
    }
    if (left_out_ > 0) {
      notes.push_back(
          fmt::format("{}: has more than {} metric names; {} values of others are "
                      "left out",
                      path, kMostTableColumns, left_out_));
    }
    return std::move(table_);
  }

 private:
  void fill(const Row& row) {
    for (const auto& [name, value] : row.values) {
      auto column = table_.columns.find(name);
      if (column == table_.columns.end()) {
        if (table_.columns.size() >= kMostTableColumns) {
          ++left_out_;
          continue;
        }
        column =
            table_.columns.emplace(name, std::vector<double>(table_.step.size(), kNoValue)).first;
      }
      if (std::isnan(column->second.back())) column->second.back() = value;
    }
  }

  void halve() {
    const size_t rows = table_.step.size();
    const auto thin = [&](std::vector<double>& values, bool merge) {
      for (size_t i = 0; i < rows; i += 2) {
        const bool other = merge && std::isnan(values[i]) && i + 1 < rows;
        values[i / 2] = values[other ? i + 1 : i];
      }
      values.resize((rows + 1) / 2);
    };
    for (auto& [name, values] : table_.columns) thin(values, true);
    thin(table_.step, false);
    stride_ *= 2;
  }

  void cut_from(double first_step) {
    const auto end = std::lower_bound(table_.step.begin(), table_.step.end(), first_step);
    table_.step.erase(end, table_.step.end());
    for (auto& [name, values] : table_.columns) values.resize(table_.step.size());
    bucket_ = 0;
  }

  JsonlTable table_;
  std::optional<Row> last_;
  double last_step_ = 0.0;
  size_t stride_ = 1, bucket_ = 0, rows_ = 0, left_out_ = 0;
};

Row row_of(const std::string& place, const rapidjson::Document& json) {
  Row row;
  row.step = step_of(place, json);
  for (const auto& member : json.GetObject()) {
    std::string name(member.name.GetString(), member.name.GetStringLength());
    if (name == "step") continue;
    if (!member.value.IsNumber() && !member.value.IsNull()) {
      throw Error(fmt::format("{}: \"{}\" must be a number or null", place, name));
    }
    row.values.emplace_back(std::move(name),
                            member.value.IsNull() ? kNoValue : member.value.GetDouble());
  }
  return row;
}

struct Damage {
  size_t lines = 0;
  std::string first;
};

// Returns whether any object was used, and records what was damaged.
bool read_objects(const std::string& path,
                  const std::function<bool(const std::string&, rapidjson::Document&)>& use,
                  Damage& damage) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(fmt::format("{}: cannot open", path));
  std::string line;
  bool any = false;
  for (size_t number = 1; std::getline(file, line); ++number) {
    const bool is_cut_off = file.eof();
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string place = fmt::format("{} line {}", path, number);
    rapidjson::Document document;
    try {
      document = parse_json("", line);
      if (!document.IsObject()) throw Error(": is not a JSON object.");
    } catch (const Error& error) {
      if (is_cut_off && line.starts_with('{')) break;
      // The parser sees a single line, so it calls every line the first.
      std::string_view what = error.what();
      constexpr std::string_view kFirstLine = " line 1";
      if (what.starts_with(kFirstLine)) what.remove_prefix(kFirstLine.size());
      if (damage.lines++ == 0) {
        damage.first = fmt::format("{}{} Every line must be one whole JSON object.", place, what);
      }
      continue;
    }
    try {
      const bool more = use(place, document);
      any = true;
      if (!more) break;
    } catch (const Error& error) {
      if (damage.lines++ == 0) damage.first = error.what();
    }
  }
  if (file.bad()) throw Error(fmt::format("{}: cannot read", path));
  return any;
}

void note_damage(const Damage& damage, ReportNotes& notes) {
  if (damage.lines == 0) return;
  notes.push_back(damage.lines == 1 ? fmt::format("a damaged line is left out: {}", damage.first)
                                    : fmt::format("{} damaged lines are left out; the first: {}",
                                                  damage.lines, damage.first));
}

}  // namespace

bool for_each_object(const std::string& path,
                     const std::function<bool(const std::string&, rapidjson::Document&)>& use,
                     ReportNotes& notes) {
  Damage damage;
  const bool any = read_objects(path, use, damage);
  note_damage(damage, notes);
  return any;
}

double step_of(const std::string& place, const rapidjson::Value& row) {
  const auto step = row.FindMember("step");
  if (step == row.MemberEnd() || !step->value.IsNumber() || !(step->value.GetDouble() >= 0)) {
    throw Error(fmt::format("{}: \"step\" is missing or not a number >= 0", place));
  }
  return step->value.GetDouble();
}

JsonlTable read_table(const std::string& path, ReportNotes& notes) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return {};
  TableBuilder builder;
  Damage damage;
  const bool any = read_objects(
      path,
      [&](const std::string& place, rapidjson::Document& json) {
        builder.add(row_of(place, json));
        return true;
      },
      damage);
  if (!any && damage.lines > 0) throw Error(damage.first);
  note_damage(damage, notes);
  return builder.take(path, notes);
}

}  // namespace leeway
