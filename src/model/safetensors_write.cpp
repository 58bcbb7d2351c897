#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <vector>

#include "leeway/error.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

// What the header says of a tensor.
struct Entry {
  const std::string* name;
  DType dtype;
  const std::vector<int64_t>* shape;
  size_t place;  // in the caller's list

  uint64_t bytes() const {
    uint64_t size = size_of(dtype);
    for (const int64_t extent : *shape) size *= static_cast<uint64_t>(extent);
    return size;
  }
};

// In the file's order.
template <class Tensor, class DTypeOf>
std::vector<Entry> sorted_entries(std::span<const Tensor> tensors, const DTypeOf& dtype_of) {
  std::vector<Entry> sorted;
  for (size_t i = 0; i < tensors.size(); ++i) {
    sorted.push_back({&tensors[i].name, dtype_of(tensors[i]), &tensors[i].shape, i});
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const Entry& a, const Entry& b) { return *a.name < *b.name; });
  for (size_t i = 0; i < sorted.size(); ++i) {
    LEEWAY_CHECK(*sorted[i].name != "__metadata__", "the format reserves this name");
    LEEWAY_CHECK(i == 0 || *sorted[i].name != *sorted[i - 1].name, "names must be distinct");
  }
  return sorted;
}

std::string header_of(std::span<const Entry> tensors) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  writer.StartObject();
  // transformers refuses files without it.
  writer.Key("__metadata__");
  writer.StartObject();
  writer.Key("format");
  writer.String("pt");
  writer.EndObject();
  uint64_t begin = 0;
  for (const Entry& tensor : tensors) {
    const uint64_t end = begin + tensor.bytes();
    writer.Key(tensor.name->c_str(), static_cast<rapidjson::SizeType>(tensor.name->size()));
    writer.StartObject();
    writer.Key("dtype");
    writer.String(name_of(tensor.dtype));
    writer.Key("shape");
    writer.StartArray();
    for (const int64_t extent : *tensor.shape) writer.Int64(extent);
    writer.EndArray();
    writer.Key("data_offsets");
    writer.StartArray();
    writer.Uint64(begin);
    writer.Uint64(end);
    writer.EndArray();
    writer.EndObject();
    begin = end;
  }
  writer.EndObject();
  std::string header(buffer.GetString(), buffer.GetSize());
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

void write_header(FileWriter& file, std::span<const Entry> tensors) {
  const std::string header = header_of(tensors);
  const uint64_t length = header.size();
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
}

}  // namespace

FileSum write_safetensors(const std::string& path, std::span<const TensorToSave> tensors) {
  const auto sorted = sorted_entries(tensors, [](const TensorToSave&) { return DType::f32; });
  for (const Entry& entry : sorted) {
    LEEWAY_CHECK(entry.bytes() == tensors[entry.place].values.size_bytes(),
                 "the shape of " + *entry.name + " must match its size");
  }
  FileWriter file(path);
  write_header(file, sorted);
  for (const Entry& entry : sorted) {
    const std::span<const float> values = tensors[entry.place].values;
    file.write(values.data(), values.size_bytes());
  }
  return file.commit();
}

FileSum write_made_safetensors(const std::string& path, std::span<const TensorToMake> tensors) {
  const auto sorted = sorted_entries(tensors, [](const TensorToMake& each) { return each.dtype; });
  FileWriter file(path);
  write_header(file, sorted);
  for (const Entry& entry : sorted) {
    const std::string bytes = tensors[entry.place].bytes();
    LEEWAY_CHECK(entry.bytes() == bytes.size(), "the bytes of " + *entry.name + " fit its shape");
    file.write(bytes.data(), bytes.size());
  }
  return file.commit();
}

}  // namespace leeway
