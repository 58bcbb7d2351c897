#include "core/foreign/foreign.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/spec_text.h"
#include "leeway/error.h"

namespace leeway {

const Setting* ForeignSettings::find(const std::string& key) {
  read_.insert(key);
  const Setting* found = nullptr;
  for (const Setting& setting : settings_) {
    if (setting.key == key && !std::holds_alternative<std::monostate>(setting.value)) {
      found = &setting;
    }
  }
  return found;
}

void ForeignSettings::note(const std::string& key, const std::string& value) {
  for (auto& entry : effective_) {
    if (entry.first == key) return;
  }
  effective_.emplace_back(key, value);
}

void ForeignSettings::refuse(const std::string& key, const std::string& problem) const {
  for (const Setting& setting : settings_) {
    if (setting.key == key) {
      throw Error(
          fmt::format("{}{} = {}: {}", setting.where, key, value_text(setting.value), problem));
    }
  }
  throw Error(fmt::format("{}: {}", key, problem));
}

std::optional<double> ForeignSettings::optional_number(const std::string& key,
                                                       std::optional<double> fallback) {
  const Setting* setting = find(key);
  std::optional<double> value = fallback;
  if (setting != nullptr) {
    if (const auto* number = std::get_if<double>(&setting->value)) {
      value = *number;
    } else if (const auto* text = std::get_if<std::string>(&setting->value);
               text != nullptr && *text == "off") {
      value.reset();
    } else {
      refuse(key, "must be a number");
    }
  }
  note(key, value ? number_text(*value) : "off");
  return value;
}

double ForeignSettings::number(const std::string& key, double fallback) {
  const auto value = optional_number(key, fallback);
  if (!value) refuse(key, "must be a number");
  return *value;
}

double ForeignSettings::at_least(const std::string& key, double fallback, double bound) {
  const double value = number(key, fallback);
  if (!(value >= bound)) {
    refuse(key, fmt::format("must be at least {}, as in its source", number_text(bound)));
  }
  return value;
}

double ForeignSettings::above(const std::string& key, double fallback, double bound) {
  const double value = number(key, fallback);
  optional_above(key, bound, fallback);
  return value;
}

std::optional<double> ForeignSettings::optional_above(const std::string& key, double bound,
                                                      std::optional<double> fallback) {
  const auto value = optional_number(key, fallback);
  if (value && !(*value > bound)) {
    refuse(key, fmt::format("must be above {}, as in its source", number_text(bound)));
  }
  return value;
}

std::string ForeignSettings::text(const std::string& key, const std::string& fallback) {
  const Setting* setting = find(key);
  std::string value = fallback;
  if (setting != nullptr) {
    if (const auto* text = std::get_if<std::string>(&setting->value)) {
      value = *text;
    } else if (const auto* number = std::get_if<double>(&setting->value)) {
      value = fmt::format("{}", *number);
    } else {
      refuse(key, "must be text");
    }
  }
  note(key, value);
  return value;
}

std::string ForeignSettings::spelled(const std::string& source, const std::string& golden) const {
  const auto given = [&](const std::string& key) {
    return std::any_of(settings_.begin(), settings_.end(),
                       [&](const Setting& setting) { return setting.key == key; });
  };
  if (given(source) && given(golden)) {
    refuse(source, fmt::format("is {} by another name; give one of them", golden));
  }
  return given(source) ? source : golden;
}

std::string ForeignSettings::one_of(const std::string& key, const std::string& fallback,
                                    const std::vector<std::string>& choices) {
  std::string value = text(key, fallback);
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    refuse(key, fmt::format("must be one of {}", fmt::join(choices, ", ")));
  }
  return value;
}

bool ForeignSettings::flag(const std::string& key, bool fallback) {
  const Setting* setting = find(key);
  bool value = fallback;
  if (setting != nullptr) {
    const auto* flag = std::get_if<bool>(&setting->value);
    if (flag == nullptr) refuse(key, "must be true or false");
    value = *flag;
  }
  note(key, value ? "true" : "false");
  return value;
}

void ForeignSettings::finish(LossSpec& spec) const {
  spec.settings = effective_;
  std::set<std::string> known = read_;
  known.insert("preset");
  known.insert(spec.inert.begin(), spec.inert.end());
  for (const Setting& setting : settings_) {
    if (known.insert(setting.key).second) spec.inert.push_back(setting.key);
  }
}

namespace {

// Sources accept a band whose lower end is above its upper end; a warning says what it does.
void warn_of_empty_bands(LossSpec& spec) {
  const auto warn = [&](const Bounds& band, const std::string& what, const std::string& effect) {
    if (!(band.low > band.high)) return;
    spec.warnings.push_back(fmt::format("{} from {} to {}: its low end lies above its high end, {}",
                                        what, number_text(band.low), number_text(band.high),
                                        effect));
  };
  for (const Gate& gate : spec.gates) {
    warn(gate.keep, "the band of tokens that are kept goes", "so that every token is dropped");
  }
  for (const Correction& correction : spec.corrections) {
    if (!correction.weight) continue;
    warn(correction.weight->keep, "the band of weights that are kept goes",
         "so that every weight is 0");
    warn(correction.weight->clamp, "weights are clamped to the band",
         fmt::format("so that every weight is {}", number_text(correction.weight->clamp.high)));
  }
  warn(spec.surrogate.clip, "ratios are clipped to the band",
       fmt::format("so that every clipped ratio is {}", number_text(spec.surrogate.clip.high)));
}

}  // namespace

std::vector<ForeignPreset> foreign_presets() {
  return {
      {"prime/default_dppo_kl", "prime-rl main, DPPO-Binary-TV and Kimi KL"},
      {"prime/ipo", "prime-rl main"},
      {"prime/PR2401_icepop", "prime-rl PR 2401"},
      {"prime/PR2401_icepop_tight", "prime-rl PR 2401, band 0.5 to 2"},
      {"prime/PR2401_first_rollout_min", "prime-rl PR 2401, first commit"},
      {"prime/PR2423_ipo_kl_kept", "prime-rl PR 2423"},
      {"prime/PR2423_ipo_kl_kept_tight", "prime-rl PR 2423, band 0.5 to 2"},
      {"prime/PR2434_dppo_tv_sym", "prime-rl PR 2434"},
      {"prime/PR2434_teacher", "prime-rl PR 2434 with a teacher"},
      {"prime/ref_kl", "prime-rl main, on-policy distillation"},
      {"prime/ce", "prime-rl main, cross entropy"},
      {"slime/ppo", "slime"},
      {"slime/ppo_dual", "slime with eps_clip_c"},
      {"slime/gspo", "slime"},
      {"slime/cispo", "slime"},
      {"slime/cispo_canonical", "slime with a one-sided band"},
      {"slime/ppo+vanilla_tis", "slime"},
      {"slime/ppo+icepop", "slime"},
      {"slime/ppo+off_policy_is_PR2084", "slime PR 2084"},
      {"slime/reinforce+off_policy_is_PR2084", "slime PR 2084, CISPO as a correction"},
      {"slime/reinforce+off_policy_is_eps_from_1", "slime PR 2084, bounds as distances from one"},
      {"slime/ppo+mis", "slime's train/inference mismatch helper"},
      {"cookbook/grpo", "Fireworks cookbook"},
      {"cookbook/dapo", "Fireworks cookbook"},
      {"cookbook/gspo", "Fireworks cookbook"},
      {"cookbook/cispo", "Fireworks cookbook"},
      {"cookbook/dro", "Fireworks cookbook"},
      {"cookbook/is", "Fireworks cookbook"},
      {"cookbook/reinforce", "Fireworks cookbook"},
      {"cookbook/igpo", "Fireworks cookbook"},
      {"cookbook_PR169/grpo", "Fireworks cookbook PR 169"},
      {"cookbook_PR169/dapo", "Fireworks cookbook PR 169"},
      {"cookbook_PR169/gspo", "Fireworks cookbook PR 169"},
      {"cookbook_PR169/cispo", "Fireworks cookbook PR 169, mask form"},
      {"verl/vanilla", "verl"},
      {"verl/dppo_tv", "verl"},
      {"verl/dppo_kl", "verl, binary KL"},
      {"verl/gspo", "verl"},
      {"verl/sapo", "verl"},
      {"verl/gpg", "verl"},
      {"verl/geo_mean", "verl, GMPO"},
      {"verl/dro", "verl"},
      {"verl/cispo", "verl"},
      {"verl/kl_cov", "verl"},
      {"verl/vanilla+IS", "verl rollout correction, importance weights"},
      {"verl/vanilla+RS", "verl rollout correction, rejection"},
      {"areal/ppo", "AReaL"},
      {"areal/ppo_cclip", "AReaL with c_clip"},
      {"areal/gspo", "AReaL, sequence level"},
      {"areal/ppo+RS", "AReaL rejection sampling"},
      {"areal/cispo", "AReaL"},
      {"areal/cispo+RS_clamp", "AReaL"},
      {"areal/sapo", "AReaL"},
      {"areal/m2po+ppo", "AReaL"},
      {"liger/grpo", "Liger, TRL"},
      {"liger/bnpo", "Liger, TRL"},
      {"liger/dr_grpo", "Liger, TRL"},
      {"liger/dapo", "Liger, TRL"},
      {"liger/cispo", "Liger, TRL"},
      {"liger/sapo", "Liger, TRL"},
      {"liger/luspo", "Liger, TRL"},
      {"liger/vespo", "Liger, TRL"},
      {"tinker/importance_sampling", "Tinker documentation"},
      {"tinker/ppo", "Tinker documentation"},
      {"tinker/cispo", "Tinker documentation"},
      {"tinker/dro", "Tinker documentation"},
  };
}

LossSpec make_foreign_spec(std::string_view preset, const Settings& settings) {
  const size_t slash = preset.find('/');
  const std::string_view family = preset.substr(0, slash), loss = preset.substr(slash + 1);
  using Builder = std::optional<LossSpec> (*)(std::string_view, ForeignSettings&);
  static constexpr std::pair<std::string_view, Builder> kFamilies[] = {
      {"prime", prime_spec},       {"slime", slime_spec},
      {"cookbook", cookbook_spec}, {"cookbook_PR169", cookbook_pr169_spec},
      {"verl", verl_spec},         {"areal", areal_spec},
      {"liger", liger_spec},       {"tinker", tinker_spec},
  };
  for (const auto& [name, build] : kFamilies) {
    if (name != family) continue;
    ForeignSettings reader(settings);
    std::optional<LossSpec> spec = build(loss, reader);
    if (!spec) break;
    spec->preset = std::string(preset);
    reader.finish(*spec);
    warn_of_empty_bands(*spec);
    return *spec;
  }
  std::vector<std::string> names;
  for (const ForeignPreset& known : foreign_presets()) names.push_back(known.name);
  const std::string near = nearest_name(preset, names);
  throw Error(fmt::format("preset \"{}\": not known; {}", preset,
                          near.empty() ? "see `leeway loss list`" : "did you mean " + near + "?"));
}

}  // namespace leeway
