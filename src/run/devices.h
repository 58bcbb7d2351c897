// Where a run computes: from a device's name to what trainer and engine are given. An empty backend
// is the CPU's.
#pragma once

#include <string>

#include "config/config.h"
#include "engine/backend.h"
#include "trainer/backend.h"

namespace leeway {

// Throws Error for a device that this program or this machine does not have. `where` is what named
// it, for the message: `--device cuda`.
void check_device(Device device, const std::string& where);
// Also for a loss that the device does not compute.
void check_device(const Config& config);

// The others take devices that have been checked. `precision`: of the passes on cuda, where there
// is no int8; the engine on the CPU follows its own options.
MakeSamplingBackend sampling_backend(Device device, Precision precision);
MakeSamplingBackend sampling_backend(const RunConfig& run);
MakeTrainingBackend training_backend(Device device, TrainingPrecision precision);
MakeTrainingBackend training_backend(const RunConfig& run);

}  // namespace leeway
