// Texts about losses for the Python package: what a spec is, what it computes, what there is, and
// what presets do to a batch. JSON in, JSON out; errors are torch's ValueError.

#include <fmt/format.h>
#include <torch/library.h>
#include <torch/version.h>

#include "base/json.h"
#include "core/batch_json.h"
#include "core/compare.h"
#include "core/compare_json.h"
#include "core/cpu/policy_head.h"
#include "core/explain_text.h"
#include "core/spec_text.h"
#include "leeway/metrics.h"
#include "torch/ops/spec_json.h"
#include "torch/ops/tensors.h"

#ifdef LEEWAY_CUDA
#define LEEWAY_OPS_DEVICES "cuda"
#else
#define LEEWAY_OPS_DEVICES "cpu"
#endif

// Which PyTorch this library works with, found in its bytes before it is loaded: the Python package
// refuses another by name, where loading would end in an unresolved symbol.
extern "C" __attribute__((used, visibility("default"))) const char leeway_ops_built_for[] =
    "leeway_ops built for torch " TORCH_VERSION " " LEEWAY_OPS_DEVICES "\n";

namespace leeway {
namespace {

void write_texts(JsonWriter& json, const char* key, const std::vector<std::string>& texts) {
  json.key(key).begin_array();
  for (const std::string& text : texts) json.value(text);
  json.end_array();
}

// What needs more of the batch than one sequence, so that a loss of single sequences, or of
// micro-batches, is another one: the reason, or empty.
std::string whole_batch_reason(const LossSpec& spec) {
  if (spec.m2_threshold) return "its mask is chosen over the whole batch";
  if (spec.covariance_selection) return "it selects tokens over the whole batch";
  if (spec.weight_normalisation != WeightNormalisation::none) {
    return "its weights are normalised over the whole batch";
  }
  if (spec.reduction.denominator == Denominator::kept) {
    return "its denominator counts the tokens that are kept in the whole batch";
  }
  if (spec.reduction.kind == ReductionKind::padded_length_mean) {
    return "it pads to the longest sequence of the whole batch";
  }
  return "";
}

std::string describe(std::string spec_json) {
  return with_value_errors([&] {
    const LossSpec spec = spec_from_json(spec_json);
    JsonWriter json;
    json.begin_object().key("preset").value(spec.preset);
    json.key("settings").begin_object();
    for (const auto& [key, value] : spec.settings) json.key(key).value(value);
    json.end_object();
    write_texts(json, "inert", spec.inert);
    write_texts(json, "warnings", spec.warnings);
    json.key("reads").begin_array();
    for (int k = 0; k < kStreamCount; ++k) {
      if (spec.reads(static_cast<Stream>(k))) json.value(name_of(static_cast<Stream>(k)));
    }
    json.end_array().key("callers").begin_array();
    for (const Correction& correction : spec.corrections) {
      if (is_callers(correction)) json.value(correction.name);
    }
    json.end_array().key("reduction").value(name_of(spec.reduction.kind));
    json.key("fixed_length").value(spec.reduction.fixed_length);
    json.key("count_empty").value(spec.reduction.count_empty);
    json.key("looks_past_mask")
        .value(spec.positions == Positions::all || spec.ratio.over == Positions::all ||
               spec.preset.find('/') != std::string::npos);
    json.key("one_pass").value(one_pass(spec));
    json.key("whole_batch").value(whole_batch_reason(spec));
    json.key("metrics").begin_array();
    for (const MetricInfo& metric : metric_table()) {
      if (!metric.applies(spec, true, true, true)) continue;
      const char* needs = !metric.applies(spec, false, true, true)   ? "rollout"
                          : !metric.applies(spec, true, false, true) ? "ref"
                          : !metric.applies(spec, true, true, false) ? "teacher"
                                                                     : "";
      json.begin_object().key("name").value(metric.name).key("needs").value(needs).end_object();
    }
    json.end_array();
    json.end_object();
    return json.text();
  });
}

std::string explain_op(std::string spec_json) {
  return with_value_errors([&] { return explain_text(spec_from_json(spec_json)); });
}

void write_keys(JsonWriter& json, std::span<const KeyInfo> keys) {
  json.begin_object();
  for (const KeyInfo& key : keys) json.key(key.name).value(key.default_value);
  json.end_object();
}

std::string catalog_text() {
  const std::shared_ptr<const Catalog> catalog = current_catalog();
  JsonWriter json;
  const auto entry = [&](const char* kind, const std::string& name, const std::string& summary,
                         const std::string& origin) {
    json.begin_object().key("name").value(name).key("kind").value(kind);
    json.key("summary").value(summary).key("origin").value(origin).key("keys");
  };
  json.begin_array();
  for (const PresetInfo& p : catalog->presets()) {
    entry("preset", p.name, p.summary, p.origin);
    write_keys(json, p.keys);
    json.end_object();
  }
  for (const CorrectionInfo& c : catalog->corrections()) {
    entry("correction", c.name, c.summary, c.origin);
    write_keys(json, c.keys);
    json.end_object();
  }
  for (const ForeignPreset& f : catalog->foreign()) {
    entry("foreign", f.name, "", f.source);
    json.begin_object().end_object().end_object();
  }
  json.end_array();
  return json.text();
}

template <class T>
std::vector<T> numbers_in(const rapidjson::Value& object, const char* key, size_t count) {
  std::vector<T> numbers;
  const auto found = object.FindMember(key);
  if (found == object.MemberEnd() || found->value.IsNull()) return numbers;
  if (!found->value.IsArray() || found->value.Size() != count) {
    throw Error(fmt::format("requests: \"{}\" must have one number for each token", key));
  }
  for (const auto& value : found->value.GetArray()) {
    if (!value.IsNumber()) throw Error(fmt::format("requests: \"{}\" must be numbers", key));
    numbers.push_back(static_cast<T>(value.GetDouble()));
  }
  return numbers;
}

// A catalog in which the corrections that the caller computes have these results: products, so that
// one of several carries them.
Catalog bound_catalog(const Catalog& catalog, const Batch& batch,
                      const std::vector<double>& weights, const std::vector<uint8_t>& mask) {
  Catalog bound;
  bool carried = false;
  for (CorrectionInfo info : catalog.corrections()) {
    if (!is_callers(info.name)) continue;
    const Correction correction = info.build({});
    const Correction with =
        carried ? bound_correction<double>(correction, batch.advantages.data(), {}, {})
                : bound_correction<double>(correction, batch.advantages.data(), weights, mask);
    info.build = [with](const KeyValues&) { return with; };
    bound.add(info);
    carried = true;
  }
  return bound;
}

// {"requests": [{"preset", "settings": {..}}, ..], "target_masked"?, "weights"?, "mask"?}: what
// `leeway loss compare --json` prints of them. Without requests every native preset. "weights" and
// "mask" [N] are of the corrections that the caller computes, for all requests.
std::string compare_op(std::string batch_json, std::string requests_json) {
  return with_value_errors([&] {
    const LoadedBatch loaded = parse_batch("batch", batch_json);
    const Batch& batch = loaded.batch;
    const rapidjson::Document document = parse_json("requests", requests_json);
    const auto tokens = static_cast<size_t>(batch.offsets.back());
    const std::vector<double> weights = numbers_in<double>(document, "weights", tokens);
    const std::vector<uint8_t> mask = numbers_in<uint8_t>(document, "mask", tokens);
    std::shared_ptr<const Catalog> catalog = current_catalog();
    if (!weights.empty() || !mask.empty()) {
      catalog = std::make_shared<Catalog>(bound_catalog(*catalog, batch, weights, mask));
    }
    std::vector<PresetRequest> requests;
    for (const auto& json : document["requests"].GetArray()) {
      PresetRequest request{json["preset"].GetString(), {}};
      for (const auto& member : json["settings"].GetObject()) {
        request.settings.push_back(
            {member.name.GetString(),
             value_from_json("compare", member.name.GetString(), member.value), ""});
      }
      requests.push_back(std::move(request));
    }
    if (requests.empty()) requests = default_requests(*catalog, batch);
    std::optional<double> target;
    if (document.HasMember("target_masked") && document["target_masked"].IsNumber()) {
      target = document["target_masked"].GetDouble();
    }
    const Comparison comparison =
        compare_presets(*catalog, batch, requests, target, [](size_t, size_t) {});
    JsonWriter json;
    json.begin_object();
    write_texts(json, "warnings", loaded.warnings);
    write_comparison(json, comparison);
    json.end_object();
    return json.text();
  });
}

void set_corrections(std::string corrections_json) {
  with_value_errors([&] { set_caller_corrections(corrections_json); });
}

}  // namespace

TORCH_LIBRARY_IMPL(leeway, CompositeExplicitAutograd, m) {
  m.impl("_describe", describe);
  m.impl("_explain", explain_op);
  m.impl("_catalog", catalog_text);
  m.impl("_compare", compare_op);
  m.impl("_set_corrections", set_corrections);
}

}  // namespace leeway
