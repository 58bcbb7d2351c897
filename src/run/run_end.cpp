#include "run/run_end.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>

#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr const char* kEndFile = "/end.json";

// The counts shown in the final summary.
struct Count {
  const char* key;
  int64_t ScheduleTotals::*value;
};
constexpr std::array<Count, 8> kCounts = {{{"admitted", &ScheduleTotals::admitted},
                                           {"completed", &ScheduleTotals::completed},
                                           {"failed", &ScheduleTotals::failed},
                                           {"cancelled", &ScheduleTotals::cancelled},
                                           {"batched", &ScheduleTotals::batched},
                                           {"filtered", &ScheduleTotals::filtered},
                                           {"stale", &ScheduleTotals::stale},
                                           {"dropped", &ScheduleTotals::dropped}}};

}  // namespace

void write_run_end(const std::string& run_folder, const RunEnd& end) {
  JsonWriter json;
  json.begin_object().key("format").value(1.0).key("end").value(end.end);
  json.key("reason").value(end.reason);
  json.key("steps").value(static_cast<double>(end.steps));
  json.key("max_steps").value(static_cast<double>(end.max_steps));
  json.key("sft_steps").value(static_cast<double>(end.sft_steps));
  json.key("sft_seconds").value(end.sft_seconds).key("loss").value(end.loss);
  json.key("rollouts").begin_object();
  for (const Count& count : kCounts) {
    json.key(count.key).value(static_cast<double>(end.totals.*count.value));
  }
  write_file_atomically(run_folder + kEndFile, json.end_object().end_object().text() + "\n");
}

std::optional<RunEnd> read_run_end(const std::string& run_folder) {
  const std::string name = run_folder + kEndFile;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(name, ignored)) return std::nullopt;
  try {
    const rapidjson::Document json = parse_json(name, read_file(name));
    const auto number = [](const rapidjson::Value& object, const char* key) {
      const bool there = object.IsObject() && object.HasMember(key) && object[key].IsNumber() &&
                         std::abs(object[key].GetDouble()) <= 0x1p53;
      return there ? object[key].GetDouble() : -1.0;
    };
    const auto text = [&](const char* key) {
      return json.HasMember(key) && json[key].IsString() ? json[key].GetString() : "";
    };
    if (!json.IsObject() || number(json, "steps") < 0 || number(json, "max_steps") < 0) {
      return std::nullopt;
    }
    RunEnd end{.end = text("end"), .reason = text("reason")};
    end.steps = static_cast<int64_t>(number(json, "steps"));
    end.max_steps = static_cast<int64_t>(number(json, "max_steps"));
    end.sft_steps = static_cast<int64_t>(std::max(0.0, number(json, "sft_steps")));
    end.sft_seconds = std::max(0.0, number(json, "sft_seconds"));
    end.loss = number(json, "loss");
    if (json.HasMember("rollouts")) {
      for (const Count& count : kCounts) {
        const double value = number(json["rollouts"], count.key);
        end.totals.*count.value = static_cast<int64_t>(std::max(0.0, value));
      }
    }
    return end;
  } catch (const Error&) {
    return std::nullopt;
  }
}

void remove_run_end(const std::string& run_folder) {
  std::error_code error;
  std::filesystem::remove(run_folder + kEndFile, error);
  if (error) throw Error(run_folder + kEndFile + ": cannot remove: " + error.message());
}

std::string run_end_line(const RunEnd& end) {
  const char* how = end.end == "gave_up"   ? "gave up"
                    : end.end == "stopped" ? "was stopped"
                                           : "finished";
  return fmt::format("the run {} after {} {}{}{}", how, end.steps,
                     end.steps == 1 ? "step" : "steps", end.reason.empty() ? "" : ": ", end.reason);
}

}  // namespace leeway
