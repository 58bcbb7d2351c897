// Options with a fixed set of values.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/enum_names.h"

namespace leeway {

// `value` holds the default and must live as long as the command. Of the enum's names, `names` are
// offered.
template <NamedEnum E>
CLI::Option* add_choice(CLI::App& command, const std::string& flag, E& value,
                        const std::string& meaning,
                        const std::vector<std::string>& names = {kNames<E>.begin(),
                                                                 kNames<E>.end()}) {
  const auto set = [&value](const std::string& name) { value = *value_named<E>(name); };
  return command.add_option_function<std::string>(flag, set, meaning)
      ->check(CLI::IsMember(names))
      ->default_str(name_of(value));
}

}  // namespace leeway
