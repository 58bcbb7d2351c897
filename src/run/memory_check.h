// Checks that a run fits its device's memory, before anything is allocated there or written.
#pragma once

#include "run/run_setup.h"
#include "trainer/device_memory.h"

namespace leeway {

enum class Job { train, sft };

// What the run uses of a GPU's memory. Reads the sizes of reference and teacher; throws Error where
// it cannot.
DeviceMemoryUse memory_use_of(const RunSetup& setup, Job job);

// Throws Error with the numbers and with settings that fit. The CPU is not checked.
void check_device_memory(const RunSetup& setup, Job job);

}  // namespace leeway
