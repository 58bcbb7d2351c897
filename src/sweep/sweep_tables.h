// What a sweep's runs say together: tables for people, JSON for scripts.
#pragma once

#include <optional>
#include <string>

#include "sweep/sweep.h"

namespace leeway {

// All of these read the finished runs' files. Throws Error where one is not as `leeway train`
// writes it.
//
// Mean, deviation and largest numbers of each row over its finished seeds; as text, or as Markdown.
std::string sweep_tables(const SweepPlan& plan, const SweepResult& result, bool markdown);
// The same and the numbers of each run. `report`: the page of write_sweep_report.
std::string sweep_json(const SweepPlan& plan, const SweepResult& result,
                       const std::optional<std::string>& report);

// The plan's runs with their settings, as text or JSON; reads nothing.
std::string sweep_plan_text(const SweepPlan& plan, bool json);

}  // namespace leeway
