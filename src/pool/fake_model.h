// A server of Leeway's dialect for tests, without its socket: it samples numbers that follow from
// the request's seed, takes weights by name, and misbehaves as it is told to.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/rng.h"
#include "data/sampling.h"
#include "orchestrator/split.h"
#include "pool/weight_store.h"

namespace leeway::testing {

// Weights that are nothing but a version and a checksum that follows from it.
class FakeWeights : public WeightStore {
 public:
  static uint32_t checksum_of(PolicyVersion version) {
    return 1000u + static_cast<uint32_t>(version);
  }
  PublishedWeights publish(const std::shared_ptr<const PolicySnapshot>&,
                           PolicyVersion version) override {
    there.insert(version);
    PublishedWeights published{version, "", checksum_of(version)};
    if (device.empty()) {
      write(published);
    } else {
      published.shared = SharedWeights{.device = device,
                                       .handle = std::string(kWeightHandleBytes, 'h'),
                                       .count = 8,
                                       .checksum = checksum_of(version)};
    }
    return published;
  }
  void write(PublishedWeights& published) override {
    published.folder = fmt::format("/weights/step_{}", published.version);
    ++written;
  }
  void keep_only(const std::set<PolicyVersion>& versions) override {
    std::erase_if(there, [&](PolicyVersion each) { return !versions.contains(each); });
  }
  std::set<PolicyVersion> there;
  std::string device;   // whose memory they are in; empty: in a folder
  int64_t written = 0;  // folders
};

struct FakeAnswer {
  int status = 200;
  std::string body = "{}";
  bool reset = false;      // the connection ends without an answer
  bool silent = false;     // there is never an answer
  bool truncated = false;  // the connection ends in the middle of the body
};

// One server's state and answers. Not thread-safe.
class FakeModel {
 public:
  int64_t vocab_size = 32;
  int64_t max_length = 512;
  PolicyVersion version = 0;
  uint32_t checksum = 7;
  bool paused = false;
  std::string device;  // from whose memory it takes weights
  // Ids of a sample; the last one is a stop id, or the request's limit has been reached.
  std::function<std::vector<int32_t>(const Request& request, int64_t sample)> ids_of =
      [](const Request& request, int64_t sample) {
        Rng rng(mixed_seed({request.seed, static_cast<uint64_t>(sample)}));
        std::vector<int32_t> ids;
        const auto length = static_cast<int64_t>(rng.below(6));
        for (int64_t t = 0; t < length; ++t) ids.push_back(static_cast<int32_t>(1 + rng.below(20)));
        ids.push_back(request.stop_ids.front());
        return ids;
      };
  // The checksum of the weights in a folder.
  std::function<uint32_t(const std::string& folder, PolicyVersion version)> load =
      [](const std::string&, PolicyVersion of) { return FakeWeights::checksum_of(of); };
  // Changes an answer before it is sent.
  std::function<void(const std::string& path, FakeAnswer& answer)> spoil;
  bool from_memory = false;              // the last weights
  std::map<std::string, int64_t> calls;  // by path
  std::vector<PolicyVersion> asked_at;   // versions at which requests came

  FakeAnswer answer(std::string path, const std::string& body) {
    path = path.substr(0, path.find('?'));
    ++calls[path];
    FakeAnswer answer;
    if (path == "/health") {
    } else if (path == "/model_info") {
      answer.body = fmt::format(
          R"({{"model_path":"m","weight_version":"{0}","is_generation":true,"leeway":{{"version":{0},)"
          R"("checksum":"{1:08x}","vocab_size":{2},"max_model_len":{3},"precision":"float32",)"
          R"("paused":{4},{5}"dialect":1}}}})",
          version, checksum, vocab_size, max_length, paused,
          device.empty() ? "" : fmt::format(R"("device":"{}",)", device));
    } else if (path == "/pause") {
      paused = true;
    } else if (path == "/resume") {
      paused = false;
    } else if (path == "/update_weights") {
      const auto json = parse_json("", body);
      version = json["weight_version"].GetInt();
      from_memory = json.HasMember("cuda_ipc");
      checksum = from_memory ? FakeWeights::checksum_of(version)
                             : load(json["weight_dir"].GetString(), version);
      answer.body = fmt::format(
          R"({{"success":true,"status":"ok","leeway":{{"version":{},"checksum":"{:08x}"}}}})",
          version, checksum);
    } else if (path == "/inference/v1/generate") {
      asked_at.push_back(version);
      answer.body = generated(request_of(body));
    } else {
      answer = {404, R"({"error":{"message":"unknown"}})"};
    }
    if (spoil) spoil(path, answer);
    return answer;
  }

  static Request request_of(const std::string& body) {
    const auto json = parse_json("", body);
    Request request;
    for (const auto& id : json["token_ids"].GetArray()) request.prompt.push_back(id.GetInt());
    const auto& params = json["sampling_params"];
    request.samples = params["n"].GetInt64();
    request.max_new_tokens = params["max_tokens"].GetInt64();
    request.seed = params["seed"].GetUint64();
    for (const auto& id : params["stop_token_ids"].GetArray()) {
      request.stop_ids.push_back(id.GetInt());
    }
    return request;
  }

 private:
  std::string generated(const Request& request) const {
    std::string choices;
    for (int64_t k = 0; k < request.samples; ++k) {
      std::vector<int32_t> ids = ids_of(request, k);
      bool cut = false;
      if (static_cast<int64_t>(ids.size()) > request.max_new_tokens) {
        ids.resize(static_cast<size_t>(request.max_new_tokens));
        cut = true;
      }
      std::vector<std::string> content, logprobs;
      for (int32_t id : ids) {
        content.push_back(fmt::format(R"({{"token_id":{},"logprob":-0.25}})", id));
        logprobs.emplace_back("-0.25");
      }
      choices += fmt::format(
          R"({}{{"index":{},"token_ids":[{}],"logprobs":{{"content":[{}]}},"finish_reason":"{}",)"
          R"("leeway":{{"versions":[{}],"processed_logprobs":[{}]}}}})",
          k == 0 ? "" : ",", k, fmt::join(ids, ","), fmt::join(content, ","),
          cut ? "length" : "stop", fmt::join(std::vector<PolicyVersion>(ids.size(), version), ","),
          fmt::join(logprobs, ","));
    }
    return fmt::format(R"({{"request_id":"r","choices":[{}],"leeway":{{"version":{}}}}})", choices,
                       version);
  }
};

}  // namespace leeway::testing
