// Names of an enum's values, as settings, files and messages write them.
//
//   enum class Device { cpu, cuda };
//   template <>
//   inline constexpr std::array kNames<Device>{"cpu", "cuda"};
//
// Values count up from 0, and the table names them in that order.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace leeway {

template <class E>
inline constexpr std::array<const char*, 0> kNames{};

template <class E>
concept NamedEnum = !kNames<E>.empty();

template <NamedEnum E>
constexpr const char* name_of(E value) {
  return kNames<E>[static_cast<size_t>(value)];
}

// None: no value has this name.
template <NamedEnum E>
constexpr std::optional<E> value_named(std::string_view name) {
  for (size_t i = 0; i < kNames<E>.size(); ++i) {
    if (name == kNames<E>[i]) return static_cast<E>(i);
  }
  return std::nullopt;
}

}  // namespace leeway
