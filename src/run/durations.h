// Human-readable times.
#pragma once

#include <string>

namespace leeway {

// "0.04 s", "11.5 s", "2 min 5 s", "2 h 21 min", "3 d 4 h": hundredths below a second, tenths below
// a minute, then the two largest units, without the smaller one if that is zero. "?" if it is not a
// valid time.
std::string duration_text(double seconds);

// "43 s left": in whole seconds.
std::string time_left_text(double seconds);

// `count` in `seconds` as "2.5 runs/s", or per minute, hour or day if that is below one.
std::string rate_text(double count, double seconds, const std::string& unit);

}  // namespace leeway
