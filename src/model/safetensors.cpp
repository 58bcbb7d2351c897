#include "model/safetensors.h"

#include <fmt/format.h>
#include <rapidjson/memorystream.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "base/half.h"
#include "base/json.h"
#include "base/readable_file.h"
#include "leeway/error.h"
#include "model/name_text.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

constexpr size_t kLengthBytes = 8;
// The limit of the reference implementation.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct DTypeInfo {
  DType dtype;
  const char* name;
  size_t size;
};
constexpr DTypeInfo kDTypes[] = {
    {DType::f64, "F64", 8},      {DType::f32, "F32", 4}, {DType::f16, "F16", 2},
    {DType::bf16, "BF16", 2},    {DType::i64, "I64", 8}, {DType::i32, "I32", 4},
    {DType::i16, "I16", 2},      {DType::i8, "I8", 1},   {DType::u8, "U8", 1},
    {DType::boolean, "BOOL", 1},
};
constexpr bool in_order() {
  size_t i = 0;
  for (const DTypeInfo& info : kDTypes) {
    if (static_cast<size_t>(info.dtype) != i++) return false;
  }
  return true;
}
static_assert(in_order(), "name_of and size_of look up by place");

std::string_view text_of(const Json& value) { return {value.GetString(), value.GetStringLength()}; }

void refuse_bad_utf8(const std::string& path, std::string_view text) {
  struct {
    void Put(char) {}
  } nothing;
  rapidjson::MemoryStream stream(text.data(), text.size());
  while (stream.Tell() < text.size()) {
    const size_t at = stream.Tell();
    if (!rapidjson::UTF8<>::Validate(stream, nothing)) {
      throw Error(fmt::format("{}: byte {} of the header is not UTF-8", path, at));
    }
  }
}

class HeaderReader {
 public:
  HeaderReader(const std::string& path, uint64_t data_size) : path_(path), data_size_(data_size) {}

  StoredTensor read(std::string_view name, const Json& value) const {
    StoredTensor tensor;
    tensor.name = name;
    if (!value.IsObject()) refuse(name, "must be an object");
    const Json& dtype = member(name, value, "dtype");
    if (!dtype.IsString()) refuse(name, "dtype must be a string");
    tensor.dtype = read_dtype(name, text_of(dtype));
    uint64_t bytes = size_of(tensor.dtype);
    const Json& shape = member(name, value, "shape");
    if (!shape.IsArray()) refuse(name, "shape must be a list");
    bool empty = false;
    for (const Json& n : shape.GetArray()) {
      if (!n.IsInt64() || n.GetInt64() < 0) {
        refuse(name, "shape must contain nonnegative integers");
      }
      const int64_t extent = n.GetInt64();
      tensor.shape.push_back(extent);
      if (extent == 0) {
        empty = true;
      } else if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes) ||
                 bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        refuse(name, "its shape is larger than any file");
      }
    }
    if (empty) bytes = 0;
    read_offsets(name, member(name, value, "data_offsets"), tensor);
    if (tensor.end - tensor.begin != bytes) {
      refuse(name, fmt::format("its data_offsets span {} bytes, its shape and dtype need {}",
                               tensor.end - tensor.begin, bytes));
    }
    return tensor;
  }

  [[noreturn]] void refuse(std::string_view name, const std::string& problem) const {
    throw Error(fmt::format("{}: tensor {}: {}", path_, name_text(name), problem));
  }

 private:
  const Json& member(std::string_view name, const Json& object, const char* key) const {
    const Json* found = nullptr;
    for (const auto& each : object.GetObject()) {
      if (text_of(each.name) != key) continue;
      if (found != nullptr) refuse(name, fmt::format("{} is given twice", key));
      found = &each.value;
    }
    if (found == nullptr) refuse(name, fmt::format("{} is missing", key));
    return *found;
  }

  DType read_dtype(std::string_view name, std::string_view text) const {
    for (const DTypeInfo& info : kDTypes) {
      if (text == info.name) return info.dtype;
    }
    refuse(name, fmt::format("dtype {} is unknown", name_text(text)));
  }

  void read_offsets(std::string_view name, const Json& offsets, StoredTensor& tensor) const {
    if (!offsets.IsArray() || offsets.Size() != 2 || !offsets[0].IsUint64() ||
        !offsets[1].IsUint64()) {
      refuse(name, "data_offsets must be two nonnegative integers");
    }
    tensor.begin = offsets[0].GetUint64();
    tensor.end = offsets[1].GetUint64();
    if (tensor.begin > tensor.end || tensor.end > data_size_) {
      refuse(name, fmt::format("data_offsets [{}, {}] are outside the file's {} bytes of data; "
                               "is the file truncated?",
                               tensor.begin, tensor.end, data_size_));
    }
  }

  const std::string& path_;
  uint64_t data_size_;
};

// What follows a file's header.
class FileBytes : public TensorBytes {
 public:
  FileBytes(std::shared_ptr<const ReadableFile> file, uint64_t begin)
      : file_(std::move(file)), begin_(begin) {}
  uint64_t size() const override { return file_->size() - begin_; }
  void read(uint64_t at, std::span<std::byte> out) const override { file_->read(begin_ + at, out); }

 private:
  std::shared_ptr<const ReadableFile> file_;
  uint64_t begin_;
};

// Reads in pieces: a tensor may be larger than the memory left besides its floats.
template <class Stored, class Convert>
void convert_all(const StoredTensor& tensor, std::span<float> out, Convert convert) {
  std::vector<Stored> piece(std::min<size_t>(out.size(), size_t{1} << 18));
  for (size_t done = 0; done < out.size(); done += piece.size()) {
    piece.resize(std::min(piece.size(), out.size() - done));
    tensor.data->read(tensor.begin + done * sizeof(Stored),
                      std::as_writable_bytes(std::span(piece)));
    for (size_t i = 0; i < piece.size(); ++i) out[done + i] = convert(piece[i]);
  }
}

}  // namespace

const char* name_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }
size_t size_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].size; }

int64_t StoredTensor::size() const { return static_cast<int64_t>(byte_size() / size_of(dtype)); }

std::string StoredTensor::bytes() const {
  std::string all(byte_size(), '\0');
  data->read(begin, std::as_writable_bytes(std::span(all)));
  return all;
}

std::vector<StoredTensor> parse_safetensors_header(const std::string& path, std::string_view header,
                                                   std::shared_ptr<const TensorBytes> data) {
  if (header.empty() || header[0] != '{') {
    throw Error(
        fmt::format("{}: the header does not start with {{; is this a safetensors file?", path));
  }
  refuse_bad_utf8(path, header);
  const rapidjson::Document document = parse_json(path + ": header", header);
  const HeaderReader reader(path, data->size());
  std::unordered_set<std::string_view> names;
  std::vector<StoredTensor> tensors;
  for (const auto& member : document.GetObject()) {
    const std::string_view name = text_of(member.name);
    if (!names.insert(name).second) {
      throw Error(fmt::format("{}: {} occurs twice in the header", path, name_text(name)));
    }
    if (name != "__metadata__") {
      tensors.push_back(reader.read(name, member.value));
    } else if (!member.value.IsObject()) {
      throw Error(fmt::format("{}: __metadata__ must be an object", path));
    }
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const StoredTensor& a, const StoredTensor& b) {
                     return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
                   });
  uint64_t reached = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    StoredTensor& tensor = tensors[i];
    if (tensor.begin < reached) {
      reader.refuse(tensor.name, fmt::format("overlaps {}", name_text(tensors[i - 1].name)));
    }
    if (tensor.begin > reached) {
      reader.refuse(tensor.name, fmt::format("bytes {} to {} before it belong to no tensor",
                                             reached, tensor.begin));
    }
    reached = tensor.end;
    tensor.data = data;
  }
  if (reached != data->size()) {
    throw Error(fmt::format("{}: {} bytes after the last tensor belong to none", path,
                            data->size() - reached));
  }
  return tensors;
}

struct SafetensorsFile::Impl {
  explicit Impl(std::string file_path) : path(std::move(file_path)) {
    const auto file = std::make_shared<const ReadableFile>(path);
    if (file->size() < kLengthBytes) {
      throw Error(
          fmt::format("{}: {} bytes are too few for a safetensors file", path, file->size()));
    }
    uint64_t length = 0;
    file->read(0, std::as_writable_bytes(std::span(&length, 1)));
    if (length > kMaxHeaderBytes || length > file->size() - kLengthBytes) {
      throw Error(
          fmt::format("{}: a header of {} bytes in a file of {}; the file is truncated or not a "
                      "safetensors file",
                      path, length, file->size()));
    }
    std::string header(length, '\0');
    file->read(kLengthBytes, std::as_writable_bytes(std::span(header)));
    tensors = parse_safetensors_header(
        path, header, std::make_shared<const FileBytes>(file, kLengthBytes + length));
    for (size_t i = 0; i < tensors.size(); ++i) places.emplace(tensors[i].name, i);
  }

  std::string path;
  std::vector<StoredTensor> tensors;
  std::unordered_map<std::string_view, size_t> places;
};

SafetensorsFile::SafetensorsFile(const std::string& path) : impl_(std::make_unique<Impl>(path)) {}
SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::string& SafetensorsFile::path() const { return impl_->path; }
const std::vector<StoredTensor>& SafetensorsFile::tensors() const { return impl_->tensors; }
const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto place = impl_->places.find(name);
  return place == impl_->places.end() ? nullptr : &impl_->tensors[place->second];
}

void copy_as_float(const StoredTensor& tensor, const std::string& path, std::span<float> out) {
  LEEWAY_CHECK(static_cast<int64_t>(out.size()) == tensor.size(),
               "the output must have room for every value");
  if (out.empty()) return;
  switch (tensor.dtype) {
    case DType::f32: tensor.data->read(tensor.begin, std::as_writable_bytes(out)); return;
    case DType::bf16: convert_all<uint16_t>(tensor, out, from_bf16); return;
    case DType::f16: convert_all<uint16_t>(tensor, out, from_f16); return;
    case DType::f64:
      convert_all<double>(tensor, out, [](double v) { return static_cast<float>(v); });
      return;
    default:
      throw Error(
          fmt::format("{}: tensor {}: dtype {} is not supported; F32, BF16, F16 or F64 is needed",
                      path, name_text(tensor.name), name_of(tensor.dtype)));
  }
}

}  // namespace leeway
