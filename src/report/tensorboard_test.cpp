#include "report/tensorboard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>

#include "base/crc32c.h"
#include "base/files.h"
#include "leeway/error.h"
#include "report/test_support.h"

namespace leeway {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Bit by bit from the polynomial, without the table of the code under test.
uint32_t slow_crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
  }
  return crc ^ 0xffffffffu;
}

template <typename T>
T take(std::string_view& bytes) {
  if (bytes.size() < sizeof(T)) throw std::runtime_error("the file ends inside a number");
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes.remove_prefix(sizeof(T));
  return value;
}

std::string_view take_bytes(std::string_view& bytes, uint64_t count) {
  if (bytes.size() < count) throw std::runtime_error("the file ends inside a record");
  const std::string_view taken = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return taken;
}

uint64_t take_varint(std::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    const uint8_t byte = take<uint8_t>(bytes);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  throw std::runtime_error("a varint of more than ten bytes");
}

// Reads a record and verifies its two checksums.
std::string_view take_record(std::string_view& bytes) {
  auto unmasked = [](uint32_t masked) {
    const uint32_t rotated = masked - 0xa282ead8u;
    return rotated >> 17 | rotated << 15;
  };
  const std::string_view head = bytes.substr(0, 8);
  const uint64_t length = take<uint64_t>(bytes);
  EXPECT_EQ(unmasked(take<uint32_t>(bytes)), slow_crc32c(head));
  const std::string_view record = take_bytes(bytes, length);
  EXPECT_EQ(unmasked(take<uint32_t>(bytes)), slow_crc32c(record));
  return record;
}

struct Event {
  double wall_time = -1;
  int64_t step = 0;
  std::string version;
  std::map<std::string, float> scalars;
};

void read_scalar(std::string_view bytes, Event& event) {
  std::string name;
  float value = std::nanf("");
  while (!bytes.empty()) {
    const uint64_t tag = take_varint(bytes);
    if (tag == (1 << 3 | 2)) {
      name = take_bytes(bytes, take_varint(bytes));
    } else if (tag == (2 << 3 | 5)) {
      value = take<float>(bytes);
    } else {
      throw std::runtime_error("a field that Summary.Value does not have");
    }
  }
  EXPECT_TRUE(event.scalars.emplace(name, value).second) << name;
}

Event read_event(std::string_view bytes) {
  Event event;
  while (!bytes.empty()) {
    const uint64_t tag = take_varint(bytes);
    if (tag == (1 << 3 | 1)) {
      event.wall_time = take<double>(bytes);
    } else if (tag == (2 << 3 | 0)) {
      event.step = static_cast<int64_t>(take_varint(bytes));
    } else if (tag == (3 << 3 | 2)) {
      event.version = take_bytes(bytes, take_varint(bytes));
    } else if (tag == (5 << 3 | 2)) {
      std::string_view summary = take_bytes(bytes, take_varint(bytes));
      while (!summary.empty()) {
        EXPECT_EQ(take_varint(summary), 1u << 3 | 2u);
        read_scalar(take_bytes(summary, take_varint(summary)), event);
      }
    } else {
      throw std::runtime_error("a field that Event does not have");
    }
  }
  return event;
}

std::vector<Event> read_events(const std::string& path) {
  const std::string file = read_file(path);
  std::string_view bytes = file;
  std::vector<Event> events;
  while (!bytes.empty()) events.push_back(read_event(take_record(bytes)));
  return events;
}

using Scalars = std::vector<std::pair<std::string, double>>;

TEST(TensorBoard, ChecksumsAreThoseOfThePolynomial) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  Rng rng(5);
  for (size_t length = 0; length < 70; ++length) {
    std::string bytes;
    for (size_t k = 0; k < length; ++k) bytes += static_cast<char>(rng.below(256));
    EXPECT_EQ(crc32c(bytes), slow_crc32c(bytes)) << length;
  }
}

TEST(TensorBoard, WhatIsWrittenCanBeReadAfterEveryStep) {
  TensorBoardWriter writer(fresh_folder("tensorboard") + "/deep", 1700000000.25);
  Rng rng(9);
  std::vector<Scalars> written;
  for (int64_t step : {int64_t{0}, int64_t{1}, int64_t{127}, int64_t{128}, int64_t{1} << 40}) {
    Scalars scalars;
    for (size_t k = 0; k <= written.size() * 40; ++k) {
      scalars.emplace_back(fmt::format("metric/{}", k), 100.0 * rng.normal());
    }
    writer.add(step, scalars, 1700000001.5 + static_cast<double>(step));
    written.push_back(scalars);
    // The writer is still open: the file is complete at every moment.
    const std::vector<Event> events = read_events(writer.path());
    ASSERT_EQ(events.size(), written.size() + 1);
    EXPECT_EQ(events[0].version, "brain.Event:2");
    EXPECT_EQ(events[0].wall_time, 1700000000.25);
    EXPECT_EQ(events.back().step, step);
    EXPECT_EQ(events.back().wall_time, 1700000001.5 + static_cast<double>(step));
    ASSERT_EQ(events.back().scalars.size(), scalars.size());
    for (const auto& [name, value] : scalars) {
      EXPECT_EQ(events.back().scalars.at(name), static_cast<float>(value));
    }
  }
}

TEST(TensorBoard, LeavesOutWhatIsNoFiniteFloat) {
  TensorBoardWriter writer(fresh_folder("tensorboard_nan"), 1.0);
  writer.add(3, Scalars{{"a", std::nan("")}, {"b", 0.5}, {"c", kInfinity}, {"d", 1e300}}, 2.0);
  writer.add(4, Scalars{{"a", std::nan("")}}, 3.0);
  writer.add(5, Scalars{}, 4.0);
  const std::vector<Event> events = read_events(writer.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].scalars, (std::map<std::string, float>{{"b", 0.5f}}));
}

TEST(TensorBoard, TwoWritersHaveTwoFilesWithNamesItLooksFor) {
  const std::string folder = fresh_folder("tensorboard_two");
  TensorBoardWriter first(folder, 1700000000.0), second(folder, 1700000000.0);
  EXPECT_NE(first.path(), second.path());
  for (const TensorBoardWriter* writer : {&first, &second}) {
    EXPECT_NE(writer->path().find("/events.out.tfevents.1700000000."), std::string::npos);
    EXPECT_EQ(read_events(writer->path()).size(), 1u);
  }
}

TEST(TensorBoard, NamesTheFolderThatCannotBeMade) {
  const std::string folder = fresh_folder("tensorboard_file");
  put_file(folder + "/taken", "");
  try {
    TensorBoardWriter writer(folder + "/taken", 1.0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with(folder + "/taken")) << error.what();
  }
}

}  // namespace
}  // namespace leeway
