#include "gguf/gguf_writer.h"

#include <algorithm>
#include <type_traits>

#include "leeway/error.h"

namespace leeway {
namespace {

uint64_t aligned(uint64_t size) {
  return (size + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment;
}

class HeaderBytes {
 public:
  void put_bytes(const void* data, size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
  }
  template <class T>
  void put(T number) {
    static_assert(std::is_arithmetic_v<T>);
    put_bytes(&number, sizeof number);
  }
  void put_text(const std::string& text) {
    put(uint64_t{text.size()});
    bytes_ += text;
  }
  void put_value(const GgufValue& value) {
    put(value.index() == kGgufTypes ? kGgufArray : static_cast<uint32_t>(value.index()));
    std::visit(
        [&](const auto& held) {
          using T = std::decay_t<decltype(held)>;
          if constexpr (std::is_same_v<T, std::string>) {
            put_text(held);
          } else if constexpr (std::is_same_v<T, GgufNumbers>) {
            put(held.type);
            put(uint64_t{held.size()});
            bytes_ += held.bytes;
          } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
            put(kGgufText);
            put(uint64_t{held.size()});
            for (const std::string& text : held) put_text(text);
          } else {
            put(held);
          }
        },
        value);
  }
  void pad() { bytes_.resize(aligned(bytes_.size()), '\0'); }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

std::string header_of(const GgufPlan& plan) {
  constexpr uint32_t kVersion = 3;
  HeaderBytes header;
  header.put_bytes(kGgufMagic, sizeof kGgufMagic);
  header.put(kVersion);
  header.put(uint64_t{plan.tensors.size()});
  header.put(uint64_t{plan.metadata.size()});
  for (const auto& [key, value] : plan.metadata) {
    header.put_text(key);
    header.put_value(value);
  }
  uint64_t offset = 0;
  for (const GgufTensorPlan& tensor : plan.tensors) {
    header.put_text(tensor.name);
    header.put(static_cast<uint32_t>(tensor.shape.size()));
    for (auto extent = tensor.shape.rbegin(); extent != tensor.shape.rend(); ++extent) {
      header.put(static_cast<uint64_t>(*extent));
    }
    header.put(static_cast<uint32_t>(tensor.type));
    header.put(offset);
    offset += aligned(tensor.bytes());
  }
  header.pad();
  return header.bytes();
}

}  // namespace

uint64_t GgufTensorPlan::bytes() const {
  const GgufTypeInfo& info = info_of(type);
  LEEWAY_CHECK(!shape.empty() && shape.back() % static_cast<int64_t>(info.elements) == 0,
               "a row must consist of whole blocks");
  uint64_t elements = 1;
  for (const int64_t extent : shape) elements *= static_cast<uint64_t>(extent);
  return elements / info.elements * info.block_bytes;
}

uint64_t GgufPlan::file_bytes() const {
  uint64_t total = header_of(*this).size();
  for (const GgufTensorPlan& tensor : tensors) total += aligned(tensor.bytes());
  return total;
}

GgufWriter::GgufWriter(const std::string& path, const GgufPlan& plan) : file_(path) {
  const std::string header = header_of(plan);
  file_.write(header.data(), header.size());
  for (const GgufTensorPlan& tensor : plan.tensors) sizes_.push_back(tensor.bytes());
}

void GgufWriter::write(std::span<const std::byte> values) {
  static constexpr char kZeros[kGgufAlignment] = {};
  while (!values.empty()) {
    LEEWAY_CHECK(tensor_ < sizes_.size(), "more values than the plan has");
    const uint64_t size = sizes_[tensor_];
    const uint64_t part = std::min<uint64_t>(values.size(), size - written_);
    file_.write(values.data(), part);
    values = values.subspan(part);
    written_ += part;
    if (written_ < size) continue;
    file_.write(kZeros, aligned(size) - size);
    ++tensor_;
    written_ = 0;
  }
}

FileSum GgufWriter::commit() {
  LEEWAY_CHECK(tensor_ == sizes_.size(), "every tensor must be written");
  return file_.commit();
}

}  // namespace leeway
