// The one-pass operator against plain torch in double and against its own two stages; which
// gradients are computed, and only once.

#include "leeway/metrics.h"
#include "torch/ops/ops_test_support.h"

namespace leeway {
namespace {

using testing::error_of;
using testing::Example;
using testing::expect_close;
using testing::expect_words;
using testing::HeadOutputs;
using testing::policy_head;
using testing::policy_loss;
using testing::same_bits;
using testing::token_logprobs;
using testing::wanted_of;

std::string spec_of(const std::string& preset) { return "{\"preset\": \"" + preset + "\"}"; }
const std::string kIcepop = spec_of("icepop");

Tensor plain_icepop(const Example& e, const Tensor& hidden, const Tensor& weight) {
  const Tensor r =
      (e.chosen(e.double_log_softmax(hidden, weight)) - e.rollout.to(torch::kDouble)).exp();
  const Tensor m = e.mask.to(torch::kDouble);
  const Tensor keep = (r >= 0.2) & (r <= 5.0);
  return -(e.advantages.to(torch::kDouble) * r * keep * m).sum() / m.sum();
}

TEST(PolicyHeadOp, AgreesWithPlainTorchInDouble) {
  for (int variant = 0; variant < 4; ++variant) {
    Example e(variant + 1, 6, 15 + variant);
    if (variant & 1) e.list_rows();
    if (variant & 2) e.temperature = torch::rand({e.tokens()}) + 0.5;
    const Tensor h = e.hidden.detach().to(torch::kDouble).set_requires_grad(true);
    const Tensor w = e.weight.detach().to(torch::kDouble).set_requires_grad(true);
    const Tensor expected = plain_icepop(e, h, w);
    expected.backward();
    const HeadOutputs out = policy_head(e, kIcepop);
    out.loss.backward();
    expect_close(out.loss, expected, 2e-5, "loss");
    expect_close(e.hidden.grad(), h.grad(), 2e-5, "hidden");
    expect_close(e.weight.grad(), w.grad(), 2e-5, "weight");
  }
}

TEST(PolicyHeadOp, AgreesWithItsTwoStages) {
  for (const char* preset : {"icepop", "ppo+tis", "cispo", "dppo_kl", "gspo", "m2po", "geo_mask",
                             "slime/ppo", "verl/vanilla"}) {
    for (const bool listed : {false, true}) {
      Example one(4), two(4);
      if (listed) one.list_rows(), two.list_rows();
      const HeadOutputs out = policy_head(one, spec_of(preset), 40.0);
      out.loss.backward();
      const auto [logprobs, entropy] = token_logprobs(two);
      const auto stages = policy_loss(two, logprobs, spec_of(preset), 40.0);
      stages.loss.backward();
      EXPECT_TRUE(same_bits(out.loss, stages.loss)) << preset;
      EXPECT_TRUE(same_bits(out.logprobs, logprobs)) << preset;
      EXPECT_TRUE(same_bits(out.entropy, entropy)) << preset;
      EXPECT_TRUE(same_bits(out.metrics.nan_to_num(), stages.metrics.nan_to_num())) << preset;
      expect_close(one.hidden.grad(), two.hidden.grad(), 1e-6, preset);
      expect_close(one.weight.grad(), two.weight.grad(), 1e-6, preset);
    }
  }
}

TEST(PolicyHeadOp, TakesBfloat16AndReturnsGradientsOfTheSameDtype) {
  Example e;
  e.renew(torch::kBFloat16);
  const Tensor h = e.hidden.detach().to(torch::kDouble).set_requires_grad(true);
  const Tensor w = e.weight.detach().to(torch::kDouble).set_requires_grad(true);
  plain_icepop(e, h, w).backward();
  const HeadOutputs out = policy_head(e, kIcepop);
  EXPECT_EQ(out.logprobs.scalar_type(), torch::kFloat);
  out.loss.backward();
  EXPECT_EQ(e.hidden.grad().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(e.weight.grad().scalar_type(), torch::kBFloat16);
  expect_close(e.hidden.grad(), h.grad(), 0x1p-8, "hidden");
  expect_close(e.weight.grad(), w.grad(), 0x1p-8, "weight");
}

TEST(PolicyHeadOp, ScalesByTheGradientThatComesIn) {
  Example one, three;
  policy_head(one, kIcepop).loss.backward();
  (policy_head(three, kIcepop).loss * 3.0).backward();
  expect_close(three.hidden.grad(), 3.0 * one.hidden.grad(), 1e-6, "hidden");
  expect_close(three.weight.grad(), 3.0 * one.weight.grad(), 1e-6, "weight");
  Example zero;
  (policy_head(zero, kIcepop).loss * 0.0).backward();
  EXPECT_EQ(zero.weight.grad().abs().max().item<float>(), 0.0f);
}

TEST(PolicyHeadOp, RefusesASecondBackwardAndASecondDerivative) {
  Example e;
  const HeadOutputs out = policy_head(e, kIcepop);
  out.loss.backward({}, true);
  const Tensor first = e.weight.grad().clone();
  for (int again = 0; again < 2; ++again) {
    expect_words(error_of([&] { out.loss.backward({}, true); }),
                 {"policy_head", "second backward", "forward pass"});
  }
  EXPECT_TRUE(same_bits(e.weight.grad(), first));
  expect_words(error_of([] {
                 Example other;
                 const HeadOutputs fresh = policy_head(other, kIcepop);
                 torch::autograd::grad({fresh.loss}, {other.weight}, {}, true, true);
               }),
               {"policy_head", "second derivative"});
}

TEST(PolicyHeadOp, HoldsOnToNoGradientAfterBackward) {
  Example e;
  const HeadOutputs out = policy_head(e, kIcepop);
  out.loss.backward({}, true);
  EXPECT_EQ(e.weight.grad().storage().use_count(), 1u);
  EXPECT_EQ(e.hidden.grad().storage().use_count(), 1u);
}

TEST(PolicyHeadOp, IsDifferentiableInItsLossAlone) {
  Example e;
  const HeadOutputs out = policy_head(e, kIcepop);
  EXPECT_TRUE(out.loss.requires_grad());
  for (const Tensor& t : {out.logprobs, out.entropy, out.metrics}) EXPECT_FALSE(t.requires_grad());
}

TEST(PolicyHeadOp, ComputesTheGradientsThatAreNeeded) {
  Example both;
  policy_head(both, kIcepop).loss.backward();
  for (const bool hidden : {false, true}) {
    Example e;
    e.hidden.set_requires_grad(hidden);
    e.weight.set_requires_grad(!hidden);
    policy_head(e, kIcepop).loss.backward();
    EXPECT_EQ(e.hidden.grad().defined(), hidden);
    EXPECT_EQ(e.weight.grad().defined(), !hidden);
    EXPECT_TRUE(hidden ? same_bits(e.hidden.grad(), both.hidden.grad())
                       : same_bits(e.weight.grad(), both.weight.grad()));
  }
}

TEST(PolicyHeadOp, AsksForNoGradientThatIsNotNeeded) {
  for (const bool hidden : {false, true}) {
    for (const bool weight : {false, true}) {
      Example e;
      e.hidden.set_requires_grad(hidden);
      e.weight.set_requires_grad(weight);
      const auto run = [&] { policy_head(e, kIcepop); };
      EXPECT_EQ(wanted_of("_policy_head", run), testing::Wanted({{hidden, weight}}));
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(wanted_of("_policy_head", run), testing::Wanted({{false, false}}));
    }
  }
}

TEST(PolicyHeadOp, HasTheSameLossWithoutGrad) {
  Example e;
  const Tensor expected = policy_head(e, kIcepop).loss.detach();
  {
    const torch::NoGradGuard no_grad;
    const HeadOutputs out = policy_head(e, kIcepop);
    EXPECT_FALSE(out.loss.requires_grad());
    EXPECT_EQ(out.loss.grad_fn(), nullptr);
    EXPECT_TRUE(same_bits(out.loss, expected));
  }
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(same_bits(policy_head(e, kIcepop).loss, expected));
  }
  e.hidden.set_requires_grad(false);
  e.weight.set_requires_grad(false);
  EXPECT_FALSE(policy_head(e, kIcepop).loss.requires_grad());
}

// The weight is also the embedding: its gradient is the sum of both uses.
TEST(PolicyHeadOp, TakesATiedWeight) {
  Example e(2, 7, 23);
  const Tensor inputs = torch::randint(23, {e.tokens()}, torch::kLong);
  const Tensor w = e.weight.detach().to(torch::kDouble).set_requires_grad(true);
  e.hidden = e.weight.index_select(0, inputs).tanh();
  const Tensor h = w.index_select(0, inputs).tanh();
  plain_icepop(e, h, w).backward();
  policy_head(e, kIcepop).loss.backward();
  expect_close(e.weight.grad(), w.grad(), 2e-5, "tied weight");
}

TEST(PolicyHeadOp, MicroBatchesWithTheGlobalDenominatorAddUp) {
  for (const char* preset : {"icepop", "gspo", "grpo+tis"}) {
    Example whole(6);
    policy_head(whole, spec_of(preset)).loss.backward();
    Example parts(6);
    const double trained = parts.mask.sum().item<double>();
    double loss = 0.0;
    for (const auto& [begin, end, first, last] : {std::tuple{0, 10, 0, 2}, {10, 31, 2, 4}}) {
      Example part = parts;
      part.cu_seqlens = parts.cu_seqlens.slice(0, first, last + 1) - parts.cu_seqlens[first];
      for (Tensor* t : {&part.hidden, &part.targets, &part.mask, &part.advantages, &part.rollout,
                        &part.prox, &part.ref, &part.teacher}) {
        *t = t->slice(0, begin, end);
      }
      const HeadOutputs out = policy_head(part, spec_of(preset), trained);
      out.loss.backward();
      loss += out.loss.item<double>();
    }
    EXPECT_NEAR(loss, policy_head(whole, spec_of(preset)).loss.item<double>(), 1e-5);
    expect_close(parts.hidden.grad(), whole.hidden.grad(), 2e-5, preset);
    expect_close(parts.weight.grad(), whole.weight.grad(), 2e-5, preset);
  }
}

TEST(PolicyHeadOp, KnowsShapesWithoutData) {
  Example e;
  e.hidden = torch::empty({31, 7}, torch::device(torch::kMeta)).set_requires_grad(true);
  e.weight = torch::empty({23, 7}, torch::device(torch::kMeta)).set_requires_grad(true);
  e.targets = torch::empty({31}, torch::dtype(torch::kLong).device(torch::kMeta));
  const HeadOutputs out = policy_head(e, kIcepop);
  EXPECT_EQ(out.loss.dim(), 0);
  EXPECT_EQ(out.logprobs.sizes(), c10::IntArrayRef({31}));
  EXPECT_EQ(out.metrics.sizes(), c10::IntArrayRef({MetricSums::kFlatSize}));
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(policy_head(e, kIcepop).entropy.sizes(), c10::IntArrayRef({31}));
}

TEST(PolicyHeadOp, RefusesWhatItsPartsRefuse) {
  auto refused = [](auto change) {
    Example e;
    change(e);
    return error_of([&] { policy_head(e, kIcepop); });
  };
  expect_words(refused([](Example& e) { e.weight = e.weight.to(torch::kBFloat16); }),
               {"hidden and weight must have one dtype"});
  expect_words(refused([](Example& e) { e.mask = e.mask.slice(0, 1); }),
               {"mask must be [31], one value for each token of hidden", "bool [30]"});
  expect_words(refused([](Example& e) {
                 e.cu_seqlens = torch::tensor({0, 30});
               }),
               {"cu_seqlens ends at 30", "hidden has 31 tokens"});
  expect_words(refused([](Example& e) { e.advantages = e.advantages.to(torch::kDouble); }),
               {"advantages must be float32"});
  expect_words(refused([](Example& e) {
                 e.mask = torch::ones({31}, torch::kBool);
                 e.rows = torch::arange(30, torch::kLong);
               }),
               {"sequence 3, position 3 (token 30) is not among the rows"});
  expect_words(refused([](Example& e) {
                 e.mask = torch::ones({31}, torch::kBool);
                 e.hidden = e.hidden.detach().clone();
                 e.hidden[12][3] = std::nanf("");
               }),
               {"sequence 2, position 2", "pi", "nan"});
  expect_words(error_of([] { policy_head(Example(), "{}"); }), {"spec_json", "preset"});
  expect_words(error_of([] { policy_head(Example(), kIcepop, std::nan("")); }), {"denominator"});
}

// ---------------------------------------------------------------------------------------------
// What other programs rely on

TEST(PolicyHeadOp, OptionsChangeMemoryAndTypesAlone) {
  Example plain(4), small(4);
  plain.renew(at::kBFloat16), small.renew(at::kBFloat16);
  small.chunk_bytes = 1;
  policy_head(plain, kIcepop).loss.backward();
  policy_head(small, kIcepop).loss.backward();
  EXPECT_TRUE(same_bits(plain.weight.grad(), small.weight.grad()));
  const Tensor g = torch::randn({plain.tokens()});
  small.float32_weight_gradient = true;
  const auto narrow = testing::head_backward(plain, g), wide = testing::head_backward(small, g);
  EXPECT_EQ(std::get<1>(wide).scalar_type(), at::kFloat);
  EXPECT_TRUE(same_bits(std::get<1>(wide).to(at::kBFloat16), std::get<1>(narrow)));
  small.chunk_bytes = -1;
  expect_words(error_of([&] { policy_head(small, kIcepop); }), {"chunk_bytes = -1"});
}

TEST(PolicyHead, TakesItsOwnLogprobsForTheProximalOnes) {
  for (const char* preset : {"ppo", "gspo"}) {
    const std::string spec = std::string("{\"preset\": \"") + preset + "\"}";
    Example e;
    e.prox = std::get<0>(token_logprobs(e)).detach();
    const HeadOutputs recorded = policy_head(e, spec);
    recorded.loss.backward();
    const Tensor d_hidden = e.hidden.grad().clone();
    e.renew();
    expect_words(error_of([&] {
                   Example both = e;
                   both.prox_is_pi = true;
                   policy_head(both, spec);
                 }),
                 {"prox_logprobs are given", "prox_is_pi"});
    e.prox = Tensor();
    e.prox_is_pi = true;
    const HeadOutputs own = policy_head(e, spec);
    own.loss.backward();
    EXPECT_TRUE(same_bits(own.loss, recorded.loss)) << preset;
    EXPECT_TRUE(same_bits(e.hidden.grad(), d_hidden)) << preset;
  }
}

TEST(Library, HasTheSchemasOfItsContract) {
  const std::string streams =
      "Tensor cu_seqlens, Tensor mask, Tensor advantages, Tensor rollout_logprobs, "
      "Tensor? prox_logprobs, Tensor? ref_logprobs, Tensor? teacher_logprobs, Tensor? weights, "
      "Tensor? versions";
  const std::string head = "Tensor hidden, Tensor weight, Tensor targets";
  // Beyond the contract, and never in the way of a call that follows it.
  const std::string options =
      ", *, int chunk_bytes=0, bool invariant=False, bool float32_logits=False, "
      "bool float32_weight_gradient=False";
  const std::vector<std::string> schemas = {
      "token_logprobs(" + head + ", Tensor? rows, Tensor? temperature" + options +
          ") -> (Tensor logprobs, Tensor entropy)",
      "policy_loss(Tensor logprobs, " + streams +
          ", str spec_json, float denominator, *, Tensor? rollout_ids=None, "
          "Tensor? correction_weights=None, Tensor? correction_mask=None) -> (Tensor loss, Tensor "
          "g, "
          "Tensor metrics)",
      "head_backward(" + head + ", Tensor g, Tensor? rows, Tensor? temperature" + options +
          ") -> (Tensor d_hidden, Tensor d_weight)",
      "policy_head(" + head + ", Tensor? rows, " + streams +
          ", Tensor? temperature, str spec_json, float denominator" + options +
          ", Tensor? rollout_ids=None, bool prox_is_pi=False) -> (Tensor loss, "
          "Tensor logprobs, Tensor entropy, Tensor metrics)",
      "metric_names(str spec_json) -> str[]",
      "finalize_metrics(Tensor[] metrics, str spec_json) -> Tensor"};
  for (const std::string& schema : schemas) {
    const std::string name = "leeway::" + schema.substr(0, schema.find('('));
    const auto found = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
    std::ostringstream text;
    text << found.schema();
    EXPECT_EQ(text.str(), "leeway::" + schema);
  }
}

}  // namespace
}  // namespace leeway
