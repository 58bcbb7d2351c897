// Messages and collectives of ranks that are processes of one host, beside Gloo's own allreduce.
//
//   ranks_benchmark [MEBIBYTES]
//
// With 2 and with 4 ranks, over loopback: the sum of MEBIBYTES (64) of floats that all ranks have
// afterwards, by reduce_scatter and all_gather and by Gloo, whose order of summation depends on its
// algorithm; the parts of that; broadcast; messages there and back. GB/s are those of the whole
// buffer, or of the message one way. Medians.

#include <fmt/format.h>
#include <gloo/allreduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "base/folders.h"
#include "ranks/discovery.h"
#include "ranks/gloo_ranks.h"
#include "ranks/local_workers.h"

namespace {

using namespace leeway;

// A group of Gloo alone; the ranks find each other in a folder.
std::shared_ptr<gloo::Context> plain_gloo(Ranks& ranks) {
  const std::string folder = fmt::format("/tmp/leeway-gloo-{}", std::getenv("LEEWAY_BENCHMARK"));
  make_folders(folder);
  ranks.barrier();
  gloo::rendezvous::FileStore files(folder);
  gloo::rendezvous::PrefixStore store(std::to_string(ranks.size()), files);
  auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
  auto context = std::make_shared<gloo::rendezvous::Context>(ranks.rank(), ranks.size());
  context->connectFullMesh(store, device);
  ranks.barrier();
  if (ranks.rank() == 0) remove_tree(folder);
  return context;
}

void gloo_sum(const std::shared_ptr<gloo::Context>& context, std::vector<float>& data,
              gloo::AllreduceOptions::Algorithm algorithm) {
  gloo::AllreduceOptions options(context);
  options.setOutput(data.data(), data.size());
  options.setAlgorithm(algorithm);
  options.setReduceFunction([](void* out, const void* a, const void* b, size_t count) {
    auto* sum = static_cast<float*>(out);
    const auto *left = static_cast<const float*>(a), *right = static_cast<const float*>(b);
    for (size_t i = 0; i < count; ++i) sum[i] = left[i] + right[i];
  });
  gloo::allreduce(options);
}

// The median time of a call that all ranks make together.
double median_of(Ranks& ranks, int repeats, const std::function<void()>& call) {
  std::vector<double> times;
  for (int k = 0; k <= repeats; ++k) {
    ranks.barrier();
    const auto begin = std::chrono::steady_clock::now();
    call();
    if (k > 0)
      times.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure_all(Ranks& ranks, size_t mebibytes) {
  const int size = ranks.size(), rank = ranks.rank();
  const auto context = plain_gloo(ranks);
  const auto print = [&](const std::string& what, double bytes, double seconds) {
    if (rank != 0) return;
    std::printf("  %-44s %10.3f ms %8.2f GB/s\n", what.c_str(), seconds * 1e3,
                bytes / seconds / 1e9);
    std::fflush(stdout);
  };
  for (const size_t kibibytes : {size_t(4), size_t(256), mebibytes * 1024}) {
    const size_t floats = kibibytes * 256;
    const double bytes = static_cast<double>(floats) * sizeof(float);
    const int repeats = kibibytes > 10000 ? 9 : 101;
    std::vector<float> data(floats, 1.0f);
    std::vector<size_t> bounds;
    for (int r = 0; r <= size; ++r) {
      bounds.push_back(floats * static_cast<size_t>(r) / static_cast<size_t>(size));
    }
    const size_t begin = bounds[static_cast<size_t>(rank)];
    const auto part = std::span(data).subspan(begin, bounds[static_cast<size_t>(rank) + 1] - begin);
    if (rank == 0) std::printf(" %d ranks, %zu KiB\n", size, kibibytes);
    print("sum everywhere, in order", bytes, median_of(ranks, repeats, [&] {
            ranks.reduce_scatter(data, bounds, part);
            ranks.all_gather(data, bounds);
          }));
    print("  reduce_scatter", bytes,
          median_of(ranks, repeats, [&] { ranks.reduce_scatter(data, bounds, part); }));
    print("  all_gather", bytes,
          median_of(ranks, repeats, [&] { ranks.all_gather(data, bounds); }));
    print("sum everywhere, Gloo's ring", bytes, median_of(ranks, repeats, [&] {
            gloo_sum(context, data, gloo::AllreduceOptions::Algorithm::RING);
          }));
    print("sum everywhere, Gloo's bcube", bytes, median_of(ranks, repeats, [&] {
            gloo_sum(context, data, gloo::AllreduceOptions::Algorithm::BCUBE);
          }));
    print("broadcast", bytes, median_of(ranks, repeats, [&] {
            ranks.broadcast(std::as_writable_bytes(std::span(data)), 0);
          }));
    const std::string message(kibibytes * 1024, 'x');
    print("message there and back, one way", bytes,
          0.5 * median_of(ranks, repeats, [&] {
            if (rank == 0) ranks.send(1, Channel::training, message);
            if (rank == 1) ranks.send(0, Channel::training, ranks.receive(0, Channel::training));
            if (rank == 0) ranks.receive(1, Channel::training);
          }));
  }
  print("barrier", 0.0, median_of(ranks, 101, [&] { ranks.barrier(); }));
  ranks.barrier();
}

int run(int count, char** words) {
  const size_t mebibytes = count > 1 ? std::stoul(words[1]) : 64;
  if (const auto options =
          ranks_from_environment([](const char* name) { return std::getenv(name); })) {
    measure_all(*join_ranks(*options), mebibytes);
    return 0;
  }
  for (const int size : {2, 4}) {
    ::setenv("LEEWAY_BENCHMARK", std::to_string(::getpid()).c_str(), 1);
    LocalWorkers workers({.size = size, .arguments = {std::to_string(mebibytes)}});
    measure_all(*join_ranks(workers.leader()), mebibytes);
    const std::string failure = workers.wait(60);
    if (!failure.empty()) throw Error(failure);
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(count, words);
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
}
