// The GPU backends of trainer and engine for the program, which does not include torch: it loads
// libleeway_cuda.so when a command asks for the GPU (run-time loading keeps PyTorch's libraries,
// and the C++ library symbols they export, out of the program's own symbol resolution).
#pragma once

#include <cstdint>
#include <string>

#include "engine/backend.h"
#include "kernels/numerics.h"
#include "model/policy_snapshot.h"
#include "model/shared_weights.h"
#include "trainer/rank_backend.h"

namespace leeway {

struct CudaBackends {
  const char* version;  // LEEWAY_VERSION of the library, which must be the program's

  // Why nothing can run on a GPU here; empty if it can.
  std::string (*why_no_cuda)();
  // Bytes of the first GPU that nobody uses. Throws Error.
  int64_t (*free_memory)();
  // device_room.h's.
  void (*use_expandable_segments)();
  // On the first GPU; `half`: passes in bf16, else in float32.
  MakeTrainingBackend (*training)(bool half, SnapshotUse snapshots);
  // The same for a rank among others, on its first GPU; Error if the build has no NCCL.
  MakeRankBackend (*rank_training)(bool half);
  // In float32, bf16 or fp8, whose passes are in bf16 beside the layers' products.
  MakeSamplingBackend (*sampling)(Precision precision);
  // Weights of the first GPU, between processes.
  WeightSharing (*sharing)();
};

// The one symbol of the library, of type CudaBackendsEntry.
inline constexpr const char* kCudaBackendsEntry = "leeway_cuda_backends";
using CudaBackendsEntry = const CudaBackends* (*)();

}  // namespace leeway
