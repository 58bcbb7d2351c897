// The head on a GPU against a slow reference with all logits in double.

#include "cuda/policy_head.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/cpu/policy_head_test_support.h"
#include "core/float32/loss_comparison.h"
#include "cuda/gpu_test_support.h"

namespace leeway::cuda {
namespace {

using testing::Head;

// One handle for all tests: creating one takes a second.
cublasHandle_t blas() {
  static cublasHandle_t handle = [] {
    cublasHandle_t made = nullptr;
    LEEWAY_CHECK(cublasCreate(&made) == CUBLAS_STATUS_SUCCESS, "a cuBLAS handle");
    return made;
  }();
  return handle;
}

struct GpuHead {
  explicit GpuHead(const Head& head)
      : tokens(static_cast<size_t>(head.tokens)),
        bf16(head.bf16),
        hidden(bytes_of_values(head.hidden, head.hidden_bf16, head.bf16)),
        weight(bytes_of_values(head.weight, head.weight_bf16, head.bf16)),
        targets(head.targets),
        rows(head.rows),
        temperature(head.temperature) {
    problem.tokens = head.tokens;
    problem.row_count = head.all_rows ? head.tokens : static_cast<int64_t>(head.rows.size());
    problem.hidden_size = problem.hidden_stride = head.hidden_size;
    problem.vocabulary = head.vocabulary;
    problem.type = head.bf16 ? Dtype::bf16 : Dtype::float32;
    problem.hidden = hidden.data();
    problem.weight = weight.data();
    problem.targets = targets.data();
    problem.rows = head.all_rows ? nullptr : rows.data();
    problem.temperature = temperature.or_null();
    problem.temperature_per_token = head.temperature.size() > 1;
  }

  static std::vector<char> bytes_of_values(const std::vector<float>& wide,
                                           const std::vector<uint16_t>& narrow, bool is_narrow) {
    const char* begin = is_narrow ? reinterpret_cast<const char*>(narrow.data())
                                  : reinterpret_cast<const char*>(wide.data());
    return {begin, begin + (is_narrow ? narrow.size() * 2 : wide.size() * 4)};
  }

  std::vector<float> floats(const DeviceArray<char>& array, bool narrow) const {
    const std::vector<char> raw = array.values();
    std::vector<float> out(raw.size() / (narrow ? 2 : 4));
    for (size_t i = 0; i < out.size(); ++i) {
      if (narrow) {
        uint16_t bits;
        std::memcpy(&bits, raw.data() + 2 * i, 2);
        out[i] = testing::from_bf16(bits);
      } else {
        std::memcpy(&out[i], raw.data() + 4 * i, 4);
      }
    }
    return out;
  }

  size_t tokens;
  bool bf16;
  DeviceArray<char> hidden, weight;
  DeviceArray<int64_t> targets, rows;
  DeviceArray<float> temperature;
  HeadProblem problem;
};

testing::HeadRun run(const Head& head, const LossSpec& spec, const Batch& batch,
                     const HeadOptions& options, bool float32_weight_gradient = true,
                     std::optional<double> denominator = {}) {
  const GpuHead gpu(head);
  const LossPlan plan = make_complete_plan(spec);
  const FloatBatch floats(batch);
  const DeviceBatch device(floats.view());
  const DeviceArray<char> memory(static_cast<size_t>(
      head_workspace_bytes(gpu.problem, options, &plan, device.batch().sequences)));
  const DeviceArray<float> loss(1), logprobs(gpu.tokens), entropy(gpu.tokens);
  const DeviceArray<double> metrics(MetricSums::kFlatSize);
  const bool narrow_weight = gpu.bf16 && !float32_weight_gradient;
  const DeviceArray<char> d_hidden(head.hidden.size() * (gpu.bf16 ? 2 : 4));
  const DeviceArray<char> d_weight(
      std::vector<char>(head.weight.size() * (narrow_weight ? 2 : 4), 0));
  HeadGradients gradients{d_hidden.data(), d_weight.data(),
                          narrow_weight ? Dtype::bf16 : Dtype::float32};
  policy_head(blas(), nullptr, gpu.problem, options, memory.data(), plan, device.batch(),
              denominator.value_or(-1.0), loss.data(), logprobs.data(), entropy.data(),
              metrics.data(), gradients);
  testing::HeadRun out;
  out.result.loss = static_cast<double>(loss.values()[0]);
  out.result.metrics = MetricSums::from_flat(metrics.values());
  out.logprobs = logprobs.values();
  out.entropy = entropy.values();
  out.d_hidden = gpu.floats(d_hidden, gpu.bf16);
  out.d_weight = gpu.floats(d_weight, narrow_weight);
  return out;
}

HeadOptions rows_in_a_chunk(const Head& head, int64_t rows) {
  HeadOptions options;
  const int64_t size = head.bf16 ? 2 : 4;
  options.chunk_bytes =
      rows * ((head.vocabulary + 63) / 64 * 64 * size + 2 * head.hidden_size * size);
  return options;
}

TEST(GpuHead, AgreesWithTheReferenceForEveryPreset) {
  LEEWAY_NEEDS_GPU();
  const std::vector<int> lengths = {9, 1, 17, 4};
  const std::vector<testing::NamedSpec> specs = testing::device_specs(Catalog());
  for (const auto& [label, spec] : specs) {
    const bool clean = testing::looks_at_masked(spec);
    for (const bool listed : {false, true}) {
      if (clean && listed) continue;  // such specs look at every row
      Head head(31, 31, 24, 53);
      if (listed) head.temperature_per_token(7);
      const Batch batch = testing::batch_for(head, 3, lengths, clean);
      if (listed) head.list_rows(batch.mask);
      const auto wanted = testing::reference_head(head, spec, batch, 25.0);
      for (const int64_t rows : {0, 7}) {
        const auto got = run(head, spec, batch,
                             rows == 0 ? HeadOptions() : rows_in_a_chunk(head, rows), true, 25.0);
        testing::expect_agrees(got, wanted, label, 5e-5);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
  std::printf("%zu presets and compositions\n", specs.size());
}

TEST(GpuHead, TakesEveryVocabulary) {
  LEEWAY_NEEDS_GPU();
  const LossSpec spec = Catalog().make_spec("icepop", {});
  const std::vector<int> lengths = {5, 1, 3};
  std::vector<int64_t> sizes;
  for (int64_t v = 1; v <= 80; ++v) sizes.push_back(v);
  for (int64_t v : {127, 128, 129, 1000, 4095, 4097, 33333, 262144}) sizes.push_back(v);
  for (const int64_t vocabulary : sizes) {
    for (const bool bf16 : {false, true}) {
      Head head(static_cast<uint64_t>(vocabulary), 9, 16, vocabulary);
      if (bf16) head.round_to_bf16();
      const Batch batch = testing::batch_for(head, 3, lengths);
      const auto wanted = testing::reference_head(head, spec, batch);
      const std::string where = "vocabulary " + std::to_string(vocabulary);
      for (const bool wide : {false, true}) {
        HeadOptions options;
        options.float32_logits = wide;
        const auto got = run(head, spec, batch, options);
        testing::expect_agrees(got, wanted, where, !bf16 ? 5e-5 : 2e-2);
        if (::testing::Test::HasFatalFailure()) return;
        if (bf16 && wide) testing::expect_near(got.logprobs, wanted.logprobs, 2e-5, where);
        if (!bf16) break;
      }
    }
  }
}

TEST(GpuHead, MaskedRowsAreInertWhateverTheyHold) {
  LEEWAY_NEEDS_GPU();
  for (const char* preset : {"icepop", "gspo"}) {
    for (const bool bf16 : {false, true}) {
      const LossSpec spec = Catalog().make_spec(preset, {});
      Head head(5, 31, 24, 100), broken(5, 31, 24, 100);
      if (bf16) head.round_to_bf16(), broken.round_to_bf16();
      const Batch batch = testing::batch_for(head, 3, {9, 1, 17, 4});
      for (size_t t = 0; t < 31; ++t) {
        if (batch.mask[t]) continue;
        broken.targets[t] = t % 2 == 0 ? -100 : int64_t{1} << 40;
        for (size_t j = 24 * t; j < 24 * (t + 1); ++j) {
          if (bf16) broken.hidden_bf16[j] = testing::to_bf16(std::nanf(""));
          broken.hidden[j] = std::nanf("");
        }
      }
      const auto whole = run(head, spec, batch, {}), got = run(broken, spec, batch, {});
      EXPECT_EQ(got.d_weight, whole.d_weight) << preset;
      EXPECT_EQ(got.d_hidden, whole.d_hidden) << preset;
      EXPECT_EQ(got.result.loss, whole.result.loss) << preset;
    }
  }
}

TEST(GpuHead, ARowThatIsNotListedAndTakesPartMakesTheLossNan) {
  LEEWAY_NEEDS_GPU();
  const LossSpec spec = Catalog().make_spec("icepop", {});
  Head head(5, 31, 24, 100);
  Batch batch = testing::batch_for(head, 3, {9, 1, 17, 4}, true);
  batch.mask.assign(31, 1);
  head.all_rows = false;
  for (int64_t t = 0; t < 30; ++t) head.rows.push_back(t);
  EXPECT_TRUE(std::isnan(run(head, spec, batch, {}).result.loss));
  batch.mask[30] = 0;
  const auto got = run(head, spec, batch, {});
  EXPECT_TRUE(std::isfinite(got.result.loss));
  EXPECT_EQ(got.logprobs[30], 0.0f);
}

TEST(GpuHead, EntropyGradientsAgree) {
  LEEWAY_NEEDS_GPU();
  Head head(11, 21, 24, 300);
  head.temperature_per_token(3);
  std::vector<double> g(21), ge(21);
  Rng rng(4);
  for (size_t i = 0; i < 21; ++i) {
    g[i] = i % 4 == 0 ? 0.0 : static_cast<float>(rng.normal());
    ge[i] = i % 3 == 0 ? 0.0 : static_cast<float>(rng.normal());
  }
  const auto wanted = testing::reference_backward(head, g, ge);
  const GpuHead gpu(head);
  const DeviceArray<float> dg(std::vector<float>(g.begin(), g.end())),
      dge(std::vector<float>(ge.begin(), ge.end()));
  const HeadOptions options = rows_in_a_chunk(head, 8);
  const DeviceArray<char> memory(
      static_cast<size_t>(head_workspace_bytes(gpu.problem, options, nullptr, 0)));
  const DeviceArray<char> d_hidden(head.hidden.size() * 4);
  const DeviceArray<char> d_weight(std::vector<char>(head.weight.size() * 4, 0));
  head_backward(blas(), nullptr, gpu.problem, options, memory.data(), dg.data(), dge.data(),
                {d_hidden.data(), d_weight.data(), Dtype::float32});
  testing::expect_near(gpu.floats(d_hidden, false), wanted.hidden, 5e-5, "d_hidden", true);
  testing::expect_near(gpu.floats(d_weight, false), wanted.weight, 5e-5, "d_weight");
}

TEST(GpuHead, RepeatsBitForBitAndIsInvariantWhereAsked) {
  LEEWAY_NEEDS_GPU();
  const LossSpec spec = Catalog().make_spec("icepop", {});
  Head head(3, 200, 256, 5000);
  head.round_to_bf16();
  const Batch batch = testing::random_batch(3, {150, 50}, true);
  const auto first = run(head, spec, batch, {}), second = run(head, spec, batch, {});
  EXPECT_EQ(first.d_weight, second.d_weight);
  EXPECT_EQ(first.d_hidden, second.d_hidden);
  EXPECT_EQ(first.logprobs, second.logprobs);

  HeadOptions invariant;
  invariant.invariant = true;
  const auto all = run(head, spec, batch, invariant);
  Head few = head;
  few.all_rows = false;
  Batch some = batch;
  for (int64_t t = 0; t < 200; ++t) {
    some.mask[static_cast<size_t>(t)] = t % 7 == 3;
    if (t % 7 == 3) few.rows.push_back(t);
  }
  const auto part = run(few, spec, some, invariant);
  for (int64_t t : few.rows) {
    EXPECT_EQ(part.logprobs[static_cast<size_t>(t)], all.logprobs[static_cast<size_t>(t)]) << t;
    EXPECT_EQ(part.entropy[static_cast<size_t>(t)], all.entropy[static_cast<size_t>(t)]) << t;
  }
}

TEST(GpuHead, BfloatGradientsInEitherType) {
  LEEWAY_NEEDS_GPU();
  const LossSpec spec = Catalog().make_spec("ppo", {});
  Head head(3, 96, 64, 2000);
  head.round_to_bf16();
  const Batch batch = testing::batch_for(head, 3, {60, 36});
  const auto wanted = testing::reference_head(head, spec, batch);
  for (const bool wide : {false, true}) {
    const auto got = run(head, spec, batch, rows_in_a_chunk(head, 40), wide);
    testing::expect_near(got.d_weight, wanted.gradients.weight, 2e-2, "d_weight");
    testing::expect_near(got.d_hidden, wanted.gradients.hidden, 2e-2, "d_hidden");
  }
}

}  // namespace
}  // namespace leeway::cuda
