// Checks that a run fits its GPU's kernels and memory, or the CPU's memory, before anything is
// allocated there or written.
#pragma once

#include "run/run_setup.h"
#include "trainer/device_memory.h"

namespace leeway {

enum class Job { train, sft };

struct MemoryOfJob {
  Job job = Job::train;
  int64_t spawn_servers = 0;  // as RunSetup's
  int64_t ranks = 1;          // that share the run, with a GPU each
  bool sft_is_over = false;   // a run that goes on after its supervised phase
};

// What the job uses of a GPU's memory, without the supervised phase that comes before it ([sft]).
// Reads the shapes of reference and teacher; throws Error where it cannot.
DeviceMemoryUse memory_use_of(const Config& config, const ModelConfig& model,
                              const MemoryOfJob& job);
// Bytes, the supervised phase included: the most that is used at one time.
int64_t device_memory_of(const Config& config, const ModelConfig& model, const MemoryOfJob& job);
// Bytes of the engine in this process that evaluates.
int64_t evaluation_engine_memory(const Config& config, const ModelConfig& model);

// Throws Error, with the remedy, for a model whose sizes the GPU's kernels do not take: to train
// it, or to sample it where the job has an engine on the GPU. Reads what memory_use_of does.
void check_sizes_for_gpu(const Config& config, const ModelConfig& model, const MemoryOfJob& job);

// Why training on the CPU needs more than the bytes that are available; empty if it may fit. What
// is counted is what every run has: the weights, and without an adapter their gradients and
// moments.
std::string why_it_does_not_fit_cpu(const Config& config, const ModelConfig& model,
                                    uint64_t available);

// Throws Error, on the CPU OutOfMemory, with the numbers and, for a GPU, with settings that fit;
// for a GPU also for sizes that it does not take, and where so many GPUs cannot share the run.
ModelCheck fits_memory(const MemoryOfJob& job);

}  // namespace leeway
