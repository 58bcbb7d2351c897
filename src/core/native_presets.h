// The tables of native presets and corrections.
#pragma once

#include <deque>
#include <map>

#include "leeway/presets.h"

namespace leeway {

std::deque<PresetInfo> native_presets();
std::deque<CorrectionInfo> native_corrections();

// Applies adv_tau, teacher_tau, reduction, fixed_length and denominator, and refuses what would be
// inert or contradictory in the finished spec.
void apply_common_keys(const KeyValues& values, LossSpec& spec);

// Keys of other code bases and earlier versions, each with a sentence on what replaced it.
const std::map<std::string, std::string, std::less<>>& renamed_keys();

}  // namespace leeway
