#include "core/compare_json.h"

namespace leeway {

void write_comparison(JsonWriter& json, const Comparison& c) {
  auto list = [&](const char* key, const std::vector<double>& values) {
    json.key(key).begin_array();
    for (double value : values) json.value(value);
    json.end_array();
  };
  json.key("tokens").value(c.tokens).key("sequences").value(c.sequences);
  json.key("positive_share").value(c.positive_share);
  json.key("negative_share").value(c.negative_share);
  json.key("mismatch").begin_object();
  for (const auto& [name, value] : c.mismatch) json.key(name).value(value);
  json.end_object().key("ratio_histogram").begin_object();
  list("edges", c.ratio_edges);
  list("counts", c.ratio_counts);
  json.end_object().key("bands").begin_array();
  for (const std::string& band : c.bands) json.value(band);
  json.end_array();
  list("band_tokens", c.band_tokens);
  json.key("band_stream")
      .value(c.band_stream)
      .key("uncorrected")
      .value(c.uncorrected)
      .key("target_masked");
  if (c.target_masked) {
    json.value(*c.target_masked);
  } else {
    json.null();
  }
  json.key("presets").begin_array();
  for (const ComparedPreset& p : c.presets) {
    json.begin_object().key("preset").value(p.preset).key("label").value(p.label);
    json.key("settings").begin_object();
    for (const auto& [key, value] : p.settings) json.key(key).value(value);
    json.end_object().key("unavailable");
    if (!p.unavailable.empty()) {
      json.value(p.unavailable).end_object();
      continue;
    }
    json.null();
    json.key("kept_share").value(p.kept_share).key("kept_positive").value(p.kept_positive);
    json.key("kept_negative").value(p.kept_negative);
    list("kept_by_band", p.kept_by_band);
    json.key("bounded_share").value(p.bounded_share);
    json.key("effective_sample_size").value(p.effective_sample_size);
    json.key("loss").value(p.loss).key("grad_norm").value(p.grad_norm);
    json.key("grad_cosine").value(p.grad_cosine).key("target");
    if (p.target) {
      json.begin_object().key("settings").begin_object();
      for (const auto& [key, value] : p.target->settings) json.key(key).value(value);
      json.end_object().key("masked").value(p.target->masked).end_object();
    } else {
      json.null();
    }
    json.end_object();
  }
  json.end_array();
}

}  // namespace leeway
