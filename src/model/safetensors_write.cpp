#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>

#include "leeway/error.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

std::string header_of(std::span<const TensorToSave* const> tensors) {
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
  for (const TensorToSave* tensor : tensors) {
    const uint64_t end = begin + tensor->values.size_bytes();
    writer.Key(tensor->name.c_str(), static_cast<rapidjson::SizeType>(tensor->name.size()));
    writer.StartObject();
    writer.Key("dtype");
    writer.String(name_of(DType::f32));
    writer.Key("shape");
    writer.StartArray();
    for (const int64_t extent : tensor->shape) writer.Int64(extent);
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

}  // namespace

FileSum write_safetensors(const std::string& path, std::span<const TensorToSave> tensors) {
  std::vector<const TensorToSave*> sorted;
  for (const TensorToSave& tensor : tensors) {
    uint64_t size = 1;
    for (const int64_t extent : tensor.shape) size *= static_cast<uint64_t>(extent);
    LEEWAY_CHECK(size == tensor.values.size(),
                 "the shape of " + tensor.name + " must match its size");
    sorted.push_back(&tensor);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const TensorToSave* a, const TensorToSave* b) { return a->name < b->name; });
  for (size_t i = 0; i < sorted.size(); ++i) {
    LEEWAY_CHECK(sorted[i]->name != "__metadata__", "the format reserves this name");
    LEEWAY_CHECK(i == 0 || sorted[i]->name != sorted[i - 1]->name, "names must be distinct");
  }
  const std::string header = header_of(sorted);
  const uint64_t length = header.size();
  FileWriter file(path);
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
  for (const TensorToSave* tensor : sorted) {
    file.write(tensor->values.data(), tensor->values.size_bytes());
  }
  return file.commit();
}

}  // namespace leeway
