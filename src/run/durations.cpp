#include "run/durations.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>

namespace leeway {
namespace {

constexpr int64_t kMinute = 60, kHour = 60 * kMinute, kDay = 24 * kHour;

}  // namespace

std::string duration_text(double seconds) {
  if (!(seconds >= 0.0) || seconds > 1e15) return "?";
  if (const double hundredths = std::round(seconds * 100) / 100; hundredths < 1) {
    return fmt::format("{} s", hundredths);
  }
  if (const double tenths = std::round(seconds * 10) / 10; tenths < kMinute) {
    return fmt::format("{} s", tenths);
  }
  // Rounds to the smaller of the two units shown, which may carry over to the next one.
  const auto rounded = [&](int64_t unit) {
    return static_cast<int64_t>(std::llround(seconds / static_cast<double>(unit))) * unit;
  };
  const auto two = [](int64_t time, int64_t large, const char* name, int64_t small,
                      const char* small_name) {
    const int64_t rest = time % large / small;
    const std::string text = fmt::format("{} {}", time / large, name);
    return rest == 0 ? text : fmt::format("{} {} {}", text, rest, small_name);
  };
  if (rounded(1) < kHour) return two(rounded(1), kMinute, "min", 1, "s");
  if (rounded(kMinute) < kDay) return two(rounded(kMinute), kHour, "h", kMinute, "min");
  return two(rounded(kHour), kDay, "d", kHour, "h");
}

std::string time_left_text(double seconds) { return duration_text(std::round(seconds)) + " left"; }

std::string rate_text(double count, double seconds, const std::string& unit) {
  double rate = count / seconds;
  if (!std::isfinite(rate) || rate <= 0.0) return "0 " + unit + "/s";
  const char* per = "s";
  if (rate < 1.0) {
    const auto in = [&](int64_t time) { return count / seconds * static_cast<double>(time); };
    per = in(kMinute) >= 1.0 ? "min" : in(kHour) >= 1.0 ? "h" : "d";
    rate = in(in(kMinute) >= 1.0 ? kMinute : in(kHour) >= 1.0 ? kHour : kDay);
  }
  return fmt::format("{:.1f} {}/{}", rate, unit, per);
}

}  // namespace leeway
