// Where a run computes: maps a device name to the backends of trainer and engine. An empty backend
// means the CPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/config.h"
#include "engine/backend.h"
#include "model/policy_snapshot.h"
#include "model/shared_weights.h"
#include "trainer/rank_backend.h"

namespace leeway {

// Throws Error for a device that this program or this machine does not have. `where` is the setting
// that requested it, for the message: `--device cuda`.
void check_device(Device device, const std::string& where);
// The device of a run.
void check_device(const Config& config);

// For EngineOptions::max_rows_per_step: as many rows as keep the device busy, and not more than a
// running sample should wait for.
int64_t rows_per_step(Device device);

// Bytes of the GPU that nobody uses; a device that has been checked. Throws Error.
int64_t free_device_memory();

// To be called before a run allocates anything on its device: on cuda memory then grows in place,
// which leaves fewer gaps, unless servers on this machine open the weights' memory
// (`shares_weights`): memory that grows has no handles for that.
void choose_device_memory(Device device, bool shares_weights);

// Throws Error for a sampler's precision that the device does not have (`--precision`).
void check_precision(Device device, Precision precision);

// These take devices that have been checked. `precision` is that of the passes on cuda, where there
// is no int8; the engine on the CPU uses its own options.
MakeSamplingBackend sampling_backend(Device device, Precision precision);
MakeSamplingBackend sampling_backend(const RunConfig& run);
MakeTrainingBackend training_backend(Device device, TrainingPrecision precision,
                                     SnapshotUse snapshots = {});
MakeTrainingBackend training_backend(const RunConfig& run, SnapshotUse snapshots = {});
// The same for ranks: each with the backend of its device.
MakeRankBackend rank_backend(const RunConfig& run);
// For a rank among `local_size` of this machine, before anything asks for a GPU: it sees one alone,
// that of its number among those that CUDA_VISIBLE_DEVICES leaves. Where that names one GPU, the
// launcher has chosen. Throws Error if it names too few.
void choose_gpu(int local_rank, int local_size);
// For EngineOptions::kv_bytes where nobody has said it: 1 GiB on the CPU; on cuda 16 GiB, or half
// of what is free if that is less.
int64_t default_kv_bytes(Device device);
// How the device's memory is shared with other processes; empty: it is not.
std::optional<WeightSharing> weight_sharing(Device device);

}  // namespace leeway
