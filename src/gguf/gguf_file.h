// Reading GGUF files, versions 2 and 3: metadata by key, then tensors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/readable_file.h"
#include "gguf/gguf_value.h"
#include "gguf/tensor_type.h"

namespace leeway {

struct GgufTensor {
  std::string name;
  std::vector<int64_t> shape;  // as safetensors has it: the last extent is that of a row
  GgufType type = GgufType::f32;
  uint64_t described_at = 0;      // byte of the file where its description begins
  uint64_t begin = 0, bytes = 0;  // where its values are in the file

  int64_t row_length() const { return shape.back(); }
  int64_t rows() const;
  uint64_t row_bytes() const { return bytes / static_cast<uint64_t>(rows()); }
};

// An open file. Everything that describes it is read and checked against its size at once: counts,
// lengths, types, offsets (aligned, in bounds, no overlap), duplicate keys and names. Values are
// read when asked for, so a file may be larger than memory. Throws Error "FILE: at byte N:
// problem".
class GgufFile {
 public:
  explicit GgufFile(const std::string& path);

  const std::string& path() const { return file_->path(); }
  uint64_t size() const { return file_->size(); }
  uint32_t version() const { return version_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // in the file's order
  const GgufTensor* find_tensor(std::string_view name) const;          // null if absent

  struct Entry {
    GgufValue value;
    uint64_t at = 0;  // byte of the file where the value begins
  };
  const std::map<std::string, Entry, std::less<>>& metadata() const { return metadata_; }

  // None if the key is absent. Throws Error naming key and place for a value of another kind.
  // Integers of all widths are the same, and so are reals; a real keeps the digits with which it
  // was written ("1e-05", not its nearest double).
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> real(std::string_view key) const;
  std::optional<bool> flag(std::string_view key) const;
  const std::string* text(std::string_view key) const;
  const std::vector<std::string>* texts(std::string_view key) const;
  const GgufNumbers* numbers(std::string_view key) const;

  // Rows `first` .. `first + count` of the tensor in float32; `out` has their size.
  void read_rows(const GgufTensor& tensor, int64_t first, int64_t count,
                 std::span<float> out) const;

  // Throws Error for something wrong with the tensor or the entry.
  [[noreturn]] void refuse(const GgufTensor& tensor, const std::string& problem) const;
  [[noreturn]] void refuse_key(std::string_view key, const std::string& problem) const;

 private:
  std::shared_ptr<const ReadableFile> file_;
  uint32_t version_ = 0;
  std::map<std::string, Entry, std::less<>> metadata_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, size_t, std::less<>> places_;
};

}  // namespace leeway
