#include "core/own_metrics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "leeway/error.h"
#include "leeway/presets.h"

namespace leeway {
namespace {

OwnMetric share_of_risen() {
  return {"risen",
          "share of trained tokens that are more likely than when sampled",
          {Stream::rollout},
          [](const SequenceView<double>& sequence) {
            MetricShare share;
            for (size_t t = 0; t < sequence.mask.size(); ++t) {
              if (!sequence.mask[t]) continue;
              share.count += 1.0;
              share.sum += sequence.pi[t] > sequence.rollout[t] ? 1.0 : 0.0;
            }
            return share;
          }};
}

Batch batch() {
  return {.offsets = {0, 2, 5},
          .pi = {-1.0, -2.0, std::nan(""), -1.0, -3.0},
          .rollout = {-2.0, -1.0, 7.0, -2.0, -4.0},
          .advantages = {1, 1, 1, 1, 1},
          .mask = {1, 1, 0, 1, 1}};
}

TEST(OwnMetrics, AreSumsOverSequencesDividedByTheirCounts) {
  Catalog catalog;
  catalog.add(share_of_risen());
  for (const char* preset : {"icepop", "slime/ppo"}) {
    const LossSpec spec = catalog.make_spec(preset, {});
    const Metrics metrics = own_metrics(spec, batch().view());
    ASSERT_EQ(metrics.size(), 1u) << preset;
    EXPECT_EQ(metrics[0].first, "plugin/risen");
    EXPECT_EQ(metrics[0].second, 0.75) << "3 of 4 trained tokens; the masked one holds NaN";
  }
  Batch masked = batch();
  masked.mask.assign(5, 0);
  EXPECT_TRUE(std::isnan(
      metric_of(own_metrics(catalog.make_spec("icepop", {}), masked.view()), "plugin/risen")));
  EXPECT_TRUE(own_metrics(Catalog().make_spec("icepop", {}), batch().view()).empty());
}

TEST(OwnMetrics, AreLeftOutWhereTheBatchLacksAStream) {
  Catalog catalog;
  OwnMetric metric = share_of_risen();
  metric.reads = {Stream::ref};
  catalog.add(metric);
  EXPECT_TRUE(own_metrics(catalog.make_spec("icepop", {}), batch().view()).empty());
}

TEST(OwnMetrics, RefuseNumbersThatAreNotFiniteByName) {
  Catalog catalog;
  catalog.add(OwnMetric{"bad", "", {}, [](const SequenceView<double>& sequence) {
                          return MetricShare{sequence.pi[0], 1.0};
                        }});
  try {
    own_metrics(catalog.make_spec("icepop", {}), batch().view());
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("metric plugin/bad: sequence 1 adds nan"),
              std::string::npos)
        << error.what();
  }
}

TEST(OwnMetrics, HaveNamesOfTheirOwn) {
  Catalog catalog;
  catalog.add(share_of_risen());
  EXPECT_THROW(catalog.add(share_of_risen()), Error);
  for (const char* name : {"", "a b", "a/b", "Upper"}) {
    OwnMetric metric = share_of_risen();
    metric.name = name;
    EXPECT_THROW(catalog.add(metric), Error) << name;
  }
  OwnMetric empty = share_of_risen();
  empty.name = "empty", empty.share = nullptr;
  EXPECT_THROW(catalog.add(empty), Error);
}

}  // namespace
}  // namespace leeway
