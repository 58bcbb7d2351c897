// Messages between processes of one program as bytes: numbers of fixed width, texts and lists, one
// after the other, without names. Who reads must ask for what was written, in the same order.
//
// The bytes are those of little-endian machines. The reader trusts nothing: a message that is too
// short, too long or has a value out of range gives Error, never a read past the end nor an
// allocation that is larger than the message.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "leeway/error.h"

namespace leeway {

static_assert(std::endian::native == std::endian::little, "messages have little-endian numbers");

template <class T>
concept PlainNumber = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
// What a list may have: numbers, and structs of numbers without gaps between them.
template <class T>
concept ListElement = std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool> &&
                      !std::is_pointer_v<T> && !std::is_enum_v<T>;

class ByteWriter {
 public:
  template <PlainNumber T>
  void put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put(bool value) { put(static_cast<uint8_t>(value ? 1 : 0)); }
  // As a byte; values beyond that are our own mistake.
  template <class T>
  requires std::is_enum_v<T>
  void put(T value) {
    const auto number = static_cast<int64_t>(value);
    LEEWAY_CHECK(number >= 0 && number < 256, "an enum's value fits a byte");
    put(static_cast<uint8_t>(number));
  }
  void put(std::string_view text) {
    put(uint64_t{text.size()});
    bytes_.append(text);
  }
  void put(const char* text) { put(std::string_view(text)); }
  template <ListElement T>
  void put(std::span<const T> list) {
    put(uint64_t{list.size()});
    bytes_.append(reinterpret_cast<const char*>(list.data()), list.size_bytes());
  }
  template <ListElement T>
  void put(const std::vector<T>& list) {
    put(std::span<const T>(list));
  }

  // What was put so far; begins anew.
  std::string take() { return std::exchange(bytes_, {}); }

 private:
  std::string bytes_;
};

// Every function throws Error if the message has not what is asked for.
class ByteReader {
 public:
  // Does not copy: the message must outlive the reader.
  explicit ByteReader(std::string_view message) : left_(message) {}

  template <PlainNumber T>
  T get() {
    T value;
    std::memcpy(&value, next(sizeof value), sizeof value);
    return value;
  }
  bool get_bool() { return get_byte(1) == 1; }
  // `last`: the largest value that the enum has.
  template <class T>
  requires std::is_enum_v<T> T get_enum(T last) {
    return static_cast<T>(get_byte(static_cast<int64_t>(last)));
  }
  // Valid while the message is.
  std::string_view get_view() {
    const size_t size = get_count(1);
    return {next(size), size};
  }
  std::string get_string() { return std::string(get_view()); }
  template <ListElement T>
  std::vector<T> get_list() {
    std::vector<T> list(get_count(sizeof(T)));
    copy_next(std::span(list));
    return list;
  }
  // A list of as many elements as `list` has, into it.
  template <ListElement T>
  void get_list(std::span<T> list) {
    const size_t count = get_count(sizeof(T));
    if (count != list.size()) {
      throw Error("a message has a list of " + std::to_string(count) + " elements where " +
                  std::to_string(list.size()) + " are expected");
    }
    copy_next(list);
  }
  // The number of things that follow, each of at least `bytes` (> 0) bytes: no more than the rest
  // of the message can have.
  size_t get_count(size_t bytes) {
    const auto count = get<uint64_t>();
    if (count > left_.size() / bytes) {
      throw Error("a message is too short: it ends within a list of " + std::to_string(count) +
                  " elements");
    }
    return static_cast<size_t>(count);
  }

  bool at_end() const { return left_.empty(); }
  // Nothing may be left.
  void end() const {
    if (at_end()) return;
    throw Error("a message is too long: " + std::to_string(left_.size()) +
                " bytes are left at its end");
  }

 private:
  const char* next(size_t size) {
    if (size > left_.size()) {
      throw Error("a message is too short: " + std::to_string(size) + " bytes are expected, " +
                  std::to_string(left_.size()) + " are left");
    }
    const char* begin = left_.data();
    left_.remove_prefix(size);
    return begin;
  }
  template <class T>
  void copy_next(std::span<T> list) {
    const char* begin = next(list.size_bytes());
    if (!list.empty()) std::memcpy(list.data(), begin, list.size_bytes());
  }
  int64_t get_byte(int64_t last) {
    const int64_t value = get<uint8_t>();
    if (value > last) {
      throw Error("a message has the value " + std::to_string(value) + " where " +
                  std::to_string(last) + " is the largest");
    }
    return value;
  }

  std::string_view left_;
};

}  // namespace leeway
