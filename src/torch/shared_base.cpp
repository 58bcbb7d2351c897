#include "torch/shared_base.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <mutex>
#include <tuple>

#include "torch/device_weights.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {
namespace {

using Key = std::tuple<const Parameters*, std::string, at::ScalarType>;

struct Entry {
  std::weak_ptr<const Parameters> host;  // another base may lie where a former one was
  std::weak_ptr<const SharedBase> copy;
};

}  // namespace

std::shared_ptr<const SharedBase> base_on_device(const std::shared_ptr<const Parameters>& base,
                                                 at::Device device, at::ScalarType compute) {
  static std::mutex mutex;
  static std::map<Key, Entry> known;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& each) { return each.second.copy.expired(); });
  Entry& entry = known[{base.get(), device.str(), compute}];
  if (entry.host.lock() == base) {
    if (auto there = entry.copy.lock()) return there;
  }
  const c10::InferenceMode kept_for_all(false);  // also where a sampler is the first to ask
  const at::NoGradGuard guard;
  auto made = std::make_shared<SharedBase>(SharedBase{FlatLayout(base->config()), {}, {}});
  made->flat = at::zeros({made->layout.size}, at::device(device).dtype(compute));
  copy_to_flat(made->layout, *base, made->flat);
  made->network = network_views(made->layout, made->flat);
#ifdef LEEWAY_CUDA
  if (device.is_cuda()) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
#endif
  entry = {base, made};
  return made;
}

}  // namespace leeway
