#include <gtest/gtest.h>

#include "orchestrator/environment.h"
#include "orchestrator/environment_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::expect_refused;
using ::leeway::testing::prompt_of;

EnvironmentTable named(const std::string& name, const std::string& id = "") {
  EnvironmentTable table;
  table.name = name;
  table.id = id;
  return table;
}

std::vector<std::string> ids_of(const std::vector<EnvironmentTable>& tables) {
  std::vector<std::string> ids;
  const EnvironmentMix mix = make_environments(tables, 1);
  for (const auto& member : mix.members()) ids.push_back(member.id);
  return ids;
}

using Ids = std::vector<std::string>;

TEST(MakeEnvironments, NumbersNamesThatComeTwice) {
  EXPECT_EQ(ids_of({named("sort"), named("arithmetic")}), (Ids{"sort", "arithmetic"}));
  EXPECT_EQ(ids_of({named("sort"), named("arithmetic"), named("sort")}),
            (Ids{"sort_1", "arithmetic", "sort_2"}));
  EXPECT_EQ(ids_of({named("sort", "easy"), named("sort")}), (Ids{"easy", "sort"}));
}

TEST(MakeEnvironments, GivesTablesOfOneKindPromptsOfTheirOwn) {
  const EnvironmentMix mix = make_environments({named("sort"), named("sort")}, 1);
  int same = 0;
  for (uint64_t i = 0; i < 50; ++i) {
    same += prompt_of(mix.members()[0].environment->example(Split::train, i)) ==
            prompt_of(mix.members()[1].environment->example(Split::train, i));
  }
  EXPECT_LT(same, 3);
}

TEST(MakeEnvironments, IsTheSameForTheSameSeed) {
  EnvironmentMix a = make_environments({named("sort"), named("arithmetic")}, 5);
  EnvironmentMix b = make_environments({named("sort"), named("arithmetic")}, 5);
  for (uint64_t n = 0; n < 50; ++n) {
    const auto x = a.draw(n), y = b.draw(n);
    EXPECT_EQ(prompt_of(a.members()[x.member].environment->example(Split::train, x.example)),
              prompt_of(b.members()[y.member].environment->example(Split::train, y.example)));
  }
}

TEST(MakeEnvironments, SaysWhichTableIsWrong) {
  const auto refused = [](const std::vector<EnvironmentTable>& tables,
                          const std::vector<std::string>& words) {
    expect_refused([&] { make_environments(tables, 1); }, words);
  };
  refused({}, {"[[environment]]"});
  refused({named("sort"), named("srot")},
          {"environment.1 (srot): ", "\"srot\"", "did you mean sort", "calculator"});
  refused({named("sort"), named("jsonl")}, {"environment.1 (jsonl): data is missing"});
  refused({named("sort", "a"), named("arithmetic", "a")},
          {"environment.1 (arithmetic): ", "\"a\""});
  refused({named("sort"), named("arithmetic", "sort")}, {"environment.1", "\"sort\""});
  EnvironmentTable bad = named("sort");
  bad.max_length = 99;
  refused({bad}, {"environment.0 (sort): ", "max_length = 99"});
  bad = named("calculator");
  bad.format_weight = -1.0;
  refused({bad}, {"environment.0 (calculator): ", "format_weight = -1"});
  bad = named("sort");
  bad.weight = 0.0;
  refused({bad}, {"sort", "weight = 0"});
}

}  // namespace
}  // namespace leeway
