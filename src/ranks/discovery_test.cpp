// What launchers set, and mistakes in it.

#include "ranks/discovery.h"

#include <gtest/gtest.h>

#include <map>

#include "leeway/error.h"

namespace leeway {
namespace {

using Set = std::map<std::string, std::string>;

std::optional<RanksOptions> found(const Set& variables) {
  return ranks_from_environment([&](const char* name) {
    const auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  });
}

std::string problem_of(const Set& variables) {
  try {
    found(variables);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

Set with(Set variables, const Set& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Set without(Set variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Set kTorch = {{"RANK", "3"},
                    {"WORLD_SIZE", "8"},
                    {"LOCAL_RANK", "1"},
                    {"LOCAL_WORLD_SIZE", "2"},
                    {"MASTER_ADDR", "n1.cluster"},
                    {"MASTER_PORT", "29500"},
                    {"TORCHELASTIC_RUN_ID", "run7"}};
const Set kMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                  {"OMPI_COMM_WORLD_SIZE", "4"},
                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                  {"PMIX_NAMESPACE", "prterun-1"}};
const Set kSlurm = {{"SLURM_JOB_ID", "1234"},
                    {"SLURM_STEP_ID", "0"},
                    {"SLURM_STEP_NUM_TASKS", "6"},
                    {"SLURM_NTASKS", "6"},
                    {"SLURM_PROCID", "4"},
                    {"SLURM_LOCALID", "0"},
                    {"SLURM_NODEID", "2"},
                    {"SLURM_STEP_NODELIST", "n[07-09]"},
                    {"SLURM_STEP_TASKS_PER_NODE", "2(x3)"}};

TEST(Discovery, FindsNothingWithoutALauncher) {
  EXPECT_FALSE(found({}));
  EXPECT_FALSE(found({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {"RANK", ""}}));
}

TEST(Discovery, ReadsTorchrun) {
  const auto options = found(kTorch);
  ASSERT_TRUE(options);
  EXPECT_EQ(options->rank, 3);
  EXPECT_EQ(options->size, 8);
  EXPECT_EQ(options->local_rank, 1);
  EXPECT_EQ(options->local_size, 2);
  EXPECT_EQ(options->leader_address, "n1.cluster");
  EXPECT_EQ(options->leader_port, 29501);  // torchrun listens at 29500 itself
  EXPECT_NE(options->job.find("run7"), std::string::npos);
  EXPECT_EQ(found(without(kTorch, "TORCHELASTIC_RUN_ID"))->leader_port, 29500);
  EXPECT_EQ(found(with(kTorch, {{"LEEWAY_PORT", "4000"}}))->leader_port, 4000);
  EXPECT_EQ(found(with(without(kTorch, "MASTER_PORT"), {{"LEEWAY_PORT", "4000"}}))->leader_port,
            4000);
}

TEST(Discovery, ReadsOpenMpi) {
  const auto options = found(kMpi);
  ASSERT_TRUE(options);
  EXPECT_EQ(options->rank, 1);
  EXPECT_EQ(options->size, 4);
  EXPECT_EQ(options->local_size, 4);
  EXPECT_EQ(options->leader_address, "127.0.0.1");
  EXPECT_GE(options->leader_port, 12000);
  EXPECT_LT(options->leader_port, 32000);
  EXPECT_NE(found(with(kMpi, {{"PMIX_NAMESPACE", "prterun-2"}}))->leader_port,
            options->leader_port);
  const Set two_hosts = with(kMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_NE(problem_of(two_hosts).find("mpirun -x MASTER_ADDR=HOST"), std::string::npos);
  EXPECT_EQ(found(with(two_hosts, {{"MASTER_ADDR", "n1"}}))->leader_address, "n1");
}

TEST(Discovery, ReadsSlurm) {
  const auto options = found(kSlurm);
  ASSERT_TRUE(options);
  EXPECT_EQ(options->rank, 4);
  EXPECT_EQ(options->size, 6);
  EXPECT_EQ(options->local_rank, 0);
  EXPECT_EQ(options->local_size, 2);
  EXPECT_EQ(options->leader_address, "n07");
  EXPECT_NE(found(with(kSlurm, {{"SLURM_JOB_ID", "1235"}}))->leader_port, options->leader_port);
  EXPECT_EQ(found(with(kSlurm, {{"MASTER_PORT", "29500"}}))->leader_port, 29500);
}

// A batch script and an interactive shell have Slurm's variables too.
TEST(Discovery, TakesSlurmForALauncherOnlyInsideSrun) {
  EXPECT_FALSE(found(without(kSlurm, "SLURM_STEP_ID")));
  EXPECT_FALSE(found(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}})));
}

TEST(Discovery, PrefersTheInnermostLauncher) {
  EXPECT_EQ(found(with(with(kSlurm, kMpi), kTorch))->size, 8);
  EXPECT_EQ(found(with(kSlurm, kMpi))->size, 4);
  EXPECT_FALSE(found(
      with(kTorch,
           {{"WORLD_SIZE", "1"}, {"RANK", "0"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}})));
}

TEST(Discovery, CanBeSwitchedOff) {
  EXPECT_FALSE(found(with(kTorch, {{"LEEWAY_RANKS", "off"}})));
  EXPECT_EQ(problem_of({{"LEEWAY_RANKS", "no"}}), "LEEWAY_RANKS=no: there is nothing but off");
}

TEST(Discovery, TakesJobAndInterfaceFromItsOwnVariables) {
  const auto options = found(with(kSlurm, {{"LEEWAY_JOB", "mine"}, {"LEEWAY_INTERFACE", "ib0"}}));
  EXPECT_EQ(options->job, "mine");
  EXPECT_EQ(options->interface, "ib0");
}

TEST(Discovery, NamesWhatIsMissingWrongOrContradictory) {
  const std::vector<std::pair<Set, std::string>> cases = {
      {without(kTorch, "WORLD_SIZE"), "RANK=3 is set and WORLD_SIZE is not: "},
      {without(kTorch, "RANK"), "WORLD_SIZE=8 is set and RANK is not: "},
      {without(kTorch, "MASTER_ADDR"), "RANK=3 is set and MASTER_ADDR is not: "},
      {without(kTorch, "MASTER_PORT"), "RANK=3 is set and MASTER_PORT is not: "},
      {with(kTorch, {{"RANK", "8"}}), "RANK=8: a whole number from 0 to 7 is needed"},
      {with(kTorch, {{"RANK", "-1"}}), "RANK=-1: a whole number from 0 to 7 is needed"},
      {with(kTorch, {{"RANK", "3x"}}), "RANK=3x: a whole number from 0 to 7 is needed"},
      {with(kTorch, {{"RANK", "3\x1b[2J"}}), "RANK=3\\u001b[2J: a whole number"},
      {with(kTorch, {{"WORLD_SIZE", "0"}}), "WORLD_SIZE=0: a whole number from 1 to 4096"},
      {with(kTorch, {{"WORLD_SIZE", "99999999999999999999"}}), "WORLD_SIZE=99999999999999999999: "},
      {with(kTorch, {{"LOCAL_RANK", "2"}}), "LOCAL_RANK=2: a whole number from 0 to 1"},
      {with(kTorch, {{"LOCAL_WORLD_SIZE", "9"}}), "LOCAL_WORLD_SIZE=9: a whole number from 1 to 8"},
      {with(kTorch, {{"MASTER_PORT", "65535"}}),
       "MASTER_PORT=65535: a whole number from 1 to 65534"},
      {with(kTorch, {{"LEEWAY_PORT", "0"}}), "LEEWAY_PORT=0: a whole number from 1 to 65535"},
      {with(without(kTorch, "TORCHELASTIC_RUN_ID"), kMpi),
       "WORLD_SIZE=8 and OMPI_COMM_WORLD_SIZE=4 contradict each other: unset one of them"},
      {with(without(kTorch, "TORCHELASTIC_RUN_ID"), kSlurm),
       "WORLD_SIZE=8 and SLURM_STEP_NUM_TASKS=6 contradict each other"},
      {without(kMpi, "OMPI_COMM_WORLD_SIZE"),
       "OMPI_COMM_WORLD_RANK=1 is set and OMPI_COMM_WORLD_SIZE is not"},
      {without(kSlurm, "SLURM_PROCID"), "SLURM_STEP_ID=0 is set and SLURM_PROCID is not"},
      {without(kSlurm, "SLURM_STEP_NODELIST"),
       "SLURM_STEP_ID=0 is set and SLURM_STEP_NODELIST is not"},
  };
  for (const auto& [variables, beginning] : cases) {
    const std::string problem = problem_of(variables);
    EXPECT_EQ(problem.substr(0, beginning.size()), beginning) << problem;
  }
}

TEST(Discovery, ReadsListsAsSlurmWritesThem) {
  EXPECT_EQ(first_host("n1"), "n1");
  EXPECT_EQ(first_host("n1,n2"), "n1");
  EXPECT_EQ(first_host("n[07-09,12],m3"), "n07");
  EXPECT_EQ(first_host("n[5,7]"), "n5");
  EXPECT_EQ(first_host("rack[1-2]node[3-4],x"), "rack1node3");
  EXPECT_EQ(first_host("gpu[01-02].cluster,x"), "gpu01.cluster");
  EXPECT_EQ(first_host("n[1"), "n[1");
  EXPECT_EQ(tasks_on_node("4", 0), 4);
  EXPECT_EQ(tasks_on_node("2(x3),1", 2), 2);
  EXPECT_EQ(tasks_on_node("2(x3),1", 3), 1);
  EXPECT_EQ(tasks_on_node("2(x3),1", 4), 0);
  EXPECT_EQ(tasks_on_node("", 0), 0);
  EXPECT_EQ(tasks_on_node("2(x", 0), 0);
  EXPECT_EQ(tasks_on_node("a", 0), 0);
}

}  // namespace
}  // namespace leeway
