// The safetensors format: an 8-byte length, a JSON header, and the tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

enum class DType { f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean };
const char* name_of(DType dtype);  // as in the file: "F32", "BF16", ..
size_t size_of(DType dtype);

// A tensor inside a mapped file.
struct StoredTensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // valid while its SafetensorsFile lives

  int64_t size() const;  // elements
};

// A file mapped into memory; nothing is read but the header until a tensor's bytes are. Everything
// the header says is checked against the file: lengths, offsets (in bounds, no holes, no overlap),
// dtypes, shapes, doubled names. Throws Error naming the file and the tensor. The file must not be
// shortened while it is mapped; replacing it by rename does no harm.
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

// The header alone, for tests. The tensors' bytes are spans into `data`, which is all that follows
// the header in the file.
std::vector<StoredTensor> parse_safetensors_header(const std::string& path, std::string_view header,
                                                   std::span<const std::byte> data);

// float32 values of an f32, f16, bf16 or f64 tensor; `out` has its size. Exact but for f64, which
// is rounded. Throws Error for other dtypes.
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
void write_safetensors(const std::string& path, std::span<const TensorToSave> tensors);

}  // namespace leeway
