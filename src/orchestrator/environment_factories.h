// One function per kind of environment, for make_environment. Each throws Error naming key and
// value for invalid values of its keys.
#pragma once

#include <cstdint>
#include <memory>

#include "orchestrator/environment.h"

namespace leeway {

// "qbxe=" -> "beqx\n".
std::unique_ptr<Environment> make_sort_environment(const EnvironmentTable& table, uint64_t seed);

// "12+7-3=" -> "16\n".
std::unique_ptr<Environment> make_arithmetic_environment(const EnvironmentTable& table,
                                                         uint64_t seed);

// A question that a tool call helps to answer. Parts "exact" and, with format_weight, "tool_used":
// a call gave a result.
std::unique_ptr<Environment> make_calculator_environment(const EnvironmentTable& table,
                                                         uint64_t seed);

// Prompts and answers of `data`. Held out: `eval_data`, or one prompt in 8. Part by the verifier's
// name and, with format_weight, "format": not cut off, and the verifier found an answer in it.
std::unique_ptr<Environment> make_jsonl_environment(const EnvironmentTable& table);

// Prompts of `data` as above, turns and rewards by the program `command`. Parts as it names them.
std::unique_ptr<Environment> make_process_environment(const EnvironmentTable& table);

}  // namespace leeway
