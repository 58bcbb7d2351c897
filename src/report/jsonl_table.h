// The JSONL files of a run as the page needs them: rows turned into columns, no more than a chart
// can show, with damaged lines skipped and reported.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/json.h"

namespace leeway {

// Notes for the reader on what was left out of a page and why.
using ReportNotes = std::vector<std::string>;

// Calls `use` with every complete object of the file until it returns false; `place` is "FILE line
// N". A line that is not a JSON object, or for which `use` throws Error, is skipped; a note says
// how many there were and what is wrong with the first. A truncated last line is skipped silently:
// the run is still writing it. Returns whether any object was used. Throws Error if the file cannot
// be read.
bool for_each_object(const std::string& path,
                     const std::function<bool(const std::string& place, rapidjson::Document&)>& use,
                     ReportNotes& notes);

// The step of a row. Throws Error naming `place` if it has none.
double step_of(const std::string& place, const rapidjson::Value& row);

// The rows of one file. Memory is bounded for a run of any length: beyond kMostTableRows rows only
// every second, fourth, .. is kept, plus values that occur only in rows between them, and always
// the last row. Beyond kMostTableColumns names only the first ones are kept.
inline constexpr size_t kMostTableRows = 4000;
inline constexpr size_t kMostTableColumns = 2000;
struct JsonlTable {
  std::vector<double> step;
  std::map<std::string, std::vector<double>> columns;  // NaN where a row has no value
};

// If a step repeats, as after a resume, it replaces the rows from that step on. A missing file
// gives an empty table. Throws Error with file and line if there are lines but none is a valid row.
JsonlTable read_table(const std::string& path, ReportNotes& notes);

}  // namespace leeway
