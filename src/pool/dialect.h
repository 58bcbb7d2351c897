// How a server is spoken to: Leeway's own, vLLM and SGLang. Token ids in; token ids,
// log-probabilities and versions out; weights by the name of a folder that both sides can read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/settings.h"
#include "data/sampling.h"
#include "model/shared_weights.h"

namespace leeway {

// A call relative to a server's base URL.
struct ServerCall {
  bool post = false;
  std::string path;
  std::string body;
};

// What a server says of itself. Unknown: empty, 0 or -1.
struct ServerFacts {
  std::string model;
  int64_t vocab_size = 0;
  int64_t max_length = 0;
  PolicyVersion version = -1;
  std::optional<uint32_t> checksum;  // of its weights
  bool paused = false;
  std::string device;  // the GPU from whose memory it takes weights; empty: from none
};

// What servers hold: all weights, which new ones replace, or a model of their own and an adapter of
// the policy over it.
enum class ServedWeights { whole, adapter };

// The name of an adapter on a server. One for each version: servers keep what they have computed by
// this name, and requests under way go on with the version that they began with.
std::string adapter_name(PolicyVersion version);

// The functions that read throw Error saying what is wrong with the answer.
class Dialect {
 public:
  explicit Dialect(ServedWeights weights) : weights_(weights) {}
  virtual ~Dialect() = default;
  virtual InferenceDialect kind() const = 0;

  // 200 means that the server can work.
  virtual ServerCall health() const { return {.path = "/health"}; }
  virtual ServerCall describe() const = 0;
  virtual ServerFacts read_facts(std::string_view body) const = 0;

  // `version`: of the weights that the server has now.
  virtual ServerCall generate(const Request& request, const std::string& model,
                              PolicyVersion version) const = 0;
  // One sequence per sample, in their order. One that the server has given up ends as cancelled.
  // Where a server stamps no versions, all tokens have `version`: the oldest that they can be of.
  virtual std::vector<SampledSequence> read_samples(const Request& request, std::string_view body,
                                                    PolicyVersion version) const = 0;
  // Whether a sequence that has stopped ends with one of the request's stop ids for sure.
  virtual bool stops_as_asked() const { return true; }

  // Requests in flight are kept, without a token sampled, from `pause` to `resume`.
  virtual ServerCall pause() const = 0;
  virtual ServerCall resume() const = 0;
  // Loads the weights in a folder. Several: the next one where a server does not know the last.
  virtual std::vector<ServerCall> update(const std::string& folder,
                                         PolicyVersion version) const = 0;
  // The same from the memory of a GPU that both use; empty: not in this dialect.
  virtual std::optional<ServerCall> update_shared(const SharedWeights& /*shared*/,
                                                  PolicyVersion /*version*/) const {
    return {};
  }
  // Of the answer to `update`: that it has been done, with the weights of this checksum.
  virtual void check_updated(std::string_view body, PolicyVersion version,
                             uint32_t checksum) const = 0;
  // Whether an answer to `update` that is no success says that the server has this adapter already.
  virtual bool has_already(int, std::string_view) const { return false; }
  // After an update: forgets the adapter of an earlier version. Nothing: there is none to forget.
  // An answer that is no success changes nothing.
  virtual std::optional<ServerCall> forget(PolicyVersion) const { return {}; }

 protected:
  bool is_adapter() const { return weights_ == ServedWeights::adapter; }

 private:
  ServedWeights weights_;
};

// `kind` is not `automatic`.
std::unique_ptr<Dialect> make_dialect(InferenceDialect kind,
                                      ServedWeights weights = ServedWeights::whole);
// Each dialect has a file.
std::unique_ptr<Dialect> make_leeway_dialect(ServedWeights weights = ServedWeights::whole);
std::unique_ptr<Dialect> make_vllm_dialect(ServedWeights weights = ServedWeights::whole);
std::unique_ptr<Dialect> make_sglang_dialect(ServedWeights weights = ServedWeights::whole);

// POST {"lora_name", "lora_path"} and, with a version, {"weight_version"}.
ServerCall load_adapter_call(const std::string& path, const std::string& folder,
                             PolicyVersion version, bool says_version = false);
// POST {"lora_name"}
ServerCall unload_adapter_call(const std::string& path, PolicyVersion version);

// The dialect of a server that answered GET /model_info like this.
InferenceDialect dialect_of(int status, std::string_view body);

}  // namespace leeway
