// Shared by the tests of the operators: the operators as plain functions, through the dispatcher,
// and an example with every argument.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "torch/compat.h"

namespace leeway::testing {

struct Example {
  Tensor hidden, weight, targets, cu_seqlens, mask, advantages, rollout, prox, ref, teacher;
  OptionalTensor rows, temperature, weights, versions, rollout_ids;
  OptionalTensor correction_weights, correction_mask;
  int64_t chunk_bytes = 0;
  bool float32_weight_gradient = false;
  bool prox_is_pi = false;

  // Sequences of 9, 1, 17 and 4 tokens. Streams lie around the log-probabilities.
  explicit Example(int64_t seed = 1, int64_t hidden_size = 7, int64_t vocabulary = 23) {
    torch::manual_seed(static_cast<uint64_t>(seed));
    const int64_t n = 31;
    hidden = torch::randn({n, hidden_size});
    weight = torch::randn({vocabulary, hidden_size}) * 0.5;
    targets = torch::randint(vocabulary, {n}, torch::kLong);
    cu_seqlens = torch::tensor({0, 9, 10, 27, 31}, torch::kInt);
    mask = torch::rand({n}) < 0.75;
    advantages = torch::randn({n});
    advantages.index_put_({torch::rand({n}) < 0.2}, 0.0);
    const Tensor pi = double_logprobs();
    rollout = (pi + 0.5 * torch::randn({n})).to(torch::kFloat);
    prox = (pi + 0.2 * torch::randn({n})).to(torch::kFloat);
    ref = (pi + 0.3 * torch::randn({n})).to(torch::kFloat);
    teacher = (pi + 0.3 * torch::randn({n})).to(torch::kFloat);
    hidden.set_requires_grad(true);
    weight.set_requires_grad(true);
  }

  int64_t tokens() const { return targets.size(0); }
  void list_rows() { rows = mask.nonzero().squeeze(1); }
  // Leaves of the same values, without gradients, as `dtype`.
  void renew(at::ScalarType dtype = at::kFloat) {
    hidden = hidden.detach().to(dtype).set_requires_grad(true);
    weight = weight.detach().to(dtype).set_requires_grad(true);
  }

  // The simple way, in double and by autograd: all of [N, V] in memory.
  Tensor double_log_softmax() const { return double_log_softmax(hidden, weight); }
  Tensor double_log_softmax(const Tensor& h, const Tensor& w) const {
    Tensor logits = h.to(torch::kDouble).matmul(w.to(torch::kDouble).t());
    if (temperature) logits = logits / temperature->to(torch::kDouble).reshape({-1, 1});
    return torch::log_softmax(logits, 1);
  }
  Tensor double_logprobs() const { return chosen(double_log_softmax()); }
  Tensor chosen(const Tensor& log_p) const {
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1);
  }
};

template <class Signature>
auto typed_op(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("leeway::") + name).c_str(), "")
      .typed<Signature>();
}

inline std::tuple<Tensor, Tensor> token_logprobs(const Example& e) {
  using Signature =
      std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                 const OptionalTensor&, int64_t, bool, bool, bool);
  return typed_op<Signature>("token_logprobs")
      .call(e.hidden, e.weight, e.targets, e.rows, e.temperature, e.chunk_bytes, false, false,
            e.float32_weight_gradient);
}

inline std::tuple<Tensor, Tensor> head_backward(const Example& e, const Tensor& g) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                               const Tensor&, const OptionalTensor&,
                                               const OptionalTensor&, int64_t, bool, bool, bool);
  return typed_op<Signature>("head_backward")
      .call(e.hidden, e.weight, e.targets, g, e.rows, e.temperature, e.chunk_bytes, false, false,
            e.float32_weight_gradient);
}

struct LossOutputs {
  Tensor loss, g, metrics;
};

inline LossOutputs policy_loss(const Example& e, const Tensor& logprobs, const std::string& spec,
                               double denominator = -1.0) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, std::string, double, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&);
  const auto optional = [](const Tensor& t) {
    return t.defined() ? OptionalTensor(t) : OptionalTensor();
  };
  auto [loss, g, metrics] =
      typed_op<Signature>("policy_loss")
          .call(logprobs, e.cu_seqlens, e.mask, e.advantages, e.rollout, optional(e.prox),
                optional(e.ref), optional(e.teacher), e.weights, e.versions, spec, denominator,
                e.rollout_ids, e.correction_weights, e.correction_mask);
  return {loss, g, metrics};
}

struct HeadOutputs {
  Tensor loss, logprobs, entropy, metrics;
};

inline HeadOutputs policy_head(const Example& e, const std::string& spec,
                               double denominator = -1.0) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
      const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      std::string, double, int64_t, bool, bool, bool, const OptionalTensor&, bool);
  const auto optional = [](const Tensor& t) {
    return t.defined() ? OptionalTensor(t) : OptionalTensor();
  };
  auto [loss, logprobs, entropy, metrics] =
      typed_op<Signature>("policy_head")
          .call(e.hidden, e.weight, e.targets, e.rows, e.cu_seqlens, e.mask, e.advantages,
                e.rollout, optional(e.prox), optional(e.ref), optional(e.teacher), e.weights,
                e.versions, e.temperature, spec, denominator, e.chunk_bytes, false, false,
                e.float32_weight_gradient, e.rollout_ids, e.prox_is_pi);
  return {loss, logprobs, entropy, metrics};
}

inline std::vector<std::string> metric_names(const std::string& spec) {
  return typed_op<std::vector<std::string>(std::string)>("metric_names").call(spec);
}
inline Tensor finalize_metrics(const std::vector<Tensor>& metrics, const std::string& spec) {
  return typed_op<Tensor(at::TensorList, std::string)>("finalize_metrics").call(metrics, spec);
}
inline double metric(const Tensor& row, const std::string& spec, const std::string& name) {
  const std::vector<std::string> names = metric_names(spec);
  const Tensor values = finalize_metrics({row}, spec);
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return values[static_cast<int64_t>(i)].item<double>();
  }
  ADD_FAILURE() << "no metric " << name;
  return 0.0;
}

inline void expect_close(const Tensor& got, const Tensor& expected, double tolerance,
                         const std::string& where) {
  ASSERT_TRUE(got.defined() && expected.defined()) << where;
  ASSERT_EQ(got.sizes(), expected.sizes()) << where;
  const Tensor difference =
      (got.detach().to(torch::kDouble) - expected.detach().to(torch::kDouble)).abs();
  const double scale = expected.detach().to(torch::kDouble).abs().max().item<double>() + 1e-30;
  EXPECT_LE(difference.max().item<double>(), tolerance * scale) << where;
}

inline bool same_bits(const Tensor& a, const Tensor& b) { return at::equal(a, b); }

// Which gradients, of hidden states and of the weight, are asked of the operator `name` while
// `body` runs: one pair for each call.
using Wanted = std::vector<std::pair<bool, bool>>;

template <class Body>
Wanted wanted_of(const std::string& name, Body body) {
  static thread_local std::string watched;
  static thread_local Wanted wanted;
  watched = "leeway::" + name;
  wanted.clear();
  const auto look = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
    if (watched == call.name()) {
      const auto inputs = call.inputs();
      wanted.emplace_back(inputs[inputs.size() - 2].toBool(), inputs[inputs.size() - 1].toBool());
    }
    return nullptr;
  };
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(look).needsInputs(true));
  body();
  at::removeCallback(handle);
  return wanted;
}

// The message that a call throws; empty if it does not throw.
template <class Function>
std::string error_of(Function f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "\"" << word << "\" is not in: " << text;
  }
}

}  // namespace leeway::testing
