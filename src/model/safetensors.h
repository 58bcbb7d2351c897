// The safetensors format: an 8-byte length, a JSON header, and the tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_writer.h"

namespace leeway {

enum class DType { f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean };
const char* name_of(DType dtype);  // as in the file: "F32", "BF16", ..
size_t size_of(DType dtype);

// The bytes that follow a file's header.
class TensorBytes {
 public:
  virtual ~TensorBytes() = default;
  virtual uint64_t size() const = 0;
  // Fills `out` with the bytes from `at` on. Throws Error where they cannot be read, as in a file
  // that has become shorter.
  virtual void read(uint64_t at, std::span<std::byte> out) const = 0;
};

// A tensor inside a file.
struct StoredTensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // of its bytes in `data`
  std::shared_ptr<const TensorBytes> data;

  int64_t size() const;  // elements
  size_t byte_size() const { return static_cast<size_t>(end - begin); }
  std::string bytes() const;  // all of them. Throws Error as TensorBytes does
};

// An open file; nothing is read but the header until a tensor's bytes are, and those are read, not
// mapped: a file that another program shortens meanwhile is an error, not a signal. Everything the
// header says is checked against the file: lengths, offsets (in bounds, no holes, no overlap),
// dtypes, shapes, doubled names. Throws Error naming the file and the tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::string& path() const;
  const std::vector<StoredTensor>& tensors() const;       // in the order of their bytes
  const StoredTensor* find(std::string_view name) const;  // null: not there

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The header alone, for tests. `data` is all that follows the header in the file.
std::vector<StoredTensor> parse_safetensors_header(const std::string& path, std::string_view header,
                                                   std::shared_ptr<const TensorBytes> data);

// float32 values of an f32, f16, bf16 or f64 tensor; `out` has its size. Exact but for f64, which
// is rounded. Throws Error for other dtypes and for bytes that cannot be read.
void copy_as_float(const StoredTensor& tensor, const std::string& path, std::span<float> out);

// One tensor to be written.
struct TensorToSave {
  std::string name;
  std::vector<int64_t> shape;
  std::span<const float> values;
};

// Writes an F32 file, atomically: temporary name, sync, rename. Order and alignment are those of
// the reference implementation (by name; a header padded to 8 bytes), so that the same tensors give
// the same file. Throws Error (a full disk, a folder that is not there); an older file then stays.
// What was written, for manifests.
FileSum write_safetensors(const std::string& path, std::span<const TensorToSave> tensors);

}  // namespace leeway
