#include "base/checked_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/files.h"
#include "base/folders.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr const char* kChecksums = "/checksums.json";
constexpr uint64_t kSpare = uint64_t{1} << 14;  // for metrics and other small files

uint64_t number(const std::string& name, const std::string& file, const rapidjson::Value& object,
                const char* key, double most) {
  if (object.IsObject()) {
    const auto found = object.FindMember(key);
    if (found != object.MemberEnd() && found->value.IsNumber()) {
      const double value = found->value.GetDouble();
      if (value >= 0.0 && value <= most && value == std::floor(value)) {
        return static_cast<uint64_t>(value);
      }
    }
  }
  throw Error(fmt::format("{}: \"{}\" of \"{}\" is missing or not a count", name, key, file));
}

std::string megabytes(uint64_t bytes) {
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

}  // namespace

FileSum sum_of_file(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw Error(fmt::format("{}: cannot open: {}", path, std::strerror(errno)));
  std::vector<char> piece(size_t{1} << 20);
  FileSum sum;
  Crc32c crc;
  for (;;) {
    const ssize_t got = ::read(file, piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const int reason = errno;
      ::close(file);
      if (got < 0) throw Error(fmt::format("{}: cannot read: {}", path, std::strerror(reason)));
      sum.crc32c = crc.value();
      return sum;
    }
    crc.add({piece.data(), static_cast<size_t>(got)});
    sum.bytes += static_cast<uint64_t>(got);
  }
}

void write_sums(JsonWriter& json, const FileSums& sums) {
  json.begin_object();
  for (const auto& [name, sum] : sums) {
    json.key(name).begin_object();
    json.key("bytes").value(static_cast<double>(sum.bytes));
    json.key("crc32c").value(static_cast<double>(sum.crc32c)).end_object();
  }
  json.end_object();
}

FileSums read_sums(const std::string& name, const rapidjson::Value& files) {
  if (!files.IsObject()) throw Error(name + ": lists no files");
  FileSums sums;
  for (const auto& member : files.GetObject()) {
    const std::string file(member.name.GetString(), member.name.GetStringLength());
    const bool plain = !file.empty() && file != "." && file != ".." &&
                       file.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
    if (!plain) throw Error(fmt::format("{}: \"{}\" is not a plain file name", name, file));
    sums[file] = {number(name, file, member.value, "bytes", 0x1p53),
                  static_cast<uint32_t>(number(name, file, member.value, "crc32c",
                                               std::numeric_limits<uint32_t>::max()))};
  }
  return sums;
}

void check_sums(const std::string& folder, const FileSums& sums) {
  // Check the sizes first: they are cheap, and most damage shows there.
  for (const auto& [name, sum] : sums) {
    const std::string path = folder + "/" + name;
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) {
      throw Error(fmt::format("{}: cannot read: {}", path, std::strerror(errno)));
    }
    const auto bytes = static_cast<uint64_t>(status.st_size);
    if (bytes != sum.bytes) {
      throw Error(fmt::format("{}: has {} bytes, {} were written", path, bytes, sum.bytes));
    }
  }
  for (const auto& [name, sum] : sums) {
    const std::string path = folder + "/" + name;
    if (sum_of_file(path) != sum) {
      throw Error(path +
                  ": is damaged: its checksum does not match the one recorded when it was written");
    }
  }
}

void write_checksums(const std::string& folder, const FileSums& sums) {
  JsonWriter json;
  json.begin_object().key("format").value(1.0).key("files");
  write_sums(json, sums);
  write_file_atomically(folder + kChecksums, json.end_object().text() + "\n");
}

void check_checksums(const std::string& folder) {
  const std::string name = folder + kChecksums;
  if (!path_exists(name)) return;
  try {
    const rapidjson::Document json = parse_json(name, read_file(name));
    const bool known = json.IsObject() && json.HasMember("format") && json["format"].IsNumber() &&
                       json["format"].GetDouble() == 1.0 && json.HasMember("files");
    if (!known) throw Error(name + ": is not a checksum list in format 1");
    check_sums(folder, read_sums(name, json["files"]));
  } catch (const Error& error) {
    throw Error(fmt::format("{}. If it was changed on purpose, delete {}", error.what(), name));
  }
}

void remove_checksums(const std::string& folder) { ::unlink((folder + kChecksums).c_str()); }

void refuse_full_disk(const std::string& folder, uint64_t bytes) {
  // The folder may not exist yet: ask about its nearest existing parent.
  std::string there = folder;
  while (!there.empty() && !path_exists(there)) {
    const size_t slash = there.rfind('/');
    there.resize(slash == std::string::npos ? 0 : slash);
  }
  if (there.empty()) there = folder.starts_with("/") ? "/" : ".";
  struct statvfs status {};
  // If the file system does not report its free space, just try to write.
  if (::statvfs(there.c_str(), &status) != 0 || status.f_blocks == 0) return;
  const uint64_t free = static_cast<uint64_t>(status.f_bavail) * status.f_frsize;
  if (free >= bytes + kSpare) return;
  throw Error(fmt::format("{}: {} are free on its disk, {} are needed", folder, megabytes(free),
                          megabytes(bytes + kSpare)));
}

}  // namespace leeway
