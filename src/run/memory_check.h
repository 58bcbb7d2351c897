// Checks that a run fits its GPU's memory, before anything is allocated there or written.
#pragma once

#include "run/run_setup.h"
#include "trainer/device_memory.h"

namespace leeway {

enum class Job { train, sft };

struct MemoryOfJob {
  Job job = Job::train;
  int64_t spawn_servers = 0;  // as RunSetup's
};

// What the job uses of a GPU's memory. Reads the shapes of reference and teacher; throws Error
// where it cannot.
DeviceMemoryUse memory_use_of(const Config& config, const ModelConfig& model,
                              const MemoryOfJob& job);

// Throws Error with the numbers and with settings that fit. The CPU's memory is not checked.
ModelCheck fits_memory(const MemoryOfJob& job);

}  // namespace leeway
