// What trainer and engine compute with on the GPU, for the program, which sees no torch: it loads
// libleeway_cuda.so, where all of this is, when a command asks for the GPU (run-time loading keeps
// PyTorch's libraries, and the C++ library symbols they export, out of the program's own look-ups).
#pragma once

#include <string>

#include "engine/backend.h"
#include "trainer/backend.h"

namespace leeway {

struct CudaBackends {
  const char* version;  // LEEWAY_VERSION of the library, which must be the program's

  // Why nothing can be computed on a GPU here, in words; empty: it can.
  std::string (*why_no_cuda)();
  // On the first GPU; `half`: passes in bf16, else in float32.
  MakeTrainingBackend (*training)(bool half);
  MakeSamplingBackend (*sampling)(bool half);
};

// The one symbol of the library, of type CudaBackendsEntry.
inline constexpr const char* kCudaBackendsEntry = "leeway_cuda_backends";
using CudaBackendsEntry = const CudaBackends* (*)();

}  // namespace leeway
