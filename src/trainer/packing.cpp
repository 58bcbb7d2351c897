#include "trainer/packing.h"

#include <algorithm>
#include <numeric>

#include "leeway/error.h"

namespace leeway {
namespace {

struct Bin {
  int64_t size = 0;
  std::vector<size_t> items;
};

int64_t largest(const std::vector<Bin>& bins) {
  int64_t most = 0;
  for (const Bin& bin : bins) most = std::max(most, bin.size);
  return most;
}

std::vector<Bin> first_fit(std::span<const size_t> order, std::span<const int64_t> sizes,
                           int64_t budget) {
  std::vector<Bin> bins;
  for (size_t item : order) {
    auto bin = std::find_if(bins.begin(), bins.end(), [&](const Bin& candidate) {
      return candidate.size + sizes[item] <= budget;
    });
    if (bin == bins.end()) bin = bins.insert(bins.end(), Bin{});
    bin->size += sizes[item];
    bin->items.push_back(item);
  }
  return bins;
}

// Puts each item into the bin with the smallest load.
std::vector<Bin> longest_first(std::span<const size_t> order, std::span<const int64_t> sizes,
                               size_t count) {
  std::vector<Bin> bins(count);
  for (size_t item : order) {
    Bin& bin = *std::min_element(bins.begin(), bins.end(),
                                 [](const Bin& a, const Bin& b) { return a.size < b.size; });
    bin.size += sizes[item];
    bin.items.push_back(item);
  }
  return bins;
}

}  // namespace

std::vector<std::vector<size_t>> pack(std::span<const int64_t> sizes, int64_t budget) {
  LEEWAY_CHECK(budget > 0, "a bin must have a positive budget");
  std::vector<size_t> order;
  std::vector<std::vector<size_t>> out;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > budget) {
      out.push_back({i});
    } else if (sizes[i] > 0) {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<Bin> bins = first_fit(order, sizes, budget);
  std::vector<Bin> balanced = longest_first(order, sizes, bins.size());
  if (largest(balanced) <= largest(bins)) bins = std::move(balanced);

  for (Bin& bin : bins) {
    std::sort(bin.items.begin(), bin.items.end());
    out.push_back(std::move(bin.items));
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace leeway
