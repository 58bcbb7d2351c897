#include "leeway/error.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/expression.h"
#include "orchestrator/generated_environment.h"

namespace leeway {
namespace {

Example make_example(Rng& rng, const EnvironmentTable& table) {
  const std::string expression = random_expression(rng, table);
  const Evaluation value = evaluate_expression(expression);
  LEEWAY_CHECK(value.ok, expression + ": " + value.text);
  Example example;
  example.messages = {{.role = Role::user, .content = expression + "="}};
  example.answer = value.text + "\n";
  example.demonstration = {{.role = Role::assistant, .content = example.answer}};
  return example;
}

}  // namespace

std::unique_ptr<Environment> make_arithmetic_environment(const EnvironmentTable& table,
                                                         uint64_t seed) {
  check_expression_keys(table);
  Generator generator;
  generator.make = [table](Rng& rng) { return make_example(rng, table); };
  generator.start = [](const Example& example) { return make_exact_episode(example.answer); };
  generator.keys = expression_keys(table);
  return make_generated_environment(std::move(generator), seed);
}

}  // namespace leeway
