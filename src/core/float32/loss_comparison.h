// What tests of the device's loss share, on the host and on a GPU: the specs it computes, and its
// values against the reference in double.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/float32/plan.h"
#include "core/test_support.h"
#include "leeway/error.h"
#include "leeway/metrics.h"

namespace leeway::testing {

struct NamedSpec {
  std::string label;
  LossSpec spec;
};

// Every preset and composition that has a plan. The others are refused in words that say where.
inline std::vector<NamedSpec> device_specs(const Catalog& catalog) {
  std::vector<NamedPreset> presets = native_list(catalog);
  for (NamedPreset& foreign : foreign_list(catalog)) presets.push_back(foreign);
  std::vector<NamedSpec> list;
  for (const NamedPreset& named : presets) {
    const LossSpec spec = catalog.make_spec(named.preset, named.settings);
    try {
      make_complete_plan(spec);
      list.push_back({named.label(), spec});
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("on the CPU"), std::string::npos) << error.what();
    }
  }
  EXPECT_GE(list.size(), 110u);
  return list;
}

// A batch weight for each token, a quarter of them zero.
inline void weigh(Batch& batch) {
  batch.weights.resize(batch.pi.size());
  for (size_t i = 0; i < batch.weights.size(); ++i) {
    batch.weights[i] = 0.25 * static_cast<double>(i % 4);
  }
}

struct LossValues {
  double loss = 0.0;
  std::vector<float> grad;
  MetricSums metrics;
};

inline void expect_close(double actual, double wanted, double tolerance, const std::string& what) {
  if (std::isnan(wanted) ? std::isnan(actual) : std::isinf(wanted) && wanted == actual) return;
  EXPECT_NEAR(actual, wanted, tolerance * std::max(1.0, std::abs(wanted))) << what;
}

// `denominator` negative: the batch's own.
inline void expect_reference(const NamedSpec& named, const Batch& batch, double denominator,
                             const LossValues& actual) {
  MetricSums sums;
  const LossResult wanted = evaluate_reference(
      named.spec, batch.view(), denominator < 0 ? std::nullopt : std::optional(denominator), &sums);
  expect_close(actual.loss, wanted.loss, 3e-5, named.label + ": loss");
  for (size_t i = 0; i < wanted.grad.size(); ++i) {
    ASSERT_NEAR(actual.grad[i], wanted.grad[i], 5e-5 * std::max(1.0, std::abs(wanted.grad[i])))
        << named.label << ": position " << i;
  }
  const auto wanted_metrics = finalize_metrics(named.spec, sums, true, true, true);
  const auto metrics = finalize_metrics(named.spec, actual.metrics, true, true, true);
  for (size_t m = 0; m < metrics.size(); ++m) {
    expect_close(metrics[m].second, wanted_metrics[m].second, 1e-4,
                 named.label + ": " + metrics[m].first);
  }
}

}  // namespace leeway::testing
