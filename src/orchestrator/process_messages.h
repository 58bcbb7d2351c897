// Pieces of JSON that both protocols of `process` environments have (docs/environments.md).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "orchestrator/environment.h"
#include "text/renderers/json_value.h"

namespace leeway {

// JSON text on one line: no line breaks between tokens, and U+FFFD for bytes that are not UTF-8,
// which a policy may well sample.
std::string one_line(std::string_view json);

// {"text": .., "content": .., "truncated": .., "tool_calls": [..]}; a call has `arguments` if it
// could be parsed, `raw` in any case.
std::string reply_json(const Reply& reply);

// "the program reports: ..", for an error that a program sends; no more of it than fits a log.
std::string reported_error(const std::string& text);

// The number `value`; `name` is what messages call it. Throws Error if it is no finite number.
double finite_number(const JsonValue& value, const std::string& name);
// The same; true is 1 and false 0, as comparisons in Python give them.
double reward_number(const JsonValue& value, const std::string& name);

// A value of "rewards": an object with a number, or a value and a weight, for each part. Throws
// Error naming the part.
std::vector<RewardPart> read_rewards(const JsonValue& rewards);

// An object of numbers by name. Throws Error; `what` is what messages call it.
NamedNumbers read_numbers(const JsonValue& value, const std::string& what);

}  // namespace leeway
