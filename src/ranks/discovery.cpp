#include "ranks/discovery.h"

#include <fmt/format.h>

#include <charconv>

#include "base/crc32c.h"
#include "base/printable.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr int kMostRanks = 4096;
constexpr int kFirstPort = 12000, kPorts = 20000;  // below those that systems give to connections
constexpr const char* kRemedy =
    "start all ranks with one launcher, or set LEEWAY_RANKS=off for a process by itself";

class Variables {
 public:
  explicit Variables(const GetVariable& variable) : variable_(variable) {}

  bool has(const char* name) const {
    const char* value = variable_(name);
    return value != nullptr && *value != '\0';
  }
  std::string text(const char* name) const { return has(name) ? variable_(name) : ""; }

  // `with`: a variable that is set and makes this one necessary.
  std::string needed(const char* name, const char* with) const {
    if (!has(name)) {
      throw Error(fmt::format("{}={} is set and {} is not: {}", with, printable(text(with)), name,
                              kRemedy));
    }
    return text(name);
  }
  int number(const char* name, const char* with, int least, int most) const {
    const std::string value = needed(name, with);
    int number = 0;
    const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (problem != std::errc() || end != value.data() + value.size() || number < least ||
        number > most) {
      throw Error(fmt::format("{}={}: a whole number from {} to {} is needed; {}", name,
                              printable(value), least, most, kRemedy));
    }
    return number;
  }
  int number_or(const char* name, int otherwise, int least, int most) const {
    return has(name) ? number(name, name, least, most) : otherwise;
  }

 private:
  const GetVariable& variable_;
};

// The variables of one launcher that say who a process is.
struct Names {
  const char *rank, *size, *local_rank, *local_size;
};
constexpr Names kTorchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};

RanksOptions who(const Variables& variables, const Names& names) {
  RanksOptions options;
  options.size = variables.number(names.size, names.rank, 1, kMostRanks);
  options.rank = variables.number(names.rank, names.size, 0, options.size - 1);
  options.local_size = variables.number_or(names.local_size, 1, 1, options.size);
  options.local_rank =
      variables.number_or(names.local_rank, 0, 0,
                          variables.has(names.local_size) ? options.local_size - 1 : kMostRanks);
  return options;
}

// Throws Error if another launcher's variables are set too and name another rank or size: then one
// of the two sets was written by hand, and it is not known which is right.
void check_against(const Variables& variables, const RanksOptions& options, const Names& own,
                   const char* rank, const char* size) {
  const auto differs = [&](const char* ours, int number, const char* theirs) {
    if (!variables.has(theirs) || variables.text(theirs) == std::to_string(number)) return;
    throw Error(fmt::format("{}={} and {}={} contradict each other: unset one of them", ours,
                            number, theirs, printable(variables.text(theirs))));
  };
  differs(own.size, options.size, size);
  differs(own.rank, options.rank, rank);
}

// A port that follows from a job's name, so that two jobs on one host rarely take the same.
int port_for(const std::string& job) {
  return kFirstPort + static_cast<int>(crc32c(job) % static_cast<uint32_t>(kPorts));
}

// `next`: the launcher itself uses MASTER_PORT. `otherwise`: where there is none; 0: it is needed.
int port_of_leader(const Variables& variables, const char* with, bool next, int otherwise) {
  if (variables.has("LEEWAY_PORT")) return variables.number("LEEWAY_PORT", with, 1, 65535);
  if (otherwise != 0 && !variables.has("MASTER_PORT")) return otherwise;
  return variables.number("MASTER_PORT", with, 1, next ? 65534 : 65535) + (next ? 1 : 0);
}

RanksOptions from_torchrun(const Variables& variables) {
  RanksOptions options = who(variables, kTorchrun);
  if (options.size == 1) return options;
  const bool torchrun = variables.has("TORCHELASTIC_RUN_ID");
  if (!torchrun) {
    check_against(variables, options, kTorchrun, kOpenMpi.rank, kOpenMpi.size);
    if (variables.has("SLURM_STEP_ID")) {
      check_against(variables, options, kTorchrun, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
    }
  }
  options.leader_address = variables.needed("MASTER_ADDR", kTorchrun.rank);
  options.leader_port = port_of_leader(variables, kTorchrun.rank, torchrun, 0);
  options.job = fmt::format("torchrun {} {} {}", variables.text("TORCHELASTIC_RUN_ID"),
                            options.leader_address, options.leader_port);
  return options;
}

RanksOptions from_open_mpi(const Variables& variables) {
  RanksOptions options = who(variables, kOpenMpi);
  if (options.size == 1) return options;
  options.job = "mpirun";
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (options.job == "mpirun" && variables.has(name)) options.job += " " + variables.text(name);
  }
  if (options.local_size == options.size && !variables.has("MASTER_ADDR")) {
    options.leader_address = "127.0.0.1";
  } else if (variables.has("MASTER_ADDR")) {
    options.leader_address = variables.text("MASTER_ADDR");
  } else {
    throw Error(
        fmt::format("{}={} and MASTER_ADDR is not set: with several hosts name that of rank 0, "
                    "mpirun -x MASTER_ADDR=HOST",
                    kOpenMpi.size, options.size));
  }
  options.leader_port = port_of_leader(variables, kOpenMpi.rank, false, port_for(options.job));
  return options;
}

RanksOptions from_slurm(const Variables& variables) {
  constexpr const char* kStep = "SLURM_STEP_ID";
  RanksOptions options;
  options.size = variables.number("SLURM_STEP_NUM_TASKS", kStep, 1, kMostRanks);
  options.rank = variables.number("SLURM_PROCID", kStep, 0, options.size - 1);
  if (options.size == 1) return options;
  const int node = variables.number_or("SLURM_NODEID", 0, 0, kMostRanks);
  options.local_size =
      std::max(1, tasks_on_node(variables.text("SLURM_STEP_TASKS_PER_NODE"), node));
  options.local_rank = variables.number_or("SLURM_LOCALID", 0, 0, kMostRanks);
  options.leader_address = variables.has("MASTER_ADDR")
                               ? variables.text("MASTER_ADDR")
                               : first_host(variables.needed("SLURM_STEP_NODELIST", kStep));
  options.job =
      fmt::format("slurm {} {}", variables.needed("SLURM_JOB_ID", kStep), variables.text(kStep));
  options.leader_port = port_of_leader(variables, kStep, false, port_for(options.job));
  return options;
}

}  // namespace

std::string first_host(const std::string& list) {
  const size_t end = list.find_first_of(",[");
  if (end == std::string::npos || list[end] == ',') return list.substr(0, end);
  const size_t close = list.find(']', end);
  if (close == std::string::npos) return list;
  const std::string inside = list.substr(end + 1, close - end - 1);
  const std::string rest = list.substr(close + 1, list.find(',', close) - close - 1);
  // Behind the first brackets there may be more, "r[1-2]n[1-4]".
  return list.substr(0, end) + inside.substr(0, inside.find_first_of(",-")) + first_host(rest);
}

int tasks_on_node(const std::string& tasks_per_node, int node) {
  const char* at = tasks_per_node.data();
  const char* const end = at + tasks_per_node.size();
  while (at < end) {
    int tasks = 0, times = 1;
    auto read = std::from_chars(at, end, tasks);
    if (read.ec != std::errc()) return 0;
    at = read.ptr;
    if (at < end && *at == '(') {
      if (end - at < 2 || at[1] != 'x') return 0;
      read = std::from_chars(at + 2, end, times);
      if (read.ec != std::errc() || read.ptr == end || *read.ptr != ')') return 0;
      at = read.ptr + 1;
    }
    if (node < times) return tasks;
    node -= times;
    if (at < end && *at++ != ',') return 0;
  }
  return 0;
}

std::optional<RanksOptions> ranks_from_environment(const GetVariable& variable) {
  const Variables variables(variable);
  const std::string use = variables.text("LEEWAY_RANKS");
  if (use == "off") return std::nullopt;
  if (!use.empty()) {
    throw Error(fmt::format("LEEWAY_RANKS={}: there is nothing but off", printable(use)));
  }
  RanksOptions options;
  if (variables.has(kTorchrun.rank) || variables.has(kTorchrun.size)) {
    options = from_torchrun(variables);
  } else if (variables.has(kOpenMpi.rank) || variables.has(kOpenMpi.size)) {
    options = from_open_mpi(variables);
  } else if (variables.has("SLURM_STEP_ID")) {
    options = from_slurm(variables);
  }
  if (options.size == 1) return std::nullopt;
  if (variables.has("LEEWAY_JOB")) options.job = variables.text("LEEWAY_JOB");
  options.interface = variables.text("LEEWAY_INTERFACE");
  options.local_worker = variables.has("LEEWAY_WORKER");
  return options;
}

}  // namespace leeway
