#include "cuda/crc32c.h"

#include "base/crc32c.h"
#include "base/crc32c_lanes.h"
#include "base/rng.h"
#include "cuda/gpu_test_support.h"

namespace leeway::cuda {
namespace {

TEST(Crc32c, OfDeviceMemoryIsThatOfTheHost) {
  LEEWAY_NEEDS_GPU();
  Rng rng(7);
  for (const int64_t count :
       {int64_t{1}, int64_t{300}, crc32c_lanes::kPartWords, 3 * crc32c_lanes::kPartWords + 17}) {
    std::vector<uint32_t> words(static_cast<size_t>(count));
    for (uint32_t& word : words) word = static_cast<uint32_t>(rng.below(uint64_t{1} << 32));
    const DeviceArray<uint32_t> there(words);
    const DeviceArray<uint32_t> parts(static_cast<size_t>(crc32c_lanes::parts_of(count)));
    crc32c_parts(there.data(), count, parts.data(), nullptr);
    const std::string_view bytes(reinterpret_cast<const char*>(words.data()), 4 * words.size());
    EXPECT_EQ(crc32c_lanes::joined(parts.values(), count), crc32c(bytes)) << count << " words";
  }
}

}  // namespace
}  // namespace leeway::cuda
