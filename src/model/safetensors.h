// The safetensors format: an 8-byte length, a JSON header, and the bytes of the tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_writer.h"

namespace leeway {

enum class DType { f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean };
const char* name_of(DType dtype);  // as spelled in the file: "F32", "BF16", ..
size_t size_of(DType dtype);

// The bytes that follow a file's header.
class TensorBytes {
 public:
  virtual ~TensorBytes() = default;
  virtual uint64_t size() const = 0;
  // Fills `out` with the bytes from `at` on. Throws Error if they cannot be read, for example
  // because the file has become shorter.
  virtual void read(uint64_t at, std::span<std::byte> out) const = 0;
};

// A tensor inside a file.
struct StoredTensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // byte range in `data`
  std::shared_ptr<const TensorBytes> data;

  int64_t size() const;  // elements
  size_t byte_size() const { return static_cast<size_t>(end - begin); }
  std::string bytes() const;  // all bytes. Throws Error as TensorBytes does
};

// An open file. Only the header is read until a tensor's bytes are requested. The file is read, not
// mapped, so if another program truncates it meanwhile, that is an error, not a signal. Everything
// in the header is checked against the file: lengths, offsets (in bounds, no gaps, no overlap),
// dtypes, shapes, duplicate names. Throws Error naming the file and the tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::string& path() const;
  const std::vector<StoredTensor>& tensors() const;       // in the order of their bytes
  const StoredTensor* find(std::string_view name) const;  // null if absent

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Parses only the header, for tests. `data` is everything after the header in the file.
std::vector<StoredTensor> parse_safetensors_header(const std::string& path, std::string_view header,
                                                   std::shared_ptr<const TensorBytes> data);

// Converts an f32, f16, bf16 or f64 tensor to float32; `out` has its size. Exact except for f64,
// which is rounded. Throws Error for other dtypes and for bytes that cannot be read.
void copy_as_float(const StoredTensor& tensor, const std::string& path, std::span<float> out);

// One tensor to be written.
struct TensorToSave {
  std::string name;
  std::vector<int64_t> shape;
  std::span<const float> values;
};

// One tensor to be written whose values come later.
struct TensorPlan {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;

  uint64_t byte_size() const;
};

// Writes a file whose values are never all in memory. They come as bytes, in pieces of any size, in
// the order of `tensors()`, which are the plan's sorted by name. Throws Error as
// `write_safetensors` does; the file appears with `commit`, whole.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::vector<TensorPlan> plan);
  const std::vector<TensorPlan>& tensors() const { return tensors_; }
  void write(std::span<const std::byte> values);
  FileSum commit();

 private:
  std::vector<TensorPlan> tensors_;
  uint64_t left_ = 0;  // bytes of values that are still to come
  FileWriter file_;
};

// Writes an F32 file atomically: temporary name, sync, rename. Order and alignment are those of the
// reference implementation (sorted by name; header padded to 8 bytes), so the same tensors give the
// same file. Throws Error, e.g. for a full disk or a missing folder; an older file then stays.
// Returns the file's size and checksum, for manifests.
FileSum write_safetensors(const std::string& path, std::span<const TensorToSave> tensors);

// One tensor of any dtype, whose bytes are made when its turn comes and then forgotten.
struct TensorToMake {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::function<std::string()> bytes;  // as many as dtype and shape say
};
// The same of such tensors.
FileSum write_made_safetensors(const std::string& path, std::span<const TensorToMake> tensors);

}  // namespace leeway
