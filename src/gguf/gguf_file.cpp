#include "gguf/gguf_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <limits>
#include <utility>

#include "gguf/dequantise.h"
#include "leeway/error.h"
#include "model/name_text.h"

namespace leeway {
namespace {

// The fewest bytes of an entry (empty key, type, one byte) and of a tensor's description.
constexpr uint64_t kLeastEntry = 8 + 4 + 1, kLeastTensor = 8 + 4 + 8 + 4 + 8;
constexpr uint32_t kMostExtents = 4;
constexpr uint64_t kMostAlignment = 1 << 20;

[[noreturn]] void fail_at(const std::string& path, uint64_t at, const std::string& problem) {
  throw Error(fmt::format("{}: at byte {}: {}", path, at, problem));
}

// Reads a file from its beginning in pieces. Nothing is allocated for what the file only claims.
class HeaderCursor {
 public:
  explicit HeaderCursor(const ReadableFile& file) : file_(file) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return file_.size() - at_; }

  [[noreturn]] void fail(uint64_t at, const std::string& problem) const {
    fail_at(file_.path(), at, problem);
  }

  void take(void* out, uint64_t size, const char* what) {
    if (size > left()) {
      fail(at_, fmt::format("the file ends inside {}: {} bytes are needed, {} are left", what, size,
                            left()));
    }
    char* to = static_cast<char*>(out);
    while (size > 0) {
      if (at_ < window_at_ || at_ >= window_at_ + window_.size()) fill();
      const uint64_t inside = at_ - window_at_;
      const uint64_t part = std::min<uint64_t>(size, window_.size() - inside);
      std::memcpy(to, window_.data() + inside, part);
      to += part;
      at_ += part;
      size -= part;
    }
  }
  template <class T>
  T number(const char* what) {
    T value{};
    take(&value, sizeof value, what);
    return value;
  }
  std::string text(const char* what) {
    const uint64_t start = at_;
    const uint64_t length = number<uint64_t>(what);
    if (length > left()) {
      fail(start, fmt::format("{} of {} bytes, {} are left in the file", what, length, left()));
    }
    std::string text(length, '\0');
    take(text.data(), length, what);
    return text;
  }
  // A number of things that take at least `least` bytes each.
  uint64_t count(const char* what, uint64_t least) {
    const uint64_t start = at_;
    const uint64_t claimed = number<uint64_t>(what);
    counted(start, what, claimed, least);
    return claimed;
  }
  void counted(uint64_t start, const char* what, uint64_t claimed, uint64_t least) const {
    if (claimed > left() / least) {
      fail(start, fmt::format("{} = {}: the {} bytes that are left cannot hold them", what, claimed,
                              left()));
    }
  }

 private:
  void fill() {
    constexpr uint64_t kWindow = 1 << 18;
    window_at_ = at_;
    window_.resize(std::min(kWindow, left()));
    file_.read(at_, std::as_writable_bytes(std::span(window_)));
  }

  const ReadableFile& file_;
  uint64_t at_ = 0, window_at_ = 0;
  std::string window_;
};

GgufValue read_array(HeaderCursor& cursor) {
  const uint64_t start = cursor.at();
  const uint32_t type = cursor.number<uint32_t>("the type of an array");
  const size_t size = size_of_gguf_number(type);
  if (size == 0 && type != kGgufText) {
    cursor.fail(start,
                type == kGgufArray
                    ? std::string("an array of arrays is not supported")
                    : fmt::format("an array's elements have the type {}, which is unknown", type));
  }
  const uint64_t count = cursor.count("elements of an array", type == kGgufText ? 8 : size);
  if (type != kGgufText) {
    GgufNumbers numbers{.type = type, .bytes = std::string(count * size, '\0')};
    cursor.take(numbers.bytes.data(), numbers.bytes.size(), "an array");
    return numbers;
  }
  std::vector<std::string> texts;
  for (uint64_t i = 0; i < count; ++i) texts.push_back(cursor.text("a text"));
  return texts;
}

template <size_t kType>
GgufValue read_as(HeaderCursor& cursor) {
  return GgufValue(std::in_place_index<kType>,
                   cursor.number<std::variant_alternative_t<kType, GgufValue>>("a value"));
}

GgufValue read_value(HeaderCursor& cursor) {
  const uint64_t start = cursor.at();
  const uint32_t type = cursor.number<uint32_t>("the type of a value");
  switch (type) {
    case 0: return read_as<0>(cursor);
    case 1: return read_as<1>(cursor);
    case 2: return read_as<2>(cursor);
    case 3: return read_as<3>(cursor);
    case 4: return read_as<4>(cursor);
    case 5: return read_as<5>(cursor);
    case 6: return read_as<6>(cursor);
    case 7: {
      const uint64_t at = cursor.at();
      const uint8_t byte = cursor.number<uint8_t>("a flag");
      if (byte > 1) cursor.fail(at, fmt::format("a flag is {}: must be 0 or 1", byte));
      return byte == 1;
    }
    case kGgufText: return cursor.text("a text");
    case kGgufArray: return read_array(cursor);
    case 10: return read_as<10>(cursor);
    case 11: return read_as<11>(cursor);
    case 12: return read_as<12>(cursor);
    default: cursor.fail(start, fmt::format("a value has the type {}, which is unknown", type));
  }
}

// Without the place of its values, which follows from all descriptions.
GgufTensor read_description(HeaderCursor& cursor) {
  GgufTensor tensor;
  tensor.described_at = cursor.at();
  tensor.name = cursor.text("a tensor's name");
  const auto fail = [&](uint64_t at, const std::string& problem) {
    cursor.fail(at, fmt::format("tensor {}: {}", name_text(tensor.name), problem));
  };
  uint64_t at = cursor.at();
  const uint32_t extents = cursor.number<uint32_t>("a tensor's description");
  if (extents == 0 || extents > kMostExtents) {
    fail(at, fmt::format("has {} extents: must be 1 to {}", extents, kMostExtents));
  }
  uint64_t elements = 1;
  for (uint32_t i = 0; i < extents; ++i) {
    at = cursor.at();
    const uint64_t extent = cursor.number<uint64_t>("a tensor's description");
    constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
    if (extent == 0) fail(at, "has an extent of 0");
    if (__builtin_mul_overflow(elements, extent, &elements) || elements > kMost / 8) {
      fail(at, "its shape is larger than any file");
    }
    tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(extent));
  }
  at = cursor.at();
  const uint32_t number = cursor.number<uint32_t>("a tensor's description");
  const GgufTypeInfo* info = find_gguf_type(number);
  if (info == nullptr) {
    fail(at, fmt::format("its type is {}, which is not read; these are: {}", gguf_type_text(number),
                         gguf_type_names()));
  }
  tensor.type = info->type;
  if (tensor.row_length() % static_cast<int64_t>(info->elements) != 0) {
    fail(at, fmt::format("a row of {} elements is no multiple of the {} that a block of {} has",
                         tensor.row_length(), info->elements, info->name));
  }
  tensor.bytes = elements / info->elements * info->block_bytes;
  tensor.begin = cursor.number<uint64_t>("a tensor's description");
  return tensor;
}

// Turns offsets into places in the file.
void place_tensors(const HeaderCursor& cursor, uint64_t alignment, uint64_t file_size,
                   std::vector<GgufTensor>& tensors) {
  if (tensors.empty()) return;
  const uint64_t data = (cursor.at() + alignment - 1) / alignment * alignment;
  for (GgufTensor& tensor : tensors) {
    const auto fail = [&](const std::string& problem) {
      cursor.fail(tensor.described_at,
                  fmt::format("tensor {}: {}", name_text(tensor.name), problem));
    };
    const uint64_t offset = tensor.begin;
    if (offset % alignment != 0) {
      fail(fmt::format("its offset {} is no multiple of the alignment {}", offset, alignment));
    }
    if (data > file_size || offset > file_size - data || tensor.bytes > file_size - data - offset) {
      fail(
          fmt::format("its {} bytes at {} + {} end beyond the file's {} bytes; is the file "
                      "truncated?",
                      tensor.bytes, data, offset, file_size));
    }
    tensor.begin = data + offset;
  }
  std::vector<const GgufTensor*> sorted;
  for (const GgufTensor& tensor : tensors) sorted.push_back(&tensor);
  std::sort(sorted.begin(), sorted.end(),
            [](const GgufTensor* a, const GgufTensor* b) { return a->begin < b->begin; });
  for (size_t i = 1; i < sorted.size(); ++i) {
    const GgufTensor &before = *sorted[i - 1], &tensor = *sorted[i];
    if (tensor.begin - before.begin >= before.bytes) continue;
    cursor.fail(tensor.described_at,
                fmt::format("tensor {}: its bytes from {} on overlap those of {}",
                            name_text(tensor.name), tensor.begin, name_text(before.name)));
  }
}

uint32_t read_version(HeaderCursor& cursor) {
  char magic[4];
  if (cursor.left() < sizeof magic) {
    cursor.fail(0, fmt::format("{} bytes are too few for a GGUF file", cursor.left()));
  }
  cursor.take(magic, sizeof magic, "the magic number");
  if (std::memcmp(magic, kGgufMagic, sizeof magic) != 0) {
    cursor.fail(0, "the file does not begin with GGUF, so it is no GGUF file");
  }
  const uint32_t version = cursor.number<uint32_t>("the version");
  if (version == 2 || version == 3) return version;
  const uint32_t swapped = __builtin_bswap32(version);
  if (swapped == 2 || swapped == 3)
    cursor.fail(4, "the file is big-endian, which is not supported");
  cursor.fail(4, fmt::format("version {} is not supported; 2 and 3 are", version));
}

// The number that the file's author wrote, which float32 has rounded.
double shortest_double(float value) {
  const std::string text = fmt::format("{}", value);
  double number = value;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace

int64_t GgufTensor::rows() const {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return rows;
}

GgufFile::GgufFile(const std::string& path) : file_(std::make_shared<const ReadableFile>(path)) {
  HeaderCursor cursor(*file_);
  version_ = read_version(cursor);
  const uint64_t counts_at = cursor.at();
  const uint64_t tensor_count = cursor.count("tensors", kLeastTensor);
  const uint64_t entry_count = cursor.count("metadata entries", kLeastEntry);
  for (uint64_t i = 0; i < entry_count; ++i) {
    const uint64_t at = cursor.at();
    std::string key = cursor.text("a key");
    const uint64_t value_at = cursor.at();
    if (metadata_.contains(key)) cursor.fail(at, fmt::format("{} is given twice", name_text(key)));
    try {
      metadata_[key] = {read_value(cursor), value_at};
    } catch (const Error& error) {
      throw Error(fmt::format("{} (the value of {})", error.what(), name_text(key)));
    }
  }
  cursor.counted(counts_at, "tensors", tensor_count, kLeastTensor);
  for (uint64_t i = 0; i < tensor_count; ++i) {
    tensors_.push_back(read_description(cursor));
    const GgufTensor& tensor = tensors_.back();
    if (!places_.emplace(tensor.name, i).second) {
      cursor.fail(tensor.described_at,
                  fmt::format("tensor {} is given twice", name_text(tensor.name)));
    }
  }
  const int64_t alignment = integer("general.alignment").value_or(kGgufAlignment);
  if (alignment < 1 || alignment > static_cast<int64_t>(kMostAlignment) ||
      !std::has_single_bit(static_cast<uint64_t>(alignment))) {
    refuse_key("general.alignment",
               fmt::format("must be a power of two of at most {}", kMostAlignment));
  }
  place_tensors(cursor, static_cast<uint64_t>(alignment), file_->size(), tensors_);
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto place = places_.find(name);
  return place == places_.end() ? nullptr : &tensors_[place->second];
}

void GgufFile::refuse(const GgufTensor& tensor, const std::string& problem) const {
  fail_at(path(), tensor.described_at,
          fmt::format("tensor {}: {}", name_text(tensor.name), problem));
}

void GgufFile::refuse_key(std::string_view key, const std::string& problem) const {
  const auto entry = metadata_.find(key);
  LEEWAY_CHECK(entry != metadata_.end(), "only a key that is there is refused");
  fail_at(path(), entry->second.at,
          fmt::format("{} = {}: {}", key, gguf_value_text(entry->second.value), problem));
}

std::optional<int64_t> GgufFile::integer(std::string_view key) const {
  const auto entry = metadata_.find(key);
  if (entry == metadata_.end()) return std::nullopt;
  return std::visit(
      [&](const auto& held) -> int64_t {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
          if (!std::in_range<int64_t>(held)) refuse_key(key, "is too large");
          return static_cast<int64_t>(held);
        } else {
          refuse_key(key, "must be an integer");
        }
      },
      entry->second.value);
}

std::optional<double> GgufFile::real(std::string_view key) const {
  const auto entry = metadata_.find(key);
  if (entry == metadata_.end()) return std::nullopt;
  if (const float* number = std::get_if<float>(&entry->second.value))
    return shortest_double(*number);
  if (const double* number = std::get_if<double>(&entry->second.value)) return *number;
  refuse_key(key, "must be a number with a fraction");
}

std::optional<bool> GgufFile::flag(std::string_view key) const {
  const auto entry = metadata_.find(key);
  if (entry == metadata_.end()) return std::nullopt;
  if (const bool* flag = std::get_if<bool>(&entry->second.value)) return *flag;
  refuse_key(key, "must be true or false");
}

const std::string* GgufFile::text(std::string_view key) const {
  const auto entry = metadata_.find(key);
  if (entry == metadata_.end()) return nullptr;
  if (const auto* text = std::get_if<std::string>(&entry->second.value)) return text;
  refuse_key(key, "must be a text");
}

const std::vector<std::string>* GgufFile::texts(std::string_view key) const {
  const auto entry = metadata_.find(key);
  if (entry == metadata_.end()) return nullptr;
  if (const auto* texts = std::get_if<std::vector<std::string>>(&entry->second.value)) return texts;
  refuse_key(key, "must be an array of texts");
}

const GgufNumbers* GgufFile::numbers(std::string_view key) const {
  const auto entry = metadata_.find(key);
  if (entry == metadata_.end()) return nullptr;
  if (const auto* numbers = std::get_if<GgufNumbers>(&entry->second.value)) return numbers;
  refuse_key(key, "must be an array of numbers");
}

void GgufFile::read_rows(const GgufTensor& tensor, int64_t first, int64_t count,
                         std::span<float> out) const {
  LEEWAY_CHECK(first >= 0 && count >= 0 && first + count <= tensor.rows() &&
                   static_cast<int64_t>(out.size()) == count * tensor.row_length(),
               "the rows must be the tensor's, and fit");
  std::vector<std::byte> bytes(tensor.row_bytes() * static_cast<uint64_t>(count));
  file_->read(tensor.begin + static_cast<uint64_t>(first) * tensor.row_bytes(), bytes);
  dequantise(tensor.type, bytes, out);
}

}  // namespace leeway
