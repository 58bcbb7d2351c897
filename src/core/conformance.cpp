#include "core/conformance.h"

#include <fmt/format.h>

#include <cmath>

#include "base/json.h"
#include "leeway/error.h"
#include "leeway/metrics.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

const Json* member(const Json& object, const char* key) {
  if (!object.IsObject()) return nullptr;
  const auto found = object.FindMember(key);
  return found == object.MemberEnd() || found->value.IsNull() ? nullptr : &found->value;
}

double number_of(const Json& value, const std::string& what) {
  if (value.IsNull()) return std::nan("");
  if (value.IsBool()) return value.GetBool() ? 1.0 : 0.0;
  if (!value.IsNumber()) throw Error(what + " must hold numbers");
  return value.GetDouble();
}

// A list of numbers, or of lists of them, one after the other. Goldens are at most three deep;
// a file nested much deeper is refused, so that it cannot overflow the stack.
void flatten(const Json& value, const std::string& what, std::vector<double>& out, int depth = 0) {
  if (depth > 8) throw Error(what + " is nested too deeply");
  if (!value.IsArray()) {
    out.push_back(number_of(value, what));
    return;
  }
  for (const Json& item : value.GetArray()) flatten(item, what, out, depth + 1);
}

std::vector<double> numbers_of(const Json& value, const std::string& what) {
  std::vector<double> out;
  flatten(value, what, out);
  return out;
}

struct Fixture {
  Batch batch;                           // without advantages
  std::vector<double> adv_seq, adv_tok;  // both one value per token
};

Fixture read_fixture(const Json& json) {
  Fixture fixture;
  Batch& batch = fixture.batch;
  auto stream = [&](const char* key, std::vector<double>& to, bool required) {
    const Json* found = member(json, key);
    if (found == nullptr) {
      if (required) throw Error(fmt::format("fixture has no \"{}\"", key));
      return;
    }
    if (!found->IsArray()) throw Error(fmt::format("fixture.{} must be a list of lists", key));
    size_t s = 0;
    for (const Json& list : found->GetArray()) {
      const auto values = numbers_of(list, fmt::format("fixture.{}", key));
      if (std::string_view(key) == "pi") {
        batch.offsets.push_back(batch.offsets.back() + static_cast<int64_t>(values.size()));
      } else if (s + 1 >= batch.offsets.size() ||
                 static_cast<int64_t>(values.size()) != batch.offsets[s + 1] - batch.offsets[s]) {
        throw Error(fmt::format("fixture.{}: sequence {} differs from pi in length", key, s));
      }
      to.insert(to.end(), values.begin(), values.end());
      ++s;
    }
    if (s + 1 != batch.offsets.size()) {
      throw Error(
          fmt::format("fixture.{} has {} sequences, pi has {}", key, s, batch.offsets.size() - 1));
    }
  };
  stream("pi", batch.pi, true);
  stream("rollout", batch.rollout, false);
  stream("prox", batch.prox, false);
  stream("ref", batch.ref, false);
  stream("teacher", batch.teacher, false);
  stream("adv_tok", fixture.adv_tok, false);
  std::vector<double> mask;
  stream("masks", mask, false);
  batch.mask.assign(batch.pi.size(), 1);
  for (size_t i = 0; i < mask.size(); ++i) batch.mask[i] = mask[i] != 0;
  if (const Json* adv = member(json, "adv_seq")) {
    const auto values = numbers_of(*adv, "fixture.adv_seq");
    if (values.size() + 1 != batch.offsets.size()) {
      throw Error("fixture.adv_seq: one value per sequence");
    }
    for (size_t s = 0; s < values.size(); ++s) {
      fixture.adv_seq.insert(fixture.adv_seq.end(),
                             static_cast<size_t>(batch.offsets[s + 1] - batch.offsets[s]),
                             values[s]);
    }
  }
  return fixture;
}

// Which advantage stream a case uses: what its config says, else what its family uses.
bool uses_token_advantages(const std::string& name, const Json* config) {
  if (config != nullptr) {
    if (const Json* adv = member(*config, "adv"); adv != nullptr && adv->IsString()) {
      return std::string_view(adv->GetString()).starts_with("adv_tok");
    }
  }
  if (name.ends_with("/seqA")) return false;
  if (name.ends_with("/tokA")) return true;
  return name.starts_with("verl/") || name.starts_with("areal/") || name.starts_with("tinker/") ||
         name.starts_with("slime/ppo_dual") || name.starts_with("cookbook/igpo") ||
         name.starts_with("prime/PR2434_teacher");
}

Settings settings_of(const Json* config) {
  Settings settings;
  if (config == nullptr) return settings;
  if (!config->IsObject()) throw Error("config must be an object");
  for (const auto& entry : config->GetObject()) {
    Value value;
    if (entry.value.IsBool()) {
      value = entry.value.GetBool();
    } else if (entry.value.IsNumber()) {
      value = entry.value.GetDouble();
    } else if (entry.value.IsString()) {
      value = std::string(entry.value.GetString(), entry.value.GetStringLength());
    } else if (!entry.value.IsNull()) {
      continue;  // lists describe data, not settings
    }
    settings.push_back({entry.name.GetString(), value, "config."});
  }
  return settings;
}

// The first two parts of a case's name are its preset; of a native preset's case, the first.
std::string preset_of(const Catalog& catalog, const std::string& name) {
  const size_t first = name.find('/');
  if (first == std::string::npos) return name;
  const std::string base = name.substr(0, std::min(first, name.find('+')));
  for (const PresetInfo& native : catalog.presets()) {
    if (native.name == base) return name.substr(0, first);
  }
  return name.substr(0, name.find('/', first + 1));
}

bool metrics_owed(const std::string& name) {
  return name.starts_with("prime/") || name.starts_with("cookbook_PR169/") ||
         (name.starts_with("slime/") && name.find("PR2084") != std::string::npos);
}

std::vector<std::vector<double>> by_sequence(const BatchView<double>& batch,
                                             const std::vector<double>& flat) {
  std::vector<std::vector<double>> out;
  for (int64_t s = 0; s < batch.sequence_count(); ++s) {
    out.emplace_back(flat.begin() + batch.offsets[s], flat.begin() + batch.offsets[s + 1]);
  }
  return out;
}

class Comparison {
 public:
  Comparison(CaseResult& result, double relative) : result_(result), relative_(relative) {}

  void numbers(const std::string& what, const std::vector<double>& got,
               const std::vector<double>& expected) {
    if (got.size() != expected.size()) {
      return differ(
          fmt::format("{} has {} values, expected {}", what, got.size(), expected.size()));
    }
    for (size_t i = 0; i < got.size(); ++i) {
      ++result_.compared_numbers;
      const bool both_nan = std::isnan(got[i]) && std::isnan(expected[i]);
      const double allowed = 1e-9 + relative_ * std::abs(expected[i]);
      if (both_nan || got[i] == expected[i]) continue;
      if (std::isfinite(expected[i]) && std::abs(got[i] - expected[i]) <= allowed) continue;
      const std::string index = got.size() > 1 ? fmt::format("[{}]", i) : "";
      differ(fmt::format("{}{} is {:.10g}, expected {:.10g}", what, index, got[i], expected[i]));
    }
  }
  void differ(const std::string& what) {
    result_.ok = false;
    if (result_.difference.empty()) result_.difference = what;
  }

 private:
  CaseResult& result_;
  double relative_;
};

void run_prox_approximation(const Fixture& fixture, const Json& json, CaseResult& result) {
  const Json* config = member(json, "config");
  const Json* versions = config ? member(*config, "versions") : nullptr;
  const Json* current = config ? member(*config, "current_version") : nullptr;
  if (versions == nullptr || current == nullptr || !current->IsNumber()) {
    throw Error("config needs versions and current_version");
  }
  const auto flat = numbers_of(*versions, "config.versions");
  if (flat.size() > fixture.batch.pi.size() || fixture.batch.rollout.empty()) {
    throw Error("config.versions is longer than the fixture");
  }
  auto version_of = [](double v) {
    if (!(std::abs(v) < 1e9)) throw Error("versions must be whole numbers");
    return static_cast<int32_t>(v);
  };
  std::vector<int32_t> tokens;
  for (double v : flat) tokens.push_back(version_of(v));
  const int32_t current_version = version_of(current->GetDouble());
  const std::span<const double> pi(fixture.batch.pi.data(), tokens.size());
  const std::span<const double> rollout(fixture.batch.rollout.data(), tokens.size());
  const std::pair<const char*, ProxApproximation> methods[] = {
      {"loglinear", ProxApproximation::loglinear},
      {"linear", ProxApproximation::linear},
      {"rollout", ProxApproximation::rollout}};
  Comparison comparison(result, 2e-5);
  for (const auto& [name, method] : methods) {
    const auto got = approximate_prox(method, pi, rollout, tokens, current_version);
    result.outputs.emplace_back(name, got);
    const Json* outputs = member(json, "outputs");
    const Json* expected = outputs ? member(*outputs, name) : nullptr;
    if (expected != nullptr) comparison.numbers(name, got, numbers_of(*expected, name));
  }
}

void run_case(const Catalog& catalog, const Fixture& fixture, const Json& json,
              CaseResult& result) {
  const Json* config = member(json, "config");
  Comparison comparison(result, result.name.starts_with("areal/") ? 2e-5 : 1e-6);
  if (result.name.starts_with("areal/prox_approx")) {
    return run_prox_approximation(fixture, json, result);
  }
  Batch batch = fixture.batch;
  batch.advantages = uses_token_advantages(result.name, config) ? fixture.adv_tok : fixture.adv_seq;
  if (batch.advantages.empty()) batch.advantages.assign(batch.pi.size(), 0.0);
  const BatchView<double> view = batch.view();

  if (result.name.starts_with("verl/offpolicy_metrics")) {
    if (batch.prox.empty() || batch.rollout.empty()) throw Error("needs prox and rollout");
    result.metrics = verl_offpolicy_metrics(view);
  } else {
    const std::string preset = preset_of(catalog, result.name);
    const bool native = preset.find('/') == std::string::npos;
    Settings settings = settings_of(config);
    // "adv" names a stream of the fixture; native presets would refuse it as a key.
    std::erase_if(settings, [&](const Setting& s) { return native && s.key == "adv"; });
    const LossSpec spec = catalog.make_spec(preset, settings);
    MetricSums sums;
    const LossResult loss = evaluate_reference(spec, view, {}, &sums, true);
    result.has_loss = true;
    result.loss = loss.loss;
    result.grad = by_sequence(view, loss.grad);
    result.inert = spec.inert;
    result.metrics = foreign_metrics(spec, view, loss);
    if (native) {
      for (const auto& [name, value] : finalize_metrics(
               spec, sums, !batch.rollout.empty(), !batch.ref.empty(), !batch.teacher.empty())) {
        result.metrics.push_back({name, false, {value}});
      }
    }
    std::vector<double> weights, mask;
    for (const TokenTrace& trace : loss.trace) {
      weights.push_back(trace.trained ? trace.weight : 0.0);
      mask.push_back(trace.trained && !trace.dropped ? 1.0 : 0.0);
    }
    result.weights = by_sequence(view, weights);
    result.mask = by_sequence(view, mask);
    if (const Json* expected = member(json, "loss")) {
      comparison.numbers("loss", {loss.loss}, {number_of(*expected, "loss")});
    }
    if (const Json* expected = member(json, "grad")) {
      comparison.numbers("grad", loss.grad, numbers_of(*expected, "grad"));
    }
  }
  if (!metrics_owed(result.name)) return;
  if (const Json* expected = member(json, "metrics"); expected != nullptr && expected->IsObject()) {
    for (const auto& entry : expected->GetObject()) {
      const std::string name = entry.name.GetString();
      const ForeignMetric* found = nullptr;
      for (const ForeignMetric& metric : result.metrics) {
        if (metric.name == name) found = &metric;
      }
      if (found == nullptr) {
        comparison.differ(fmt::format("metric {} is not computed", name));
      } else {
        comparison.numbers("metric " + name, found->values, numbers_of(entry.value, name));
      }
    }
  }
}

}  // namespace

std::vector<CaseResult> run_golden(const Catalog& catalog, const std::string& name,
                                   std::string_view text) {
  const rapidjson::Document document = parse_json(name, text);
  const Json* fixture_json = document.IsObject() ? member(document, "fixture") : nullptr;
  const Json* cases = document.IsObject() ? member(document, "cases") : nullptr;
  if (fixture_json == nullptr || cases == nullptr || !cases->IsArray()) {
    throw Error(fmt::format("{}: a golden file has a \"fixture\" and a list of \"cases\"", name));
  }
  Fixture fixture;
  try {
    fixture = read_fixture(*fixture_json);
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", name, error.what()));
  }
  std::vector<CaseResult> results;
  for (const Json& json : cases->GetArray()) {
    const Json* case_name = member(json, "name");
    if (case_name == nullptr || !case_name->IsString()) {
      throw Error(fmt::format("{}: case {} has no \"name\"", name, results.size()));
    }
    CaseResult result;
    result.name = case_name->GetString();
    result.ok = true;
    try {
      run_case(catalog, fixture, json, result);
    } catch (const Error& error) {
      result.ok = false;
      result.difference = error.what();
    }
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace leeway
