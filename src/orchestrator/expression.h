// Arithmetic expressions as text: generated for prompts, and evaluated for answers and for the
// calculator tool.
#pragma once

#include <string>
#include <string_view>

#include "base/rng.h"
#include "config/run_config.h"

namespace leeway {

// The value of an expression as text, or the reason why it has none.
struct Evaluation {
  bool ok = false;
  std::string text;  // the value, or the error for the reader: "division by zero"
};

// + - * / with the usual precedence, signs, parentheses, decimals such as 1.5 or .5, and spaces.
// Integers stay exact as long as they fit in 64 bits; beyond that, and when a division has a
// remainder, the result is a double. Never throws: any text of any length gives a value or an
// error. Errors repeat only printable ASCII of the text.
Evaluation evaluate_expression(std::string_view text);

// `terms` numbers from 0 to max_operand, joined by random `operators`: "12+7-3".
std::string random_expression(Rng& rng, const EnvironmentTable& table);

// Throws Error where max_operand, terms and operators of the table make no expressions, or values
// beyond 2^53.
void check_expression_keys(const EnvironmentTable& table);

// The three keys and their values, for messages.
std::string expression_keys(const EnvironmentTable& table);

}  // namespace leeway
