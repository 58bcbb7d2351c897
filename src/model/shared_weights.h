// Weights in a GPU's memory that another process of the same machine copies from there: what one
// tells the other, and what a device offers for it. A handle is opaque; only the GPU's driver can
// turn it into memory, and only on the GPU it is of.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "model/policy_snapshot.h"

namespace leeway {

inline constexpr size_t kWeightHandleBytes = 64;

struct SharedWeights {
  std::string device;     // the GPU's UUID, "GPU-.."
  std::string handle;     // kWeightHandleBytes bytes, of an allocation
  int64_t offset = 0;     // bytes before the weights in it
  int64_t count = 0;      // float32 numbers, padding included
  uint32_t layout = 0;    // a checksum of names, shapes and places
  uint32_t checksum = 0;  // PolicySnapshot::checksum
};

struct WeightSharing {
  std::string device;  // its UUID
  // For a snapshot of this device. What it gives can be copied as long as the snapshot lives.
  // Throws Error where the memory cannot be shared. From any thread.
  std::function<SharedWeights(const PolicySnapshot&)> share;
  // A copy, whose checksum is that of `shared`. Throws Error where there is none. From any thread;
  // when it returns or throws, nothing of the other process's memory is used any more.
  std::function<std::shared_ptr<const PolicySnapshot>(const SharedWeights& shared,
                                                      const ModelConfig&, PolicyVersion)>
      take;
};

// {"device": "GPU-..", "handle": "<hexadecimal>", "offset": .., "count": .., "layout": "<8
// digits>", "checksum": "<8 digits>"}
std::string shared_weights_json(const SharedWeights& shared);
// The bytes of a handle. Throws Error for what is not kWeightHandleBytes in hexadecimal.
std::string handle_bytes(std::string_view hexadecimal);
// Eight hexadecimal digits. Throws Error.
uint32_t hexadecimal_sum(std::string_view text);

// Whether a host's name or address can only mean this machine: localhost, 127.0.0.0/8 and ::1.
bool is_loopback(std::string_view host);
// The same of a URL such as http://127.0.0.1:8000.
bool is_loopback_url(std::string_view url);

}  // namespace leeway
