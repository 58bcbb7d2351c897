// Gradients against differences, the two stages against each other, and what is refused.

#include <gtest/gtest.h>

#include "core/cpu/policy_head_test_support.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using testing::batch_for;
using testing::Gradients;
using testing::Head;
using testing::HeadReference;
using testing::reference_head;
using testing::reference_row;

const std::vector<int> kLengths = {9, 1, 17, 4, 1, 12};
constexpr int64_t kTokens = 44;

LossSpec spec_of(const std::string& preset,
                 std::vector<std::pair<std::string, Value>> settings = {}) {
  return Catalog().make_spec(preset, testing::with(preset, std::move(settings)).settings);
}

// d f / d value by central differences. Heads hold float32: the step is a power of two and the
// values are rounded so that it is taken exactly.
template <class Function>
double difference(float& value, Function f) {
  const float held = value, step = 0x1p-10f;
  value = held + step;
  const double up = f();
  value = held - step;
  const double down = f();
  value = held;
  return (up - down) / (2.0 * static_cast<double>(step));
}

void round_to_steps(Head& head) {
  for (auto* values : {&head.hidden, &head.weight}) {
    for (float& value : *values) value = std::round(value * 0x1p12f) * 0x1p-12f;
  }
}

void expect_difference(double got, double difference, const std::string& where) {
  EXPECT_NEAR(got, difference, 3e-5 * (1.0 + std::abs(difference))) << where;
}

TEST(PolicyHeadGradient, IsTheDifferenceOfTheLoss) {
  ThreadPool pool(2);
  const std::vector<std::pair<const char*, LossSpec>> specs = {
      {"is", spec_of("is")},
      {"reinforce", spec_of("reinforce")},
      {"dro", spec_of("dro")},
      {"sapo", spec_of("sapo")},
      {"ppo", spec_of("ppo", {{"eps_low", 0.9}, {"eps_high", 20.0}})},
      {"grpo", spec_of("grpo", {{"eps_low", 0.9}, {"eps_high", 20.0}, {"ref_kl", 0.3}})},
      {"gspo",
       spec_of("gspo",
               {{"eps_low", 0.9}, {"eps_high", 20.0}, {"gradient", std::string("through_mean")}})}};
  for (const auto& [name, spec] : specs) {
    Head head(12, kTokens, 3, 6);
    round_to_steps(head);
    head.temperature_per_token(5);
    head.rows_in_a_chunk(10);
    const Batch batch = batch_for(head, 3, kLengths);
    head.list_rows(batch.mask);
    auto loss = [&] { return reference_head(head, spec, batch).loss.loss; };
    const auto run = testing::run_head(pool, head, spec, batch);
    for (size_t i = 0; i < head.weight.size(); ++i) {
      expect_difference(static_cast<double>(run.d_weight[i]), difference(head.weight[i], loss),
                        name);
    }
    for (size_t i = 0; i < head.hidden.size(); i += 7) {
      expect_difference(static_cast<double>(run.d_hidden[i]), difference(head.hidden[i], loss),
                        name);
    }
  }
}

TEST(HeadBackward, OfEntropyIsTheDifferenceOfTheEntropies) {
  ThreadPool pool(2);
  Head head(12, 20, 3, 6);
  round_to_steps(head);
  head.temperature_per_token(5);
  const std::vector<double> parts = [] {
    std::vector<double> out;
    Rng rng(3);
    for (int i = 0; i < 40; ++i) out.push_back(rng.normal());
    return out;
  }();
  // sum of a_t log p_t + b_t entropy_t
  auto sum = [&] {
    double total = 0.0;
    for (int64_t t = 0; t < 20; ++t) {
      const auto row = reference_row(head, t);
      const size_t k = static_cast<size_t>(t);
      total += parts[k] * row.log_p[static_cast<size_t>(head.targets[k])];
      total += parts[20 + k] * row.entropy;
    }
    return total;
  };
  const std::vector<float> g(parts.begin(), parts.begin() + 20);
  const std::vector<float> g_entropy(parts.begin() + 20, parts.end());
  std::vector<float> d_hidden(head.hidden.size()), d_weight(head.weight.size(), 0.0f);
  head_backward(pool, head.problem(), g, g_entropy, d_hidden, d_weight);
  for (size_t i = 0; i < head.hidden.size(); ++i) {
    expect_difference(static_cast<double>(d_hidden[i]), difference(head.hidden[i], sum), "hidden");
  }
  for (size_t i = 0; i < head.weight.size(); ++i) {
    expect_difference(static_cast<double>(d_weight[i]), difference(head.weight[i], sum), "weight");
  }
}

TEST(HeadBackward, AgreesWithTheExactChainForAnyGradients) {
  ThreadPool pool(2);
  for (int64_t vocabulary = 2; vocabulary <= 40; ++vocabulary) {
    Head head(static_cast<uint64_t>(vocabulary), kTokens, 1 + vocabulary % 6, vocabulary);
    head.temperature_per_token(2);
    if (vocabulary % 3 == 0) head.round_to_bf16();
    if (vocabulary % 2 == 0) {
      const std::vector<uint8_t> some(kTokens, 0);
      head.list_rows(some);
    }
    Rng rng(7);
    std::vector<double> g, g_entropy;
    for (int64_t i = 0; i < kTokens; ++i) {
      g.push_back(rng.below(3) == 0 ? 0.0 : static_cast<float>(rng.normal()));
      g_entropy.push_back(rng.below(3) == 0 ? 0.0 : static_cast<float>(rng.normal()));
    }
    const std::vector<float> g_float(g.begin(), g.end());
    const std::vector<float> entropy_float(g_entropy.begin(), g_entropy.end());
    for (const bool with_entropy : {false, true}) {
      const Gradients expected = testing::reference_backward(
          head, g, with_entropy ? std::span<const double>(g_entropy) : std::span<const double>());
      std::vector<float> first_hidden, first_weight;
      for (const int64_t rows : {3, 100}) {
        head.rows_in_a_chunk(rows);
        std::vector<float> d_hidden(head.hidden.size(), -77.0f), d_weight(head.weight.size());
        head_backward(
            pool, head.problem(), g_float,
            with_entropy ? std::span<const float>(entropy_float) : std::span<const float>(),
            d_hidden, d_weight);
        testing::expect_near(d_hidden, expected.hidden, 2e-5, "d_hidden", true);
        testing::expect_near(d_weight, expected.weight, 2e-5, "d_weight");
        if (rows == 3) {
          first_hidden = d_hidden, first_weight = d_weight;
        } else {
          EXPECT_EQ(d_hidden, first_hidden) << "bits depend on the chunk";
          EXPECT_EQ(d_weight, first_weight) << "bits depend on the chunk";
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(HeadBackward, GivesWhatIsWantedAloneAndAddsToTheWeights) {
  ThreadPool pool(2);
  const Head head(5, kTokens, 7, 30);
  std::vector<float> g(kTokens, 0.5f), d_hidden(head.hidden.size()), d_weight(head.weight.size());
  head_backward(pool, head.problem(), g, {}, d_hidden, d_weight);
  std::vector<float> alone(head.hidden.size(), 3.0f);
  head_backward(pool, head.problem(), g, {}, alone, {});
  EXPECT_EQ(alone, d_hidden);
  std::vector<float> added(head.weight.size(), 0.0f);
  head_backward(pool, head.problem(), g, {}, {}, added);
  EXPECT_EQ(added, d_weight);
  head_backward(pool, head.problem(), g, {}, {}, added);
  for (size_t i = 0; i < added.size(); ++i) EXPECT_NEAR(added[i], 2.0f * d_weight[i], 1e-4f);
}

// ---------------------------------------------------------------------------------------------
// What is refused

template <class Function>
std::string error_of(Function f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "\"" << word << "\" is not in: " << text;
  }
}

TEST(CheckHead, NamesThePositionAndTheValue) {
  const Head good(5, kTokens, 7, 30);
  EXPECT_NO_THROW(check_head(good.problem()));
  auto refused = [&](auto change) {
    Head head = good;
    change(head);
    return error_of([&] { check_head(head.problem()); });
  };
  auto list = [](Head& head, std::vector<int64_t> rows) {
    head.all_rows = false;
    head.rows = std::move(rows);
  };
  expect_words(refused([](Head& h) { h.targets[7] = 30; }), {"targets[7] = 30", "30"});
  expect_words(refused([](Head& h) { h.targets[43] = -1; }), {"targets[43] = -1", "vocabulary"});
  expect_words(refused([&](Head& h) { list(h, {3, 44}); }), {"rows[1] = 44", "44 tokens"});
  expect_words(refused([&](Head& h) { list(h, {-1}); }), {"rows[0] = -1"});
  expect_words(refused([&](Head& h) { list(h, {3, 9, 9}); }), {"rows[2] = 9", "rise"});
  expect_words(refused([&](Head& h) { list(h, {9, 3}); }), {"rows[1] = 3", "rise", "9"});
  for (const float bad : {0.0f, -1.0f, std::nanf(""), INFINITY, 1e-39f}) {
    expect_words(refused([&](Head& h) { h.temperature = {bad}; }),
                 {"temperature[0]", "positive and finite"});
    expect_words(refused([&](Head& h) {
                   h.temperature.assign(kTokens, 1.0f);
                   h.temperature[11] = bad;
                 }),
                 {"temperature[11]", "positive and finite"});
  }
}

TEST(PolicyHead, NamesTheRowWhoseHiddenStatesAreNotFinite) {
  ThreadPool pool(2);
  for (const char* preset : {"icepop", "dppo_kl", "grpo+tis", "gspo", "m2po"}) {
    for (const int64_t rows : {4, 100}) {
      Head head(6, kTokens, 9, 40);
      head.rows_in_a_chunk(rows);
      Batch batch = batch_for(head, 9, kLengths, true);
      batch.mask.assign(kTokens, 1);
      head.hidden[static_cast<size_t>((10 + 13) * 9 + 4)] = std::nanf("");
      expect_words(error_of([&] { testing::run_head(pool, head, spec_of(preset), batch); }),
                   {"sequence 2, position 13", "pi"});
    }
  }
}

TEST(PolicyHead, NamesTheTokenWhoseStreamIsNotFiniteOrOverflows) {
  ThreadPool pool(2);
  for (const int64_t rows : {4, 100}) {
    Head head(6, kTokens, 9, 40);
    head.rows_in_a_chunk(rows);
    Batch batch = batch_for(head, 9, kLengths, true);
    batch.mask.assign(kTokens, 1);
    batch.advantages.assign(kTokens, 1.0);
    Batch infinite = batch;
    infinite.rollout[31] = -kInfinity;
    expect_words(error_of([&] { testing::run_head(pool, head, spec_of("icepop"), infinite); }),
                 {"sequence 4, position 0", "rollout"});
    Batch overflow = batch;
    overflow.rollout[30] = -300.0;
    expect_words(error_of([&] { testing::run_head(pool, head, spec_of("is"), overflow); }),
                 {"sequence 3, position 3", "ratio"});
  }
}

TEST(PolicyHead, RefusesATokenThatTakesPartButIsNotARow) {
  ThreadPool pool(2);
  Head head(6, kTokens, 9, 40);
  Batch batch = batch_for(head, 9, kLengths, true);
  head.list_rows(batch.mask);
  EXPECT_NO_THROW(testing::run_head(pool, head, spec_of("icepop"), batch));
  const auto row = std::find_if(head.rows.begin(), head.rows.end(), [&](int64_t token) {
    return token > 31 && batch.mask[static_cast<size_t>(token)] != 0;
  });
  const int64_t token = *row;
  head.rows.erase(row);
  expect_words(error_of([&] { testing::run_head(pool, head, spec_of("icepop"), batch); }),
               {"sequence 5, position " + std::to_string(token - 32), "rows"});
  // A weight of zero takes it out again.
  batch.weights.assign(kTokens, 1.0);
  batch.weights[static_cast<size_t>(token)] = 0.0;
  EXPECT_NO_THROW(testing::run_head(pool, head, spec_of("icepop"), batch));
}

TEST(PolicyHead, RefusesRowsWhereAPresetLooksAtMaskedPositions) {
  ThreadPool pool(2);
  Head head(6, kTokens, 9, 40);
  const Batch batch = batch_for(head, 9, kLengths, true);
  head.list_rows(batch.mask);
  for (const char* preset : {"cookbook/gspo", "tinker/dro", "liger/luspo"}) {
    expect_words(error_of([&] { testing::run_head(pool, head, spec_of(preset), batch); }),
                 {"is not among the rows", "masked positions"});
  }
}

TEST(PolicyHead, RefusesABatchThatLacksAStreamBeforeAnyWork) {
  ThreadPool pool(2);
  const Head head(6, kTokens, 9, 40);
  Batch batch = batch_for(head, 9, kLengths);
  batch.prox.clear();
  expect_words(error_of([&] { testing::run_head(pool, head, spec_of("ppo"), batch); }),
               {"ppo", "\"prox\"", "anchor"});
}

}  // namespace
}  // namespace leeway
