// JSONL files of a run as the page needs them: rows turned into columns, as many as a chart can
// show, and damaged lines passed over and told.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/json.h"

namespace leeway {

// What was left out of a page and why, for people.
using ReportNotes = std::vector<std::string>;

// Calls `use` with every whole object of the file until it returns false; `place` is "FILE line N".
// A line that is no JSON object, or that `use` throws Error for, is passed over; a note says how
// many there were and what the first one's fault is. A last line that is cut off is left out
// without a word: the run is still writing it. Whether any object was used. Throws Error if the
// file cannot be read.
bool for_each_object(const std::string& path,
                     const std::function<bool(const std::string& place, rapidjson::Document&)>& use,
                     ReportNotes& notes);

// Of a row; throws Error naming `place` if it has none.
double step_of(const std::string& place, const rapidjson::Value& row);

// The rows of one file. Memory is bounded whatever the length of the run: of more than
// kMostTableRows rows every second, fourth, .. is kept, with values that only rows between them
// have, and the last one always. Of more than kMostTableColumns names the first are kept.
inline constexpr size_t kMostTableRows = 4000;
inline constexpr size_t kMostTableColumns = 2000;
struct JsonlTable {
  std::vector<double> step;
  std::map<std::string, std::vector<double>> columns;  // NaN where a row has none
};

// Where a step comes again, as after a resume, it replaces the rows from that step on. A file that
// is not there gives an empty table. Throws Error with file and line if there are lines and none of
// them is a row.
JsonlTable read_table(const std::string& path, ReportNotes& notes);

}  // namespace leeway
