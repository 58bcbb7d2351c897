// Shared by the tests of model files: a temporary folder, raw safetensors files, small models.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/rng.h"
#include "base/test_folder.h"
#include "leeway/error.h"
#include "model/parameters.h"
#include "model/safetensors.h"

namespace leeway::testing {

inline const std::string kGoldens = LEEWAY_SOURCE_DIR "/tests/data/hf";

// While it lives, no file can grow beyond `bytes`: simulates a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : action_(::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, action_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*action_)(int);
  rlimit before_{};
};

inline std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

// The call throws Error with a message that contains all of `words`.
inline void expect_refused(const std::function<void()>& call,
                           const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    const std::string message = error.what();
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << "no \"" << word << "\" in: " << message;
    }
  }
}

// A file with this header and data, valid or not.
inline std::string raw_safetensors(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(header).append(data);
}

struct RawTensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

inline std::string safetensors_of(const std::vector<RawTensor>& tensors) {
  std::string header = "{", data;
  for (const RawTensor& tensor : tensors) {
    header +=
        fmt::format("{}\"{}\": {{\"dtype\": \"{}\", \"shape\": [{}], \"data_offsets\": [{}, {}]}}",
                    header.size() > 1 ? ", " : "", tensor.name, tensor.dtype,
                    fmt::join(tensor.shape, ", "), data.size(), data.size() + tensor.bytes.size());
    data += tensor.bytes;
  }
  return raw_safetensors(header + "}", data);
}

template <class T>
std::string as_bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// A small model of a family in which no two sizes are equal.
inline ModelConfig small_config(Family family, bool tied = false, bool bias = false) {
  ModelConfig config;
  config.family = family;
  config.vocab_size = 50;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 128;
  config.tie_word_embeddings = tied;
  config.qk_norm = family == Family::qwen3;
  config.qkv_bias = family == Family::qwen2 || bias;
  config.output_bias = family != Family::qwen2 && bias;
  return config;
}

inline Parameters small_parameters(const ModelConfig& config, uint64_t seed = 1) {
  Parameters parameters(config);
  initialise(parameters, seed);
  return parameters;
}

// Gives norms and biases values other than their initial ones, so that a test can tell that they
// are used.
inline void roughen(Parameters& parameters, uint64_t seed) {
  Rng rng(seed);
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    using Role = ParameterInfo::Role;
    const Role role = parameters.table()[i].role;
    if (role != Role::norm && role != Role::bias) continue;
    for (float& value : parameters.of(i)) value += static_cast<float>(0.2 * rng.normal());
  }
}

inline bool same_bits(const Parameters& a, const Parameters& b) {
  return a.flat().size() == b.flat().size() &&
         std::memcmp(a.flat().data(), b.flat().data(), a.flat().size_bytes()) == 0;
}

}  // namespace leeway::testing
