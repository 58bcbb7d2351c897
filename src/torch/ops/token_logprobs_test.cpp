// The head without a loss against torch's own log_softmax and autograd, in double.

#include <thread>

#include "torch/ops/ops_test_support.h"
#include "torch/ops/tensors.h"

namespace leeway {
namespace {

using testing::error_of;
using testing::Example;
using testing::expect_close;
using testing::expect_words;
using testing::head_backward;
using testing::same_bits;
using testing::token_logprobs;

// The sum of both outputs with random factors, and the same by torch in double. Tokens that are not
// rows are excluded.
struct Sums {
  Tensor by_op, by_torch;
};

Sums sums_of(const Example& e, bool with_entropy, const Tensor& double_hidden,
             const Tensor& double_weight) {
  const auto [logprobs, entropy] = token_logprobs(e);
  const Tensor a = torch::randn({e.tokens()}), b = torch::randn({e.tokens()});
  Tensor by_op = (logprobs * a).sum();
  if (with_entropy) by_op = by_op + (entropy * b).sum();
  Tensor rows = torch::ones({e.tokens()}, torch::kDouble);
  if (e.rows) rows = torch::zeros({e.tokens()}, torch::kDouble).index_fill(0, *e.rows, 1.0);
  const Tensor log_p = e.double_log_softmax(double_hidden, double_weight);
  const Tensor expected = e.chosen(log_p) * rows, expected_entropy = -(log_p.exp() * log_p).sum(1);
  Tensor by_torch = (expected * a).sum();
  if (with_entropy) by_torch = by_torch + (expected_entropy * rows * b).sum();
  expect_close(logprobs, expected, 1e-5, "logprobs");
  expect_close(entropy, expected_entropy * rows, 1e-5, "entropy");
  return {by_op, by_torch};
}

TEST(TokenLogprobs, AgreesWithTorchInDoubleAndSoDoItsGradients) {
  for (const int64_t vocabulary : {2, 16, 23, 40}) {
    for (int variant = 0; variant < 8; ++variant) {
      Example e(variant + 1, 5, vocabulary);
      if (variant & 1) e.list_rows();
      if (variant & 2) e.temperature = torch::rand({e.tokens()}) + 0.5;
      if (variant == 4) e.temperature = torch::tensor(0.7f);
      if (variant == 5) e.temperature = torch::tensor({1.3f});
      const Tensor h = e.hidden.detach().to(torch::kDouble).set_requires_grad(true);
      const Tensor w = e.weight.detach().to(torch::kDouble).set_requires_grad(true);
      const Sums sums = sums_of(e, variant >= 4, h, w);
      sums.by_op.backward();
      sums.by_torch.backward();
      expect_close(e.hidden.grad(), h.grad(), 2e-5, "hidden");
      expect_close(e.weight.grad(), w.grad(), 2e-5, "weight");
    }
  }
}

TEST(TokenLogprobs, TakesBfloat16AndReturnsGradientsOfTheSameDtype) {
  Example e;
  e.renew(torch::kBFloat16);
  const Tensor h = e.hidden.detach().to(torch::kDouble).set_requires_grad(true);
  const Tensor w = e.weight.detach().to(torch::kDouble).set_requires_grad(true);
  const Sums sums = sums_of(e, true, h, w);
  sums.by_op.backward();
  sums.by_torch.backward();
  EXPECT_EQ(e.hidden.grad().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(e.weight.grad().scalar_type(), torch::kBFloat16);
  expect_close(e.hidden.grad(), h.grad(), 0x1p-8, "hidden");
  expect_close(e.weight.grad(), w.grad(), 0x1p-8, "weight");
}

TEST(TokenLogprobs, GradientIsTheDifferenceQuotient) {
  Example e(3, 2, 5);
  const auto value = [&] {
    const torch::NoGradGuard no_grad;
    const auto [logprobs, entropy] = token_logprobs(e);
    return (logprobs.sum() + 2.0 * entropy.sum()).item<double>();
  };
  const auto [logprobs, entropy] = token_logprobs(e);
  (logprobs.sum() + 2.0 * entropy.sum()).backward();
  const double step = 0x1p-6;
  for (const Tensor& parameter : {e.weight, e.hidden}) {
    float* data = parameter.data_ptr<float>();
    for (int64_t i = 0; i < parameter.numel(); i += 3) {
      const float held = data[i];
      data[i] = held + static_cast<float>(step);
      const double up = value();
      data[i] = held - static_cast<float>(step);
      const double down = value();
      data[i] = held;
      EXPECT_NEAR(parameter.grad().flatten()[i].item<double>(), (up - down) / (2 * step), 2e-2);
    }
  }
}

TEST(TokenLogprobs, ComputesTheGradientsThatAreNeeded) {
  Example both;
  std::get<0>(token_logprobs(both)).sum().backward();
  for (const bool hidden : {false, true}) {
    Example e;
    e.hidden.set_requires_grad(hidden);
    e.weight.set_requires_grad(!hidden);
    const auto run = [&] { std::get<0>(token_logprobs(e)).sum().backward(); };
    EXPECT_EQ(testing::wanted_of("_head_backward", run), testing::Wanted({{hidden, !hidden}}));
    EXPECT_EQ(e.hidden.grad().defined(), hidden);
    EXPECT_EQ(e.weight.grad().defined(), !hidden);
    if (hidden) {
      EXPECT_TRUE(same_bits(e.hidden.grad(), both.hidden.grad()));
    } else {
      EXPECT_TRUE(same_bits(e.weight.grad(), both.weight.grad()));
    }
  }
  Example none;
  none.hidden.set_requires_grad(false);
  none.weight.set_requires_grad(false);
  EXPECT_FALSE(std::get<0>(token_logprobs(none)).requires_grad());
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(std::get<0>(token_logprobs(both)).requires_grad());
  EXPECT_FALSE(std::get<1>(token_logprobs(both)).requires_grad());
}

TEST(TokenLogprobs, TakesOneOutputsGradientWithoutTheOthers) {
  Example e;
  const auto [logprobs, entropy] = token_logprobs(e);
  const auto by_both =
      torch::autograd::grad({logprobs.sum() + entropy.sum()}, {e.weight}, {}, true);
  const auto by_logprobs = torch::autograd::grad({logprobs.sum()}, {e.weight}, {}, true);
  const auto by_entropy = torch::autograd::grad({entropy.sum()}, {e.weight});
  expect_close(by_both[0], by_logprobs[0] + by_entropy[0], 1e-5, "sum of parts");
}

TEST(TokenLogprobs, TakesViewsWithoutCopies) {
  Example e;
  const auto [expected, expected_entropy] = token_logprobs(e);
  Example views = e;
  views.hidden = e.hidden.detach().t().contiguous().t();
  views.weight = torch::stack({e.weight.detach(), e.weight.detach()}, 2).select(2, 1);
  views.targets = torch::stack({e.targets, e.targets}, 1).select(1, 0);
  ASSERT_FALSE(views.hidden.is_contiguous() || views.weight.is_contiguous());
  const auto [logprobs, entropy] = token_logprobs(views);
  EXPECT_TRUE(same_bits(logprobs, expected));
  EXPECT_TRUE(same_bits(entropy, expected_entropy));
}

TEST(TokenLogprobs, HasTheSameBitsWhateverTheThreadsAndWhoeverCallsBeside) {
  Example e;
  const int threads = at::get_num_threads();
  const auto [expected, expected_entropy] = token_logprobs(e);
  for (const int count : {1, 3, 2}) {
    at::set_num_threads(count);
    EXPECT_TRUE(same_bits(std::get<0>(token_logprobs(e)), expected)) << count;
    EXPECT_EQ((*PoolLease()).threads(), count);
  }
  at::set_num_threads(threads);
  std::vector<std::thread> callers;
  std::atomic<int> right{0};
  for (int k = 0; k < 4; ++k) {
    callers.emplace_back([&] {
      for (int i = 0; i < 20; ++i) right += same_bits(std::get<0>(token_logprobs(e)), expected);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(right, 80);
}

TEST(HeadBackward, IsTheGradientOfAnyLossOfTheLogprobs) {
  Example e;
  e.list_rows();
  const auto [logprobs, entropy] = token_logprobs(e);
  const Tensor loss = logprobs.tanh().sum();
  const Tensor g = torch::autograd::grad({loss}, {logprobs}, {}, true)[0];
  loss.backward();
  const auto [d_hidden, d_weight] = head_backward(e, g);
  EXPECT_TRUE(same_bits(d_hidden, e.hidden.grad()));
  EXPECT_TRUE(same_bits(d_weight, e.weight.grad()));
  EXPECT_FALSE(d_hidden.requires_grad());
}

TEST(TokenLogprobs, RefusesASecondDerivative) {
  Example e;
  const auto [logprobs, entropy] = token_logprobs(e);
  expect_words(error_of([&, value = logprobs] {
                 torch::autograd::grad({value.sum()}, {e.weight}, {}, true, true);
               }),
               {"token_logprobs", "second derivative"});
}

TEST(TokenLogprobs, KnowsShapesWithoutData) {
  Example e;
  const auto options = torch::dtype(torch::kBFloat16).device(torch::kMeta);
  e.hidden = torch::empty({31, 7}, options).set_requires_grad(true);
  e.weight = torch::empty({23, 7}, options).set_requires_grad(true);
  e.targets = torch::empty({31}, torch::dtype(torch::kLong).device(torch::kMeta));
  const auto [logprobs, entropy] = token_logprobs(e);
  EXPECT_EQ(logprobs.sizes(), c10::IntArrayRef({31}));
  EXPECT_EQ(logprobs.scalar_type(), torch::kFloat);
  EXPECT_TRUE(entropy.is_meta());
  const auto gradients = torch::autograd::grad({logprobs.sum()}, {e.hidden, e.weight});
  EXPECT_EQ(gradients[0].sizes(), e.hidden.sizes());
  EXPECT_EQ(gradients[1].scalar_type(), torch::kBFloat16);
  EXPECT_EQ(std::get<1>(head_backward(e, logprobs.detach())).sizes(), e.weight.sizes());
}

// ---------------------------------------------------------------------------------------------
// What is refused

TEST(TokenLogprobs, RefusesBadArgumentsByName) {
  auto refused = [](auto change) {
    Example e;
    change(e);
    return error_of([&] { token_logprobs(e); });
  };
  const auto f64 = torch::kDouble;
  expect_words(refused([](Example& e) { e.hidden = e.hidden.unsqueeze(0); }),
               {"hidden must be [tokens, hidden size]", "float32 [1, 31, 7]"});
  expect_words(refused([](Example& e) { e.weight = e.weight.flatten(); }),
               {"weight must be [vocabulary, hidden size]", "float32 [161]"});
  expect_words(refused([&](Example& e) { e.hidden = e.hidden.to(f64); }),
               {"hidden must be float32 or bfloat16", "float64 [31, 7]"});
  expect_words(refused([&](Example& e) { e.weight = e.weight.to(torch::kHalf); }),
               {"weight must be float32 or bfloat16", "float16"});
  expect_words(refused([](Example& e) { e.weight = e.weight.to(torch::kBFloat16); }),
               {"hidden and weight must have one dtype", "float32", "bfloat16", "convert"});
  expect_words(refused([](Example& e) { e.weight = e.weight.slice(1, 0, 6); }),
               {"the same hidden size", "[31, 7]", "[23, 6]"});
  expect_words(refused([](Example& e) { e.weight = e.weight.slice(0, 0, 0); }),
               {"weight must be of vocabulary 1 or more"});
  expect_words(refused([](Example& e) {
                 e.hidden = e.hidden.slice(1, 0, 0);
                 e.weight = e.weight.slice(1, 0, 0);
               }),
               {"hidden must be of hidden size 1 or more"});
  expect_words(refused([](Example& e) { e.targets = e.targets.to(torch::kInt); }),
               {"targets must be int64", "int32 [31]"});
  expect_words(refused([](Example& e) { e.targets = Tensor(); }), {"targets must be int64"});
  expect_words(refused([](Example& e) { e.targets = e.targets.slice(0, 1); }),
               {"targets must be [31], one value for each token of hidden", "int64 [30]"});
  expect_words(refused([](Example& e) {
                 e.targets = e.targets.clone().index_fill_(0, torch::tensor({int64_t{4}}), 23);
               }),
               {"targets[4] = 23", "vocabulary of 23"});
  expect_words(refused([](Example& e) {
                 e.rows = torch::tensor({1, 2}, torch::kInt);
               }),
               {"rows must be int64", "int32 [2]"});
  expect_words(refused([](Example& e) {
                 e.rows = torch::zeros({2, 2}, torch::kLong);
               }),
               {"rows must be [rows]", "int64 [2, 2]"});
  expect_words(refused([](Example& e) {
                 e.rows = torch::tensor({int64_t{4}, int64_t{2}});
               }),
               {"rows[1] = 2", "rise"});
  expect_words(refused([](Example& e) { e.rows = torch::tensor({int64_t{31}}); }),
               {"rows[0] = 31"});
  expect_words(refused([&](Example& e) { e.temperature = torch::tensor(1.0, f64); }),
               {"temperature must be float32", "float64 []"});
  expect_words(refused([](Example& e) { e.temperature = torch::ones({30}); }),
               {"temperature must be one number, or [31]", "float32 [30]"});
  expect_words(refused([](Example& e) { e.temperature = torch::zeros({1}); }),
               {"temperature[0] = 0", "positive"});
  expect_words(refused([](Example& e) { e.weight = e.weight.detach().to_sparse(); }), {"leeway::"});
}

TEST(HeadBackward, RefusesBadArgumentsByName) {
  Example e;
  expect_words(error_of([&] { head_backward(e, torch::ones({30})); }),
               {"g must be [31], one value for each token of hidden", "float32 [30]"});
  expect_words(error_of([&] { head_backward(e, torch::ones({31}, torch::kDouble)); }),
               {"g must be float32", "float64 [31]"});
}

}  // namespace
}  // namespace leeway
