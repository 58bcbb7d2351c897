#include "engine/request.h"

#include <fmt/format.h>

#include "engine/sampler.h"
#include "kernels/attention.h"
#include "leeway/error.h"

namespace leeway {
namespace {

void check_ids(const char* what, const std::vector<int32_t>& ids, int64_t vocabulary) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocabulary) continue;
    throw Error(
        fmt::format("{}[{}] is {}: the model's ids are 0 to {}", what, i, ids[i], vocabulary - 1));
  }
}

int64_t blocks_for(int64_t positions) { return (positions + kBlockKeys - 1) / kBlockKeys; }

}  // namespace

BlockNeed block_need(const Request& request) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  BlockNeed need;
  // A sample of one token writes no keys or values of its own, so even a partly filled block is
  // shared.
  need.shared = request.max_new_tokens == 1 ? blocks_for(prompt) : prompt / kBlockKeys;
  need.own = blocks_for(prompt + request.max_new_tokens - 1) - need.shared;
  return need;
}

void check_request(const Request& request, const RequestLimits& limits) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0) throw Error("the prompt is empty: at least one token is needed");
  check_ids("prompt", request.prompt, limits.vocabulary);
  check_ids("stop_ids", request.stop_ids, limits.vocabulary);
  if (request.samples < 1) {
    throw Error(fmt::format("samples is {}: it must be at least 1", request.samples));
  }
  if (request.samples > limits.sequences) {
    throw Error(fmt::format(
        "samples is {}, but max_sequences is {}: all samples of a request run at a time; ask for "
        "them in several requests with different seeds, or raise max_sequences",
        request.samples, limits.sequences));
  }
  if (request.max_new_tokens < 1) {
    throw Error(fmt::format("max_new_tokens is {}: it must be at least 1", request.max_new_tokens));
  }
  if (request.max_new_tokens > limits.positions - prompt) {
    throw Error(
        fmt::format("a prompt of {} tokens and max_new_tokens {} do not fit the model: its "
                    "max_position_embeddings is {}",
                    prompt, request.max_new_tokens, limits.positions));
  }
  if (request.top_logprobs < 0 || request.top_logprobs > kMostTopLogprobs) {
    throw Error(fmt::format("top_logprobs is {}: it must be 0 to {}", request.top_logprobs,
                            kMostTopLogprobs));
  }
  check_sampling(request.sampling);
  const int64_t blocks = block_need(request).of(request.samples);
  if (blocks > limits.blocks) {
    throw Error(fmt::format(
        "the request needs {} KV-cache blocks ({} bytes: prompt of {} tokens, "
        "max_new_tokens {}, samples {}), but there are {} ({} bytes): raise kv_bytes or ask for "
        "less",
        blocks, blocks * limits.block_bytes, prompt, request.max_new_tokens, request.samples,
        limits.blocks, limits.blocks * limits.block_bytes));
  }
}

}  // namespace leeway
