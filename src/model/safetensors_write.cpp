#include <fcntl.h>
#include <fmt/format.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "leeway/error.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

// A file under a temporary name beside `path`; gone unless it is committed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path)
      : path_(path), temporary_(fmt::format("{}.{}.tmp", path, ::getpid())) {
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd_ < 0) fail("create");
  }
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!committed_) ::unlink(temporary_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const void* data, size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t put = ::write(fd_, at, size);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail("write");
      at += put;
      size -= static_cast<size_t>(put);
    }
  }

  void commit() {
    if (::fsync(fd_) != 0) fail("write");
    const int fd = fd_;
    fd_ = -1;
    if (::close(fd) != 0) fail("write");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("write");
    committed_ = true;
    sync_folder();
  }

 private:
  [[noreturn]] void fail(const char* doing) const {
    throw Error(fmt::format("{}: cannot {}: {}", path_, doing, std::strerror(errno)));
  }

  // The new name lasts once the folder is on the disk.
  void sync_folder() const {
    const size_t slash = path_.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail("sync the folder of");
    // Some file systems cannot sync a folder and say so.
    const bool failed = ::fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP;
    const int reason = errno;
    ::close(fd);
    errno = reason;
    if (failed) fail("sync the folder of");
  }

  const std::string& path_;
  std::string temporary_;
  int fd_ = -1;
  bool committed_ = false;
};

std::string header_of(std::span<const TensorToSave* const> tensors) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  writer.StartObject();
  // transformers loads no file without it.
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

void write_safetensors(const std::string& path, std::span<const TensorToSave> tensors) {
  std::vector<const TensorToSave*> sorted;
  for (const TensorToSave& tensor : tensors) {
    uint64_t size = 1;
    for (const int64_t extent : tensor.shape) size *= static_cast<uint64_t>(extent);
    LEEWAY_CHECK(size == tensor.values.size(), "the shape of " + tensor.name + " is its size");
    sorted.push_back(&tensor);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const TensorToSave* a, const TensorToSave* b) { return a->name < b->name; });
  for (size_t i = 0; i < sorted.size(); ++i) {
    LEEWAY_CHECK(sorted[i]->name != "__metadata__", "a name the format keeps for itself");
    LEEWAY_CHECK(i == 0 || sorted[i]->name != sorted[i - 1]->name, "names are distinct");
  }
  const std::string header = header_of(sorted);
  const uint64_t length = header.size();
  TemporaryFile file(path);
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
  for (const TensorToSave* tensor : sorted) {
    file.write(tensor->values.data(), tensor->values.size_bytes());
  }
  file.commit();
}

}  // namespace leeway
