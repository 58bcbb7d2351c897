// How a sampler keeps the weights below an adapter.
#pragma once

namespace leeway {

// What becomes of the frozen weights under an adapter: a packed copy in the sampler's precision, or
// no copy, where that is float32. Both give the same bits.
enum class FrozenWeights { packed, in_place };

}  // namespace leeway
