// The loss operator against the same formulas in plain torch, in double, by autograd; and metrics.

#include <cmath>

#include "leeway/metrics.h"
#include "torch/ops/ops_test_support.h"

namespace leeway {
namespace {

using testing::error_of;
using testing::Example;
using testing::expect_close;
using testing::expect_words;
using testing::finalize_metrics;
using testing::LossOutputs;
using testing::metric;
using testing::metric_names;
using testing::policy_loss;

const std::string kIcepop = R"({"preset": "icepop"})";

// What a user would write instead.
Tensor plain_loss(const std::string& preset, const Example& e, const Tensor& pi) {
  const Tensor A = e.advantages.to(torch::kDouble), m = e.mask.to(torch::kDouble);
  const Tensor rollout = e.rollout.to(torch::kDouble), prox = e.prox.to(torch::kDouble);
  Tensor loss;
  if (preset == "icepop") {
    const Tensor r = (pi - rollout).exp();
    loss = -A * r * ((r >= 0.2) & (r <= 5.0));
  } else if (preset == "reinforce") {
    loss = -A * pi;
  } else if (preset == "ppo") {
    const Tensor r = (pi - prox).exp();
    loss = torch::max(-A * r, -A * r.clamp(0.8, 1.2));
  } else if (preset == "ppo+tis") {
    const Tensor r = (pi - prox).exp();
    loss = (prox - rollout).exp().clamp_max(5.0) * torch::max(-A * r, -A * r.clamp(0.8, 1.2));
  } else if (preset == "cispo") {
    loss = -A * (pi - rollout).exp().clamp_max(5.0).detach() * pi;
  } else if (preset == "dppo_kl") {
    const Tensor moved = pi.exp() - rollout.exp();
    const Tensor drop = ((A > 0) & (moved > 0.2)) | ((A <= 0) & (moved < -0.2));
    loss = -A * (pi - rollout).exp() * drop.logical_not() + 1e-3 * (pi - rollout).square();
  } else if (preset == "gspo") {
    std::vector<Tensor> ratios;
    for (int64_t s = 0; s + 1 < e.cu_seqlens.size(0); ++s) {
      const int64_t begin = e.cu_seqlens[s].item<int64_t>();
      const int64_t end = e.cu_seqlens[s + 1].item<int64_t>();
      const Tensor x = (pi - prox).slice(0, begin, end), of = m.slice(0, begin, end);
      const Tensor mean = (x * of).sum() / of.sum().clamp_min(1.0);
      // The mean's value, each token's own gradient.
      ratios.push_back((mean.detach() + x - x.detach()).exp());
    }
    const Tensor r = torch::cat(ratios);
    loss = torch::max(-A * r, -A * r.clamp(0.8, 1.2));
  }
  return (loss * m).sum() / m.sum();
}

std::string spec_of(const std::string& preset) { return "{\"preset\": \"" + preset + "\"}"; }

TEST(PolicyLoss, AgreesWithPlainTorchInDoubleAndSoDoItsGradients) {
  for (const char* preset : {"icepop", "reinforce", "ppo", "ppo+tis", "cispo", "dppo_kl", "gspo"}) {
    for (int seed = 1; seed <= 3; ++seed) {
      const Example e(seed);
      const Tensor exact = e.double_logprobs().detach().set_requires_grad(true);
      const Tensor expected = plain_loss(preset, e, exact);
      (3.0 * expected).backward();
      const Tensor logprobs = exact.detach().to(torch::kFloat).set_requires_grad(true);
      const LossOutputs out = policy_loss(e, logprobs, spec_of(preset));
      (3.0 * out.loss).backward();
      expect_close(out.loss, expected, 2e-5, preset);
      expect_close(logprobs.grad(), exact.grad(), 2e-5, preset);
      expect_close(3.0 * out.g, logprobs.grad(), 1e-6, preset);
      EXPECT_EQ(out.loss.scalar_type(), torch::kFloat);
      EXPECT_EQ(out.loss.dim(), 0);
    }
  }
}

TEST(PolicyLoss, IsDifferentiableInItsLossAlone) {
  const Example e;
  const Tensor logprobs = e.double_logprobs().detach().to(torch::kFloat).set_requires_grad(true);
  const LossOutputs out = policy_loss(e, logprobs, kIcepop);
  EXPECT_TRUE(out.loss.requires_grad());
  EXPECT_FALSE(out.g.requires_grad());
  EXPECT_FALSE(out.metrics.requires_grad());
  // Backward may run twice: nothing is released.
  const Tensor once = torch::autograd::grad({out.loss}, {logprobs}, {}, true)[0];
  const Tensor twice = torch::autograd::grad({out.loss}, {logprobs}, {}, true)[0];
  EXPECT_TRUE(testing::same_bits(once, twice));
  expect_words(error_of([&] { torch::autograd::grad({out.loss}, {logprobs}, {}, true, true); }),
               {"policy_loss", "second derivative"});
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(policy_loss(e, logprobs, kIcepop).loss.requires_grad());
}

TEST(PolicyLoss, DividesByTheDenominatorGivenOrByTheBatchsOwn) {
  const Example e;
  const Tensor logprobs = e.double_logprobs().detach().to(torch::kFloat);
  const double trained = e.mask.sum().item<double>();
  const LossOutputs own = policy_loss(e, logprobs, kIcepop, -1.0);
  const LossOutputs given = policy_loss(e, logprobs, kIcepop, 2.0 * trained);
  expect_close(2.0 * given.loss, own.loss, 1e-6, "loss");
  expect_close(2.0 * given.g, own.g, 1e-6, "g");
  // Nothing is divided by less than one.
  const LossOutputs none = policy_loss(e, logprobs, kIcepop, 0.0);
  expect_close(none.loss, trained * own.loss, 1e-6, "loss");
}

TEST(PolicyLoss, TakesMasksOfBytesOffsetsOf64BitsAndViews) {
  const Example e;
  const Tensor logprobs = e.double_logprobs().detach().to(torch::kFloat);
  const LossOutputs expected = policy_loss(e, logprobs, kIcepop);
  Example other = e;
  other.mask = e.mask.to(torch::kByte) * 7;
  other.cu_seqlens = e.cu_seqlens.to(torch::kLong);
  other.advantages = torch::stack({e.advantages, e.advantages}, 1).select(1, 0);
  ASSERT_FALSE(other.advantages.is_contiguous());
  const LossOutputs out = policy_loss(other, logprobs, kIcepop);
  EXPECT_TRUE(testing::same_bits(out.loss, expected.loss));
  EXPECT_TRUE(testing::same_bits(out.g, expected.g));
}

TEST(PolicyLoss, KnowsShapesWithoutData) {
  const Example e;
  const Tensor logprobs = torch::empty({31}, torch::device(torch::kMeta)).set_requires_grad(true);
  const LossOutputs out = policy_loss(e, logprobs, kIcepop);
  EXPECT_EQ(out.loss.dim(), 0);
  EXPECT_EQ(out.g.sizes(), logprobs.sizes());
  EXPECT_EQ(out.metrics.sizes(), c10::IntArrayRef({MetricSums::kFlatSize}));
}

// ---------------------------------------------------------------------------------------------
// Metrics

TEST(Metrics, OfPartsJoinToThoseOfTheWhole) {
  const Example e;
  const Tensor logprobs = e.double_logprobs().detach().to(torch::kFloat);
  const double trained = e.mask.sum().item<double>();
  const LossOutputs whole = policy_loss(e, logprobs, kIcepop);
  std::vector<Tensor> rows;
  Tensor loss = torch::zeros({});
  for (const auto& [begin, end, first, last] : {std::tuple{0, 10, 0, 2}, {10, 31, 2, 4}}) {
    Example part = e;
    part.cu_seqlens = e.cu_seqlens.slice(0, first, last + 1) - e.cu_seqlens[first];
    for (Tensor* stream :
         {&part.mask, &part.advantages, &part.rollout, &part.prox, &part.ref, &part.teacher}) {
      *stream = stream->slice(0, begin, end);
    }
    const LossOutputs out = policy_loss(part, logprobs.slice(0, begin, end), kIcepop, trained);
    rows.push_back(out.metrics);
    loss += out.loss;
  }
  expect_close(loss, whole.loss, 1e-5, "loss");
  const Tensor joined = finalize_metrics(rows, kIcepop);
  const Tensor expected = finalize_metrics({whole.metrics}, kIcepop);
  ASSERT_EQ(joined.size(0), static_cast<int64_t>(metric_names(kIcepop).size()));
  EXPECT_TRUE(torch::allclose(joined, expected, 1e-5, 1e-7, true)) << joined << expected;
}

TEST(Metrics, HaveTheNamesThatApplyToTheSpec) {
  auto has = [](const std::string& spec, const std::string& name) {
    const std::vector<std::string> names = metric_names(spec);
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const char* name :
       {"mismatch_kl", "is_masked", "effective_sample_size", "ref_kl", "tokens"}) {
    EXPECT_TRUE(has(kIcepop, name)) << name;
  }
  EXPECT_FALSE(has(kIcepop, "clip_fraction_binding"));
  EXPECT_TRUE(has(spec_of("ppo"), "clip_fraction_binding"));
  EXPECT_FALSE(has(spec_of("ppo"), "weight_mean"));
  EXPECT_TRUE(has(spec_of("ppo+tis"), "weight_mean"));
}

TEST(Metrics, AreRightAndNanWhereTheBatchLacksTheStream) {
  Example e;
  const Tensor pi = e.double_logprobs().detach();
  const Tensor logprobs = pi.to(torch::kFloat);
  const Tensor m = e.mask;
  const Tensor full = policy_loss(e, logprobs, kIcepop).metrics;
  const Tensor x = (pi - e.rollout.to(torch::kDouble)).index({m});
  EXPECT_NEAR(metric(full, kIcepop, "mismatch_kl"), (x.exp() - 1 - x).mean().item<double>(), 1e-5);
  EXPECT_NEAR(metric(full, kIcepop, "teacher_kl"),
              (e.teacher.to(torch::kDouble) - pi).index({m}).mean().item<double>(), 1e-5);
  EXPECT_EQ(metric(full, kIcepop, "tokens"), m.sum().item<double>());
  EXPECT_TRUE(std::isnan(metric(full, kIcepop, "version_max")));

  e.versions = torch::arange(31, torch::kLong);
  e.ref = e.teacher = e.prox = Tensor();
  const Tensor bare = policy_loss(e, logprobs, kIcepop).metrics;
  EXPECT_TRUE(std::isnan(metric(bare, kIcepop, "ref_kl")));
  EXPECT_TRUE(std::isnan(metric(bare, kIcepop, "teacher_kl")));
  EXPECT_EQ(metric(bare, kIcepop, "mismatch_kl"), metric(full, kIcepop, "mismatch_kl"));
  EXPECT_EQ(metric(bare, kIcepop, "version_max"), m.nonzero().max().item<double>());
  // Combined with a row that has it, a mean over both is still undefined.
  const std::vector<std::string> names = metric_names(kIcepop);
  const Tensor joined = finalize_metrics({full, bare}, kIcepop);
  for (size_t i = 0; i < names.size(); ++i) {
    const double value = joined[static_cast<int64_t>(i)].item<double>();
    EXPECT_EQ(std::isnan(value), names[i] == "ref_kl" || names[i] == "teacher_kl") << names[i];
  }
}

TEST(Metrics, OfNoRowsAreThoseOfNoTokens) {
  const Tensor none = finalize_metrics({}, kIcepop);
  EXPECT_EQ(none.size(0), static_cast<int64_t>(metric_names(kIcepop).size()));
}

TEST(Metrics, RefuseWhatIsNoRow) {
  const Tensor row = torch::zeros({MetricSums::kFlatSize}, torch::kDouble);
  auto refused = [&](const Tensor& bad) {
    return error_of([&] { finalize_metrics({row, bad}, kIcepop); });
  };
  expect_words(refused(torch::zeros({5}, torch::kDouble)), {"metrics[1] must be", "[5]"});
  expect_words(refused(row.to(torch::kFloat)), {"metrics[1] must be", "Float"});
  expect_words(refused(row.unsqueeze(0)), {"metrics[1] must be"});
  expect_words(refused(row - 1.0), {"metrics[1]", "-1"});
  expect_words(refused(row + std::nan("")), {"metrics[1]", "nan"});
  expect_words(error_of([&] { finalize_metrics({row}, "{}"); }), {"spec_json", "preset"});
  expect_words(error_of([&] { metric_names(spec_of("nothing_like_it")); }),
               {"spec_json", "nothing_like_it"});
}

// ---------------------------------------------------------------------------------------------
// What is refused

TEST(PolicyLoss, RefusesBadArgumentsByName) {
  const Tensor logprobs = Example().double_logprobs().detach().to(torch::kFloat);
  auto refused = [&](auto change) {
    Example e;
    change(e);
    return error_of([&] { policy_loss(e, logprobs, kIcepop); });
  };
  auto offsets = [](std::vector<int> values) { return torch::tensor(values, torch::kInt); };
  expect_words(refused([&](Example& e) {
                 e.cu_seqlens = offsets({1, 31});
               }),
               {"cu_seqlens[0] = 1", "must be 0"});
  expect_words(refused([&](Example& e) {
                 e.cu_seqlens = offsets({0, 9, 8, 31});
               }),
               {"cu_seqlens[2] = 8", "9"});
  expect_words(refused([&](Example& e) {
                 e.cu_seqlens = offsets({0, 30});
               }),
               {"cu_seqlens ends at 30", "logprobs has 31 tokens"});
  expect_words(refused([&](Example& e) { e.cu_seqlens = offsets({0}); }),
               {"cu_seqlens must be [sequences + 1]", "int32 [1]"});
  expect_words(refused([&](Example& e) { e.cu_seqlens = e.cu_seqlens.to(torch::kFloat); }),
               {"cu_seqlens must be int32 or int64", "float32 [5]"});
  expect_words(refused([](Example& e) { e.mask = e.mask.to(torch::kFloat); }),
               {"mask must be bool or uint8", "float32 [31]"});
  expect_words(refused([](Example& e) { e.mask = e.mask.unsqueeze(0); }),
               {"mask must be [31], one value for each token of logprobs", "bool [1, 31]"});
  expect_words(refused([](Example& e) { e.versions = e.mask.to(torch::kFloat); }),
               {"versions must be int32 or int64"});
  expect_words(refused([](Example& e) { e.versions = torch::ones({30}, torch::kLong); }),
               {"versions must be [31]", "int64 [30]"});
  expect_words(
      refused([](Example& e) { e.versions = torch::full({31}, int64_t{1} << 40, torch::kLong); }),
      {"versions[0] = 1099511627776", "32 bits"});
  using Field = std::pair<std::string, std::function<void(Example&, const Tensor&)>>;
  const std::vector<Field> streams = {
      {"advantages", [](Example& e, const Tensor& t) { e.advantages = t; }},
      {"rollout_logprobs", [](Example& e, const Tensor& t) { e.rollout = t; }},
      {"prox_logprobs", [](Example& e, const Tensor& t) { e.prox = t; }},
      {"ref_logprobs", [](Example& e, const Tensor& t) { e.ref = t; }},
      {"teacher_logprobs", [](Example& e, const Tensor& t) { e.teacher = t; }},
      {"weights", [](Example& e, const Tensor& t) { e.weights = t; }}};
  for (const auto& [name, set] : streams) {
    expect_words(refused([&](Example& e) { set(e, torch::ones({31}, torch::kDouble)); }),
                 {name + " must be float32, got float64 [31]"});
    expect_words(refused([&](Example& e) { set(e, torch::ones({31}, torch::kBFloat16)); }),
                 {name + " must be float32, got bfloat16 [31]"});
    expect_words(refused([&](Example& e) { set(e, torch::ones({30})); }),
                 {name + " must be [31], one value for each token of logprobs, got float32 [30]"});
  }
  const Example e;
  expect_words(error_of([&] { policy_loss(e, logprobs.to(torch::kDouble), kIcepop); }),
               {"logprobs must be float32", "float64"});
  expect_words(error_of([&] { policy_loss(e, logprobs.unsqueeze(0), kIcepop); }),
               {"logprobs must be [tokens]", "[1, 31]"});
  for (const double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
    expect_words(error_of([&] { policy_loss(e, logprobs, kIcepop, bad); }),
                 {"denominator = ", "finite"});
  }
}

TEST(PolicyLoss, CountsSamplesOfOneRolloutOnce) {
  Example e;
  e.rollout_ids = torch::tensor({3, 3, 1, 3}, torch::kLong);
  const Tensor logprobs = e.double_logprobs().detach().to(torch::kFloat);
  const std::string spec = R"({"preset": "reinforce", "reduction": "seq_mean_token_mean"})";
  const Tensor terms = torch::where(e.mask, -e.advantages * logprobs, torch::zeros({31}));
  const Tensor unit = torch::zeros({31}, torch::kBool);
  unit.slice(0, 10, 27).fill_(true);  // the third sequence
  double expected = 0.0;
  for (const Tensor& part : {unit, unit.logical_not()}) {
    const Tensor here = part.logical_and(e.mask);
    expected += (terms * here).sum().item<double>() / here.sum().item<double>() / 2.0;
  }
  EXPECT_NEAR(policy_loss(e, logprobs, spec).loss.item<double>(), expected, 1e-6);
  e.rollout_ids = torch::tensor({3, 3}, torch::kLong);
  expect_words(error_of([&] { policy_loss(e, logprobs, spec); }),
               {"rollout_ids must be [4], one value for each sequence"});
}

TEST(PolicyLoss, TakesTheResultsOfCorrectionsThatTheCallerComputes) {
  const auto announce = [](const std::string& json) {
    testing::typed_op<void(std::string)>("_set_corrections").call(json);
  };
  announce(R"([{"name": "own", "formula": "a clipped ratio", "summary": "", "reads": ["rollout"],
                "keys": [{"name": "own_high", "default": 2.0, "meaning": ""}]}])");
  Example e;
  const Tensor logprobs = e.double_logprobs().detach().to(torch::kFloat);
  const std::string spec = R"({"preset": "reinforce+own", "own_high": 2})";
  expect_words(error_of([&] { policy_loss(e, logprobs, spec); }),
               {"own", "computed by the caller", "correction_weights"});
  e.correction_weights = (logprobs - e.rollout).exp().clamp_max(2.0);
  const LossOutputs own = policy_loss(e, logprobs, spec);
  Example plain;
  const LossOutputs cispo = policy_loss(plain, logprobs, R"({"preset": "cispo", "ratio_high": 2})");
  expect_close(own.loss, cispo.loss, 1e-6, "loss");
  expect_close(own.g, cispo.g, 1e-6, "gradient");
  // A mask takes tokens out and leaves the denominator.
  e.correction_mask = torch::arange(31) % 2 == 0;
  const LossOutputs half = policy_loss(e, logprobs, spec);
  expect_close(half.g, own.g * *e.correction_mask, 1e-6, "masked gradient");
  expect_words(error_of([&] { policy_loss(e, logprobs, kIcepop); }), {"icepop", "it has none"});
  const std::string misspelt = R"({"preset": "icepop+own", "own_hig": 1})";
  expect_words(error_of([&] { policy_loss(e, logprobs, misspelt); }), {"did you mean own_high?"});
  const std::string taken =
      R"([{"name": "tis", "formula": "", "summary": "", "reads": [], "keys": []}])";
  expect_words(error_of([&] { announce(taken); }), {"tis", "taken"});
  announce("[]");
  expect_words(error_of([&] { policy_loss(e, logprobs, spec); }), {"there is no correction own"});
}

TEST(PolicyLoss, PassesTheErrorsOfTheCoreInTheirOwnWords) {
  Example e;
  const Tensor logprobs = e.double_logprobs().detach().to(torch::kFloat);
  expect_words(error_of([&] { policy_loss(e, logprobs, "{\"preset\": \"icepoop\"}"); }),
               {"spec_json", "did you mean icepop?"});
  Tensor bad = logprobs.clone();
  e.mask = torch::ones({31}, torch::kBool);
  bad[12] = std::nanf("");
  EXPECT_EQ(
      error_of([&] { policy_loss(e, bad, kIcepop); }),
      "sequence 2, position 2: pi is nan on a token that takes part in the loss; mask the "
      "token or repair the value; if a policy in training computed it, lower the learning rate");
  e.prox = Tensor();
  expect_words(error_of([&] { policy_loss(e, logprobs, spec_of("ppo")); }), {"ppo", "\"prox\""});
}

}  // namespace
}  // namespace leeway
