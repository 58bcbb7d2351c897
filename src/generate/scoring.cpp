#include "generate/scoring.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <span>

#include "base/thread_pool.h"
#include "core/cpu/policy_head.h"
#include "engine/sampler.h"
#include "leeway/error.h"
#include "model/cpu_decoder.h"
#include "trainer/micro_batch.h"

namespace leeway {
namespace {

constexpr int64_t kPassTokens = 4096;
constexpr int64_t kLogits = int64_t{16} << 20;  // at a time, for the most likely tokens

// Packs as many sequences as fit a pass, starting with list `next`, which is advanced. Row t gives
// log p(token t+1 | tokens up to t); a sequence's last row is not requested.
MicroBatch pack(const std::vector<std::vector<int32_t>>& lists, size_t& next) {
  MicroBatch batch;
  batch.cu_seqlens.push_back(0);
  while (next < lists.size() &&
         (batch.size() == 0 ||
          batch.size() + static_cast<int64_t>(lists[next].size()) <= kPassTokens)) {
    const std::vector<int32_t>& list = lists[next++];
    for (size_t t = 0; t < list.size(); ++t) {
      if (t + 1 < list.size()) batch.rows.push_back(batch.size() + static_cast<int64_t>(t));
      batch.targets.push_back(t + 1 < list.size() ? list[t + 1] : 0);
    }
    batch.tokens.insert(batch.tokens.end(), list.begin(), list.end());
    batch.cu_seqlens.push_back(batch.size());
  }
  return batch;
}

// [rows] the most likely tokens after each row of the batch; empty for rows that are not requested.
std::vector<std::vector<TokenLogprob>> most_likely_after(ThreadPool& pool,
                                                         const HeadProblem& problem,
                                                         int64_t count) {
  std::vector<std::vector<TokenLogprob>> top(static_cast<size_t>(problem.tokens));
  const int64_t width = problem.hidden_size, vocabulary = problem.vocabulary;
  const auto rows = static_cast<int64_t>(problem.rows.size());
  const int64_t room = std::clamp<int64_t>(kLogits / vocabulary, 1, std::max<int64_t>(rows, 1));
  std::vector<float> hidden(static_cast<size_t>(room * width));
  std::vector<float> logits(static_cast<size_t>(room * vocabulary));
  const auto* all = static_cast<const float*>(problem.hidden.data);
  const Operand head = columns_of(static_cast<const float*>(problem.weight.data), width);
  for (int64_t begin = 0; begin < rows; begin += room) {
    const std::span<const int64_t> part = problem.rows.subspan(
        static_cast<size_t>(begin), static_cast<size_t>(std::min(room, rows - begin)));
    const auto size = static_cast<int64_t>(part.size());
    for (int64_t i = 0; i < size; ++i) {
      std::copy_n(all + part[i] * width, width, hidden.begin() + i * width);
    }
    const auto share = [&](Team& team) {
      gemm(team, size, vocabulary, width, rows_of(hidden.data(), width), head, logits.data(),
           vocabulary);
      team.for_each(size, [&](int64_t i, int) {
        most_likely(std::span(logits).subspan(i * vocabulary, vocabulary), count, top[part[i]]);
      });
    };
    pool.run_team(std::cref(share));
  }
  return top;
}

// On the CPU, without the memory that training needs. `top` as in `score_tokens`, by rows.
std::vector<float> score(ThreadPool& pool, const Parameters& parameters, const MicroBatch& batch,
                         const TrainingOptions& options, int64_t count,
                         std::vector<std::vector<TokenLogprob>>& top) {
  const ModelConfig& config = parameters.config();
  std::vector<float> hidden(static_cast<size_t>(batch.size() * config.hidden_size));
  training_forward(pool, parameters, batch.packed(), options, hidden, nullptr);
  HeadProblem problem;
  problem.tokens = batch.size();
  problem.hidden_size = config.hidden_size, problem.vocabulary = config.vocab_size;
  problem.hidden = rows_of(hidden.data(), config.hidden_size);
  problem.weight = rows_of(network_of(parameters).head, config.hidden_size);
  problem.targets = batch.targets, problem.rows = batch.rows, problem.all_rows = false;
  std::vector<float> logprobs(batch.tokens.size());
  head_logprobs(pool, problem, logprobs, {});
  if (count > 0) top = most_likely_after(pool, problem, count);
  return logprobs;
}

}  // namespace

std::vector<std::vector<float>> score_tokens(const Parameters& parameters,
                                             const std::vector<std::vector<int32_t>>& lists,
                                             const ScoringOptions& options,
                                             const std::function<void(size_t done)>& on_pass,
                                             std::vector<std::vector<TokenLogprob>>* top) {
  LEEWAY_CHECK(options.top_logprobs == 0 || !options.backend,
               "the most likely tokens are found on the CPU alone");
  const TrainingOptions training{.numerics = options.numerics};
  ThreadPool pool(options.threads);
  std::unique_ptr<TrainingBackend> backend;
  if (options.backend) backend = options.backend({parameters}, {});
  std::vector<std::vector<float>> scores;
  size_t done = 0;
  for (size_t next = 0; next < lists.size();) {
    const MicroBatch batch = pack(lists, next);
    RowValues values;
    std::vector<std::vector<TokenLogprob>> likely;
    if (backend) {
      backend->score(PolicyKind::current, batch, values);
    } else {
      values.logprobs = score(pool, parameters, batch, training, options.top_logprobs, likely);
    }
    for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
      const int64_t begin = batch.cu_seqlens[s], end = batch.cu_seqlens[s + 1] - 1;
      std::vector<float> list(values.logprobs.begin() + begin, values.logprobs.begin() + end);
      for (size_t t = 0; t < list.size(); ++t) {
        if (std::isfinite(list[t])) continue;
        throw Error(fmt::format(
            "tokens[{}][{}]: its log-probability is {}, not finite: the weights lead to numbers "
            "beyond float32",
            scores.size(), t + 1, list[t]));
      }
      scores.push_back(std::move(list));
      if (top == nullptr) continue;
      std::vector<TokenLogprob>& own = top->emplace_back();
      for (int64_t t = begin; t < end && !likely.empty(); ++t) {
        own.insert(own.end(), likely[t].begin(), likely[t].end());
      }
    }
    done += batch.tokens.size();
    if (on_pass) on_pass(done);
  }
  return scores;
}

}  // namespace leeway
