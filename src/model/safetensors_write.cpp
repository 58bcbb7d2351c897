#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <vector>

#include "leeway/error.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

std::string header_of(std::span<const TensorPlan> tensors) {
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
  for (const TensorPlan& tensor : tensors) {
    const uint64_t end = begin + tensor.byte_size();
    writer.Key(tensor.name.c_str(), static_cast<rapidjson::SizeType>(tensor.name.size()));
    writer.StartObject();
    writer.Key("dtype");
    writer.String(name_of(tensor.dtype));
    writer.Key("shape");
    writer.StartArray();
    for (const int64_t extent : tensor.shape) writer.Int64(extent);
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

std::vector<TensorPlan> sorted_by_name(std::vector<TensorPlan> plan) {
  std::sort(plan.begin(), plan.end(),
            [](const TensorPlan& a, const TensorPlan& b) { return a.name < b.name; });
  for (size_t i = 0; i < plan.size(); ++i) {
    LEEWAY_CHECK(plan[i].name != "__metadata__", "the format reserves this name");
    LEEWAY_CHECK(i == 0 || plan[i].name != plan[i - 1].name, "names must be distinct");
  }
  return plan;
}

}  // namespace

uint64_t TensorPlan::byte_size() const {
  uint64_t size = size_of(dtype);
  for (const int64_t extent : shape) size *= static_cast<uint64_t>(extent);
  return size;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorPlan> plan)
    : tensors_(sorted_by_name(std::move(plan))), file_(path) {
  for (const TensorPlan& tensor : tensors_) left_ += tensor.byte_size();
  const std::string header = header_of(tensors_);
  const uint64_t length = header.size();
  file_.write(&length, sizeof length);
  file_.write(header.data(), header.size());
}

void SafetensorsWriter::write(std::span<const std::byte> values) {
  LEEWAY_CHECK(values.size() <= left_, "more values than the plan has");
  left_ -= values.size();
  file_.write(values.data(), values.size());
}

FileSum SafetensorsWriter::commit() {
  LEEWAY_CHECK(left_ == 0, "every tensor must be written");
  return file_.commit();
}

FileSum write_safetensors(const std::string& path, std::span<const TensorToSave> tensors) {
  std::vector<const TensorToSave*> sorted;
  std::vector<TensorPlan> plan;
  for (const TensorToSave& tensor : tensors) {
    plan.push_back({tensor.name, DType::f32, tensor.shape});
    LEEWAY_CHECK(plan.back().byte_size() == tensor.values.size_bytes(),
                 "the shape of " + tensor.name + " must match its size");
    sorted.push_back(&tensor);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const TensorToSave* a, const TensorToSave* b) { return a->name < b->name; });
  SafetensorsWriter file(path, std::move(plan));
  for (const TensorToSave* tensor : sorted) file.write(std::as_bytes(tensor->values));
  return file.commit();
}

FileSum write_made_safetensors(const std::string& path, std::span<const TensorToMake> tensors) {
  std::vector<const TensorToMake*> sorted;
  std::vector<TensorPlan> plan;
  for (const TensorToMake& tensor : tensors) {
    plan.push_back({tensor.name, tensor.dtype, tensor.shape});
    sorted.push_back(&tensor);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const TensorToMake* a, const TensorToMake* b) { return a->name < b->name; });
  SafetensorsWriter file(path, std::move(plan));
  for (const TensorToMake* tensor : sorted) {
    const std::string bytes = tensor->bytes();
    file.write(std::as_bytes(std::span(bytes)));
  }
  return file.commit();
}

}  // namespace leeway
