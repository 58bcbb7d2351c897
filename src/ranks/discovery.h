// Which rank this process is, from the variables that torchrun, Open MPI and Slurm set.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "ranks/options.h"

namespace leeway {

// As std::getenv: null if there is no such variable.
using GetVariable = std::function<const char*(const char* name)>;

// Nothing if no launcher started this process, if it started one process alone, or with
// LEEWAY_RANKS=off. Where several have set variables, torchrun's count, then Open MPI's, then
// Slurm's. `version` is left empty. Throws Error: variables of which some are missing, contradict
// each other or are no numbers.
//
// The port of rank 0 is LEEWAY_PORT, or MASTER_PORT, or MASTER_PORT + 1 under torchrun, which uses
// MASTER_PORT itself; Open MPI and Slurm set neither, so that it follows from the job's number.
std::optional<RanksOptions> ranks_from_environment(const GetVariable& variable);

// The first host of a list as Slurm writes it: "n[07-09,12],m3" begins with "n07".
std::string first_host(const std::string& list);
// The number of tasks on the node of that index, from "2(x3),1"; 0 if the text is none of that
// kind.
int tasks_on_node(const std::string& tasks_per_node, int node);

}  // namespace leeway
