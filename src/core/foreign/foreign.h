// Foreign presets: other code bases' losses under their own names, with their keys and defaults.
//
// Each family is one file that turns the code base's keys into a point of the algebra. They are
// lenient where the source is: what has no effect is listed, not refused.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "leeway/loss.h"
#include "leeway/presets.h"

namespace leeway {

// Settings as a foreign builder reads them: by key, with the source's default. Records what was
// read, so that the rest can be listed as inert.
class ForeignSettings {
 public:
  explicit ForeignSettings(const Settings& settings) : settings_(settings) {}

  double number(const std::string& key, double fallback);
  // null, "off" or absent: none.
  std::optional<double> optional_number(const std::string& key,
                                        std::optional<double> fallback = {});
  // Numbers that the source refuses below a bound, or also at it.
  double at_least(const std::string& key, double fallback, double bound);
  double above(const std::string& key, double fallback, double bound);
  std::optional<double> optional_above(const std::string& key, double bound,
                                       std::optional<double> fallback = {});
  std::string text(const std::string& key, const std::string& fallback);
  // The one of two spellings that is given: the source's own, or the short one of the goldens.
  std::string spelled(const std::string& source, const std::string& golden) const;
  std::string one_of(const std::string& key, const std::string& fallback,
                     const std::vector<std::string>& choices);
  bool flag(const std::string& key, bool fallback);

  // Moves the keys that were read, and those that were not, into the spec.
  void finish(LossSpec& spec) const;
  [[noreturn]] void refuse(const std::string& key, const std::string& problem) const;

 private:
  const Setting* find(const std::string& key);
  void note(const std::string& key, const std::string& value);

  const Settings& settings_;
  std::set<std::string> read_;
  std::vector<std::pair<std::string, std::string>> effective_;
};

std::vector<ForeignPreset> foreign_presets();
LossSpec make_foreign_spec(std::string_view preset, const Settings& settings);

// One per code base; `loss` is the part of the name after the slash. Empty if unknown.
std::optional<LossSpec> prime_spec(std::string_view loss, ForeignSettings& settings);
std::optional<LossSpec> slime_spec(std::string_view loss, ForeignSettings& settings);
std::optional<LossSpec> cookbook_spec(std::string_view loss, ForeignSettings& settings);
std::optional<LossSpec> cookbook_pr169_spec(std::string_view loss, ForeignSettings& settings);
std::optional<LossSpec> verl_spec(std::string_view loss, ForeignSettings& settings);
std::optional<LossSpec> areal_spec(std::string_view loss, ForeignSettings& settings);
std::optional<LossSpec> liger_spec(std::string_view loss, ForeignSettings& settings);
std::optional<LossSpec> tinker_spec(std::string_view loss, ForeignSettings& settings);

// A metric under its source's name: one number, or a list with one value per sequence.
struct ForeignMetric {
  std::string name;
  bool list = false;
  std::vector<double> values;
};

// The metrics of the spec's code base, from a traced reference result.
std::vector<ForeignMetric> foreign_metrics(const LossSpec& spec, const BatchView<double>& batch,
                                           const LossResult& result);

// verl's comparison of trainer and rollout, which is not part of a loss.
std::vector<ForeignMetric> verl_offpolicy_metrics(const BatchView<double>& batch);

// Shared shapes.
inline constexpr Pair kPiRollout{Stream::pi, Stream::rollout};
inline constexpr Pair kPiProx{Stream::pi, Stream::prox};
inline constexpr Pair kProxRollout{Stream::prox, Stream::rollout};
inline constexpr Pair kRefPi{Stream::ref, Stream::pi};

}  // namespace leeway
