// Timing and reporting for a benchmark program whose contenders take turns in one process.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {

inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();  // printed as "-"

// Tables, printed as they are filled and kept for the JSON file.
class Report {
 public:
  using Cell = std::variant<std::string, double>;
  struct Column {
    const char* key;
    const char* title;
    int width;
    int digits = 0;  // of numbers
  };

  void begin(const char* key, const std::string& title, std::vector<Column> columns) {
    std::printf("\n%s\n ", title.c_str());
    for (const Column& c : columns) std::printf(" %*s", c.width, c.title);
    std::printf("\n");
    tables_.push_back({key, std::move(columns), {}});
  }

  void add(std::vector<Cell> row) {
    Table& table = tables_.back();
    LEEWAY_CHECK(row.size() == table.columns.size(), table.key);
    std::printf(" ");
    for (size_t i = 0; i < row.size(); ++i) {
      const Column& column = table.columns[i];
      if (const auto* word = std::get_if<std::string>(&row[i])) {
        std::printf(" %*s", column.width, word->c_str());
      } else if (std::isnan(std::get<double>(row[i]))) {
        std::printf(" %*s", std::abs(column.width), "-");
      } else {
        std::printf(" %*.*f", column.width, column.digits, std::get<double>(row[i]));
      }
    }
    std::printf("\n");
    std::fflush(stdout);
    table.rows.push_back(std::move(row));
  }

  std::string json(int threads, int repeats) const {
    JsonWriter json;
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    json.begin_object().key("context").begin_object();
    json.key("date").value(date);
    json.key("threads").value(double(threads)).key("repeats").value(double(repeats));
    json.end_object();
    for (const Table& table : tables_) {
      json.key(table.key).begin_array();
      for (const auto& row : table.rows) {
        json.begin_object();
        for (size_t i = 0; i < row.size(); ++i) {
          json.key(table.columns[i].key);
          std::visit([&](const auto& cell) { json.value(cell); }, row[i]);
        }
        json.end_object();
      }
      json.end_array();
    }
    return json.end_object().text() + "\n";
  }

 private:
  struct Table {
    const char* key;
    std::vector<Column> columns;
    std::vector<std::vector<Cell>> rows;
  };
  std::vector<Table> tables_;
};

inline double seconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Contender {
  std::string name;
  std::function<void()> run;
  double seconds = kNone;  // median, once measured
};

// One warm-up run each, then rounds in which every contender runs once, after a pause: threads of
// the previous one (a BLAS keeps its threads spinning for a while) must not run alongside.
inline void measure(std::vector<Contender>& contenders, int repeats) {
  std::vector<std::vector<double>> times(contenders.size());
  for (Contender& contender : contenders) contender.run();
  for (int round = 0; round < repeats; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      times[i].push_back(seconds_of(contenders[i].run));
    }
  }
  for (size_t i = 0; i < contenders.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    const size_t half = times[i].size() / 2;
    contenders[i].seconds =
        0.5 * (times[i][half] + times[i][times[i].size() % 2 == 1 ? half : half - 1]);
  }
}

// The fastest of several ways to do the same. Short runs are done twice, and the faster one counts.
inline Contender best_of(const std::vector<Contender>& ways) {
  const Contender* best = nullptr;
  double best_seconds = std::numeric_limits<double>::infinity();
  for (const Contender& way : ways) {
    double seconds = seconds_of(way.run);
    if (seconds < 0.5) seconds = std::min(seconds, seconds_of(way.run));
    if (seconds < best_seconds) best = &way, best_seconds = seconds;
  }
  return *best;
}

}  // namespace leeway
