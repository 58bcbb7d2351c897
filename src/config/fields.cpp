#include "config/fields.h"

#include <fmt/format.h>

#include <cmath>

#include "config/given.h"

namespace leeway {
namespace {

// Whole numbers without an exponent: 1000000, not 1e+06.
std::string bound_text(double value) {
  if (value == std::floor(value) && std::abs(value) < 0x1p60) {
    return fmt::format("{}", static_cast<int64_t>(value));
  }
  return fmt::format("{}", value);
}

template <class T>
bool is(const Field& field) {
  return std::holds_alternative<T*>(field.target);
}
bool is_text(const Field& field) {
  return is<std::string>(field) || std::holds_alternative<EnumTarget>(field.target);
}

}  // namespace

bool Range::holds(double value) const {
  return std::isfinite(value) && (open_low ? value > low : value >= low) &&
         (open_high ? value < high : value <= high);
}

std::string Range::text() const {
  const bool has_low = std::isfinite(low), has_high = std::isfinite(high);
  if (!has_low && !has_high) return "";
  if (!has_high) return fmt::format("{} {}", open_low ? "above" : "at least", bound_text(low));
  const std::string end = fmt::format("{}{}", open_high ? "below " : "", bound_text(high));
  if (!has_low) return open_high ? end : "at most " + end;
  return fmt::format("{}{} to {}", open_low ? "above " : "", bound_text(low), end);
}

const Field* Section::find(const std::string& key) const {
  for (const Field& field : fields) {
    if (field.key == key) return &field;
  }
  return nullptr;
}

std::string type_text(const Field& field) {
  if (is<bool>(field)) return "true or false";
  if (is<double>(field) || is<AutoNumber>(field)) return "number";
  if (is<std::vector<std::string>>(field)) return "list of text";
  return is_text(field) ? "text" : "integer";
}

std::string values_text(const Field& field) {
  if (is<bool>(field) || is<std::vector<std::string>>(field)) return "";
  if (is_text(field)) {
    if (!field.if_true.empty()) {
      return fmt::format("one of {}; false is {}, true is {}", fmt::join(field.choices, ", "),
                         field.choices.front(), field.if_true);
    }
    if (!field.choices.empty()) return fmt::format("one of {}", fmt::join(field.choices, ", "));
    return field.may_be_empty ? "" : "not empty";
  }
  if (is<std::optional<int64_t>>(field)) return field.range.text() + ", or \"unlimited\"";
  if (is<AutoNumber>(field)) return field.range.text() + ", or \"auto\"";
  return field.range.text();
}

std::string demand(const Field& field) {
  const std::string type = type_text(field), values = values_text(field);
  if (!field.choices.empty()) return "must be " + values;
  const std::string noun = type == "integer"        ? "an integer"
                           : type == "number"       ? "a finite number"
                           : type == "list of text" ? "a list of text"
                                                    : type;
  return fmt::format("must be {}{}{}", noun, values.empty() ? "" : ", ", values);
}

std::string toml_text(const Field& field) {
  struct Writer {
    const Field& field;
    std::string operator()(const bool* value) const { return *value ? "true" : "false"; }
    std::string operator()(const int64_t* value) const { return fmt::format("{}", *value); }
    std::string operator()(const double* value) const { return fmt::format("{}", *value); }
    std::string operator()(const std::string* value) const { return toml_string(*value); }
    std::string operator()(const std::vector<std::string>* value) const {
      return scalar_text(*value);
    }
    std::string operator()(const std::optional<int64_t>* value) const {
      return value->has_value() ? fmt::format("{}", **value) : "\"unlimited\"";
    }
    std::string operator()(const AutoNumber* number) const {
      const bool undecided = number->automatic && number->value == 0.0;
      return undecided ? "\"auto\"" : fmt::format("{}", number->value);
    }
    std::string operator()(const EnumTarget& target) const {
      return toml_string(field.choices.at(target.get(target.value)));
    }
  };
  return std::visit(Writer{field}, field.target);
}

}  // namespace leeway
