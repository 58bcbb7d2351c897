// CRC-32C of device memory, with the value that base/crc32c.h gives for the same bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace leeway::cuda {

// Sums of the crc32c_lanes::parts_of(words) parts of `words` 32-bit words; crc32c_lanes::joined
// makes one of them. Writes parts[..], on the device.
void crc32c_parts(const void* data, int64_t words, uint32_t* parts, cudaStream_t stream);

}  // namespace leeway::cuda
