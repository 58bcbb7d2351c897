// Functions that nvcc compiles for host and device, and every other compiler for the host alone.
#pragma once

#ifdef __CUDACC__
#define LEEWAY_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LEEWAY_HOST_DEVICE inline
#endif
