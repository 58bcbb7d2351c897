// Writing GGUF files, version 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file_writer.h"
#include "gguf/gguf_value.h"
#include "gguf/tensor_type.h"

namespace leeway {

struct GgufTensorPlan {
  std::string name;
  std::vector<int64_t> shape;  // as safetensors has it
  GgufType type = GgufType::f32;

  uint64_t bytes() const;
};

// Everything but the values.
struct GgufPlan {
  std::vector<std::pair<std::string, GgufValue>> metadata;
  std::vector<GgufTensorPlan> tensors;

  // Of the whole file.
  uint64_t file_bytes() const;
};

// Writes the file atomically: it appears with `commit`, whole. Values are written in the order of
// the plan's tensors, in pieces of any size; the writer aligns each tensor. Throws Error naming the
// path, for example for a full disk.
class GgufWriter {
 public:
  GgufWriter(const std::string& path, const GgufPlan& plan);
  void write(std::span<const std::byte> values);
  FileSum commit();

 private:
  FileWriter file_;
  std::vector<uint64_t> sizes_;  // of the tensors
  size_t tensor_ = 0;            // the one being written
  uint64_t written_ = 0;         // of it
};

}  // namespace leeway
