// The loss on the CPU compared with what a user would write in libtorch and with a memory copy as
// the lower bound, in one run. See benchmarks/README.md for the method.

#include <benchmark/benchmark.h>

#include <cstring>
#include <map>
#include <string>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "leeway/evaluator.h"
#include "leeway/presets.h"
#ifdef LEEWAY_HAS_TORCH
#include "torch_baseline.h"
#endif

namespace leeway {
namespace {

constexpr int kThreads = 2;

// `tokens` in 512 sequences of uneven length, 70 % trainable, ratios near one with a tail.
FloatBatch make_batch(int64_t tokens) {
  Rng rng(1);
  Batch batch;
  constexpr int64_t kSequences = 512;
  std::vector<double> lengths;
  double total = 0.0;
  for (int64_t s = 0; s < kSequences; ++s) {
    lengths.push_back(0.25 + 1.5 * rng.uniform());
    total += lengths.back();
  }
  for (int64_t s = 0; s < kSequences; ++s) {
    const int64_t end =
        s + 1 == kSequences
            ? tokens
            : std::min(tokens, batch.offsets.back() +
                                   static_cast<int64_t>(lengths[static_cast<size_t>(s)] / total *
                                                        static_cast<double>(tokens)));
    const double advantage = rng.normal();
    for (int64_t t = batch.offsets.back(); t < end; ++t) {
      const double pi = -std::abs(rng.normal()) - 1e-3;
      batch.pi.push_back(pi);
      batch.prox.push_back(pi + 0.05 * rng.normal());
      batch.rollout.push_back(pi + (rng.uniform() < 0.01 ? 1.5 : 0.1) * rng.normal());
      batch.advantages.push_back(advantage);
      batch.mask.push_back(rng.uniform() < 0.7);
    }
    batch.offsets.push_back(end);
  }
  return FloatBatch(batch);
}

const FloatBatch& batch_of(int64_t tokens) {
  static std::map<int64_t, FloatBatch> batches;
  auto found = batches.find(tokens);
  if (found == batches.end()) found = batches.emplace(tokens, make_batch(tokens)).first;
  return found->second;
}

void report(benchmark::State& state, int64_t tokens) {
  state.SetItemsProcessed(state.iterations() * tokens);
}

void leeway_loss(benchmark::State& state, const std::string& preset, bool metrics) {
  const int64_t tokens = state.range(0);
  const FloatBatch& batch = batch_of(tokens);
  BatchView<float> view = batch.view();
  const LossSpec spec = Catalog().make_spec(preset, {});
  if (!spec.reads(Stream::prox)) view.prox = {};
  Evaluator evaluator(kThreads);
  std::vector<float> grad(batch.pi.size());
  for (auto _ : state) {
    MetricSums sums;
    benchmark::DoNotOptimize(evaluator.evaluate(spec, view, grad, {}, metrics ? &sums : nullptr));
  }
  report(state, tokens);
}

// Lower bound: reads what IcePop reads and writes the gradient once, 13 bytes in and 4 out per
// token.
void copy_floor(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  const size_t bytes = static_cast<size_t>(tokens) * 17 / 2;
  std::vector<char> from(bytes, 1), to(bytes);
  ThreadPool pool(kThreads);
  for (auto _ : state) {
    pool.run(kThreads, [&](size_t k) {
      const size_t part = bytes / kThreads;
      std::memcpy(to.data() + k * part, from.data() + k * part, part);
    });
    benchmark::ClobberMemory();
  }
  report(state, tokens);
}

#ifdef LEEWAY_HAS_TORCH
enum class Torch { flat, flat_all_metrics, by_sequence };

void libtorch(benchmark::State& state, Torch kind) {
  const int64_t tokens = state.range(0);
  const FloatBatch& batch = batch_of(tokens);
  TorchBaseline baseline(batch.offsets, batch.pi, batch.rollout, batch.advantages, batch.mask,
                         kThreads);
  for (auto _ : state) {
    benchmark::DoNotOptimize(kind == Torch::by_sequence
                                 ? baseline.by_sequence()
                                 : baseline.flat(kind == Torch::flat_all_metrics));
  }
  report(state, tokens);
}
#endif

// Records the median of each benchmark, to print ratios at the end.
class Collector : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(const std::vector<Run>& runs) override {
    benchmark::ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs) {
      if (run.aggregate_name == "median")
        medians[run.run_name.function_name + "/" + run.run_name.args] = run.GetAdjustedRealTime();
    }
  }
  std::map<std::string, double> medians;
};

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  using namespace leeway;
  constexpr int64_t kMillion = 1000000;
  auto add = [](const std::string& name, auto run, std::vector<int64_t> sizes) {
    auto* bench = benchmark::RegisterBenchmark(name.c_str(), run);
    for (int64_t size : sizes) bench->Arg(size);
    bench->Unit(benchmark::kMillisecond)
        ->UseRealTime()
        ->MinTime(0.2)
        ->Repetitions(5)
        ->ReportAggregatesOnly(true);
  };
  auto preset = [](std::string name, bool metrics) {
    return [=](benchmark::State& state) { leeway_loss(state, name, metrics); };
  };
  add("copy_floor", copy_floor, {kMillion});
  add("leeway/icepop", preset("icepop", true),
      {kMillion, 4 * kMillion, 16 * kMillion, 64 * kMillion});
  add("leeway/icepop/no_metrics", preset("icepop", false), {kMillion});
#ifdef LEEWAY_HAS_TORCH
  auto torch_run = [](Torch kind) {
    return [=](benchmark::State& state) { libtorch(state, kind); };
  };
  add("libtorch/icepop/flat/all_metrics", torch_run(Torch::flat_all_metrics), {kMillion});
  add("libtorch/icepop/flat/prime_metrics", torch_run(Torch::flat), {kMillion});
  add("libtorch/icepop/by_sequence", torch_run(Torch::by_sequence), {kMillion});
#endif
  const Catalog catalog;
  for (const PresetInfo& info : catalog.presets()) {
    if (info.name != "icepop") add("leeway/" + info.name, preset(info.name, true), {kMillion});
  }
  for (const char* composed : {"ppo+tis", "ppo+icepop_tis", "off_policy_is"}) {
    add(std::string("leeway/") + composed, preset(composed, true), {kMillion});
  }
  benchmark::Initialize(&argc, argv);
  Collector collector;
  benchmark::RunSpecifiedBenchmarks(&collector);

  const auto& medians = collector.medians;
  const auto icepop = medians.find("leeway/icepop/1000000");
  if (icepop == medians.end()) return 0;
  std::printf("\nOne million tokens, medians of five, %d threads:\n", kThreads);
  for (const auto& [name, time] : medians) {
    if (!name.ends_with("/1000000")) continue;
    std::printf("  %-44s %9.3f ms   %7.2f of leeway/icepop\n",
                name.substr(0, name.rfind('/')).c_str(), time, time / icepop->second);
  }
  for (const auto& [name, time] : medians) {
    if (!name.starts_with("leeway/icepop/") || name.find("no_") != std::string::npos) continue;
    const double tokens = std::stod(name.substr(name.rfind('/') + 1));
    std::printf("  icepop, %3.0f million tokens: %8.3f ms, %.3f ns per token\n", tokens / 1e6, time,
                1e6 * time / tokens);
  }
  return 0;
}
