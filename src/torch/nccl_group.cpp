#include "torch/nccl_group.h"

#include <fmt/format.h>

#include "leeway/error.h"

#ifdef LEEWAY_NCCL

#include <c10/cuda/CUDAGuard.h>
#include <nccl.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "base/start_thread.h"
#include "torch/cuda_tensors.h"

namespace leeway {
namespace {

ncclDataType_t type_of(const at::Tensor& numbers) {
  switch (numbers.scalar_type()) {
    case at::kFloat: return ncclFloat32;
    case at::kBFloat16: return ncclBfloat16;
    default: return ncclInt8;  // bytes
  }
}

// Numbers, or bytes where NCCL does not know their type.
size_t count_of(const at::Tensor& numbers) {
  return type_of(numbers) == ncclInt8 ? numbers.nbytes() : static_cast<size_t>(numbers.numel());
}

class NcclGroup final : public DeviceGroup {
 public:
  NcclGroup(Ranks& ranks, at::Device device) : ranks_(ranks), device_(device) {
    ncclUniqueId id{};
    std::string problem;
    if (ranks.rank() == 0) {
      if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
        problem = ncclGetErrorString(result);
    }
    ranks_.broadcast(std::as_writable_bytes(std::span(&id, 1)), 0);
    if (!problem.empty()) throw Error("NCCL: " + problem);
    watcher_ = start_thread([this] { watch(); });
    try {
      const c10::cuda::CUDAGuard guard(device_);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;  // so that a rank that is lost meanwhile does not hold this one
      call([&] {
        return ncclCommInitRankConfig(&communicator_, ranks.size(), id, ranks.rank(), &config);
      });
    } catch (...) {
      end();
      throw;
    }
  }
  ~NcclGroup() override { end(); }

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }

  void reduce_scatter(const at::Tensor& whole) override {
    const size_t part = part_of(whole);
    auto* const data = whole.data_ptr<float>();
    on_stream(whole, [&](cudaStream_t stream) {
      return ncclReduceScatter(data, data + part * static_cast<size_t>(rank()), part, ncclFloat32,
                               ncclSum, communicator_, stream);
    });
  }

  void all_gather(const at::Tensor& whole) override {
    const size_t bytes = part_of(whole) * whole.element_size();
    auto* const data = static_cast<char*>(whole.data_ptr());
    on_stream(whole, [&](cudaStream_t stream) {
      return ncclAllGather(data + bytes * static_cast<size_t>(rank()), data, bytes, ncclInt8,
                           communicator_, stream);
    });
  }

  // In rings a broadcast from each owner moves the bytes that a gathering of equal parts does, and
  // so does a reduction to each.
  void reduce_parts(const at::Tensor& whole, std::span<const int64_t> bounds) override {
    auto* const data = whole.data_ptr<float>();
    for_parts(whole, bounds, [&](int owner, int64_t begin, size_t count, cudaStream_t stream) {
      return ncclReduce(data + begin, data + begin, count, ncclFloat32, ncclSum, owner,
                        communicator_, stream);
    });
  }

  void gather_parts(const at::Tensor& whole, std::span<const int64_t> bounds) override {
    const size_t bytes = whole.element_size();
    auto* const data = static_cast<char*>(whole.data_ptr());
    for_parts(whole, bounds, [&](int owner, int64_t begin, size_t count, cudaStream_t stream) {
      char* const part = data + static_cast<size_t>(begin) * bytes;
      return ncclBroadcast(part, part, count * bytes, ncclInt8, owner, communicator_, stream);
    });
  }

  void send(const at::Tensor& numbers, int to) override {
    on_stream(numbers, [&](cudaStream_t stream) {
      return ncclSend(numbers.data_ptr(), count_of(numbers), type_of(numbers), to, communicator_,
                      stream);
    });
  }
  void receive(const at::Tensor& numbers, int from) override {
    on_stream(numbers, [&](cudaStream_t stream) {
      return ncclRecv(numbers.data_ptr(), count_of(numbers), type_of(numbers), from, communicator_,
                      stream);
    });
  }

 private:
  size_t part_of(const at::Tensor& whole) const {
    LEEWAY_CHECK(whole.is_contiguous() && whole.numel() % size() == 0, "a part for each rank");
    return static_cast<size_t>(whole.numel() / size());
  }

  // One call for all parts that are not empty: each(owner, first number, numbers, stream).
  template <class Each>
  void for_parts(const at::Tensor& whole, std::span<const int64_t> bounds, const Each& each) {
    LEEWAY_CHECK(whole.is_contiguous() && bounds.size() == static_cast<size_t>(size()) + 1 &&
                     bounds.back() == whole.numel(),
                 "a part for each rank");
    on_stream(whole, [&](cudaStream_t stream) {
      ncclResult_t result = ncclGroupStart();
      for (int r = 0; r < size() && may_go_on(result); ++r) {
        const int64_t begin = bounds[static_cast<size_t>(r)];
        const auto count = static_cast<size_t>(bounds[static_cast<size_t>(r) + 1] - begin);
        if (count > 0) result = each(r, begin, count, stream);
      }
      const ncclResult_t end = ncclGroupEnd();
      return may_go_on(result) ? end : result;
    });
  }
  static bool may_go_on(ncclResult_t result) {
    return result == ncclSuccess || result == ncclInProgress;
  }

  template <class Work>
  void on_stream(const at::Tensor& numbers, const Work& work) {
    const c10::cuda::CUDAGuard guard(device_);
    call([&] { return work(stream_of(numbers)); });
  }

  // Returns when NCCL has taken the call, which a lost rank may keep it from.
  template <class Work>
  void call(const Work& work) {
    ncclResult_t result = ncclSuccess;
    {
      const std::lock_guard lock(mutex_);
      if (!aborted_) result = work();
    }
    while (result == ncclInProgress) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      const std::lock_guard lock(mutex_);
      if (aborted_ || ncclCommGetAsyncError(communicator_, &result) != ncclSuccess) break;
    }
    bool lost = false;
    {
      const std::lock_guard lock(mutex_);
      lost = aborted_;
    }
    if (lost) ranks_.barrier();  // throws Lost, which names the rank
    if (result != ncclSuccess) {
      throw Error(fmt::format("NCCL: {} ({})", ncclGetErrorString(result),
                              ncclGetLastError(communicator_)));
    }
  }

  // A thread: waits for a word of this rank itself, which `end` sends, or for the group's end.
  void watch() {
    try {
      ranks_.receive(rank(), Channel::devices);
    } catch (const Lost&) {
      abort();
    }
  }

  void abort() {
    const std::lock_guard lock(mutex_);
    if (communicator_ != nullptr && !aborted_) ncclCommAbort(communicator_);
    aborted_ = true;
  }

  // Waits for the others until they have all that this rank has sent, unless one is lost.
  void end() {
    bool finished = false;
    try {
      if (communicator_ != nullptr) call([&] { return ncclCommFinalize(communicator_); });
      finished = true;
    } catch (const Error&) {
      // A destructor must not throw: what follows frees the communicator in either case.
    }
    try {
      ranks_.send(rank(), Channel::devices, "");
    } catch (const Lost&) {
      // The watcher has ended by the same loss.
    }
    watcher_.join();
    if (communicator_ == nullptr || aborted_) return;
    finished ? ncclCommDestroy(communicator_) : ncclCommAbort(communicator_);
  }

  Ranks& ranks_;
  const at::Device device_;
  std::mutex mutex_;  // of the two that follow
  ncclComm_t communicator_ = nullptr;
  bool aborted_ = false;
  std::thread watcher_;
};

}  // namespace

std::string why_no_nccl() { return ""; }

std::unique_ptr<DeviceGroup> make_nccl_group(Ranks& ranks, at::Device device) {
  return std::make_unique<NcclGroup>(ranks, device);
}

}  // namespace leeway

#else

namespace leeway {

std::string why_no_nccl() {
  return "this build of leeway has no NCCL; build it with a PyTorch for CUDA that brings it, or "
         "with libnccl-dev (docs/dependencies.md)";
}

std::unique_ptr<DeviceGroup> make_nccl_group(Ranks&, at::Device) { throw Error(why_no_nccl()); }

}  // namespace leeway

#endif
