// TFRecord framing and the few fields of TensorFlow's Event message that a scalar needs, encoded by
// hand: event.proto and summary.proto have not changed them since 2016.

#include "report/tensorboard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/crc32c.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// The CRC of data that contains CRCs is weak, so TFRecord rotates it and adds a constant.
uint32_t masked_crc(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8u; }

void append_little_endian(std::string& out, uint64_t value, int bytes) {
  for (int k = 0; k < bytes; ++k) out += static_cast<char>((value >> (8 * k)) & 0xff);
}

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  out += static_cast<char>(value);
}

enum WireType : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_tag(std::string& out, uint64_t field, WireType type) {
  append_varint(out, field << 3 | type);
}

void append_bytes(std::string& out, uint64_t field, std::string_view bytes) {
  append_tag(out, field, kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

// Event: 1 wall_time, 2 step, 3 file_version, 5 summary.
std::string event_head(double wall_time) {
  std::string event;
  append_tag(event, 1, kFixed64);
  append_little_endian(event, std::bit_cast<uint64_t>(wall_time), 8);
  return event;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == 0) return "localhost";
  return name.data();
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::string& folder, double wall_time) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    throw Error(fmt::format("{}: cannot create the folder: {}", folder, failed.message()));
  const std::string first = fmt::format("{}/events.out.tfevents.{:010}.{}.{}", folder,
                                        static_cast<int64_t>(wall_time), host_name(), ::getpid());
  // A second writer of this process within the same second gets a number.
  for (int number = 0; file_ < 0; ++number) {
    path_ = number == 0 ? first : fmt::format("{}.{}", first, number);
    file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (file_ < 0 && errno != EEXIST) {
      throw Error(fmt::format("{}: cannot create: {}", path_, std::strerror(errno)));
    }
  }
  std::string event = event_head(wall_time);
  append_bytes(event, 3, "brain.Event:2");
  try {
    write_record(event);
  } catch (const Error&) {
    ::close(file_);
    throw;
  }
}

TensorBoardWriter::~TensorBoardWriter() { ::close(file_); }

void TensorBoardWriter::add(int64_t step, std::span<const std::pair<std::string, double>> scalars,
                            double wall_time) {
  std::string summary;
  for (const auto& [name, value] : scalars) {
    const float number = static_cast<float>(value);
    if (!std::isfinite(number)) continue;
    std::string scalar;  // Summary.Value: 1 tag, 2 simple_value
    append_bytes(scalar, 1, name);
    append_tag(scalar, 2, kFixed32);
    append_little_endian(scalar, std::bit_cast<uint32_t>(number), 4);
    append_bytes(summary, 1, scalar);
  }
  if (summary.empty()) return;
  std::string event = event_head(wall_time);
  append_tag(event, 2, kVarint);
  append_varint(event, static_cast<uint64_t>(step));
  append_bytes(event, 5, summary);
  write_record(event);
}

void TensorBoardWriter::write_record(const std::string& event) {
  std::string record;
  record.reserve(event.size() + 16);
  append_little_endian(record, event.size(), 8);
  append_little_endian(record, masked_crc(record), 4);
  record += event;
  append_little_endian(record, masked_crc(event), 4);
  std::string_view rest = record;
  while (!rest.empty()) {
    const ssize_t put = ::write(file_, rest.data(), rest.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw Error(fmt::format("{}: cannot write: {}", path_, std::strerror(errno)));
    rest.remove_prefix(static_cast<size_t>(put));
  }
}

}  // namespace leeway
