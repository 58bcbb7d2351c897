#include "model/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <optional>
#include <stdexcept>

#include "base/crc32c.h"
#include "base/memory.h"
#include "base/out_of_memory.h"
#include "base/rng.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr int64_t kFloatsPerLine = 64 / sizeof(float);
constexpr uint64_t kWorthAsking = uint64_t{64} << 20;

int64_t aligned_size(const ParameterInfo& info) {
  return (info.size() + kFloatsPerLine - 1) / kFloatsPerLine * kFloatsPerLine;
}

double gib_of(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

// FNV-1a.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

// Seeded twice, so that neither close seeds nor close names give shifted copies of one sequence.
Rng rng_of(uint64_t seed, std::string_view name) {
  return Rng(Rng(Rng(seed).next() ^ hash_of(name)).next());
}

double deviation_of(const ModelConfig& config, const ParameterInfo& info) {
  const double inputs = static_cast<double>(info.shape.back());
  switch (info.role) {
    case ParameterInfo::Role::embedding:
      return config.tie_word_embeddings ? 1.0 / std::sqrt(inputs) : 0.1;
    case ParameterInfo::Role::head: return 0.5 / std::sqrt(inputs);
    default: break;
  }
  const bool writes_residual =
      info.name.ends_with(".o_proj.weight") || info.name.ends_with(".down_proj.weight");
  const double sums = writes_residual ? 2.0 * static_cast<double>(config.num_hidden_layers) : 1.0;
  return 1.0 / std::sqrt(inputs * sums);
}

}  // namespace

Parameters::Parameters(ModelConfig config) : Parameters(std::move(config), std::nullopt) {}

Parameters::Parameters(std::shared_ptr<const Parameters> base, LoraSettings lora)
    : Parameters(base->config(), std::move(lora)) {
  LEEWAY_CHECK(base->lora() == nullptr, "the base of an adapter has none itself");
  base_ = std::move(base);
  lora_->base_sum = base_->frozen_checksum();
}

uint32_t Parameters::frozen_checksum() const {
  uint64_t kept = sum_.value;
  if (kept == KeptSum::kUnknown) sum_.value = kept = checksum(*this);
  return static_cast<uint32_t>(kept);
}

Parameters Parameters::shape_of(ModelConfig config) {
  return {std::move(config), std::nullopt, Shape()};
}

Parameters Parameters::zeros_like(const Parameters& other) {
  return Parameters(other.config_, other.lora_);
}

Parameters::Parameters(ModelConfig config, std::optional<LoraSettings> lora, Shape)
    : config_(std::move(config)),
      lora_(std::move(lora)),
      table_(lora_ ? lora_table(config_, *lora_) : parameter_table(config_)) {
  int64_t end = 0;
  for (size_t i = 0; i < table_.size(); ++i) {
    offsets_.push_back(end);
    places_.emplace(table_[i].name, i);
    end += aligned_size(table_[i]);
  }
}

Parameters::Parameters(ModelConfig config, std::optional<LoraSettings> lora)
    : Parameters(std::move(config), std::move(lora), Shape()) {
  const int64_t end = table_.empty() ? 0 : offsets_.back() + aligned_size(table_.back());
  const uint64_t bytes = static_cast<uint64_t>(end) * sizeof(float);
  const auto refuse = [&](const std::string& more) {
    throw OutOfMemory(fmt::format("no memory for {} weights: {:.1f} GiB in float32{}", count(),
                                  gib_of(bytes), more));
  };
  // The system hands out more than it has and kills who uses it, so it is asked first. Small
  // requests are not worth the question.
  if (bytes > kWorthAsking) {
    const std::optional<uint64_t> available = available_memory();
    if (available && bytes > *available) {
      refuse(fmt::format(" are needed, {:.1f} GiB are available", gib_of(*available)));
    }
  }
  try {
    values_.resize(static_cast<size_t>(end));
  } catch (const std::bad_alloc&) {
    refuse("");
  } catch (const std::length_error&) {
    refuse("");
  }
}

int64_t Parameters::count() const {
  int64_t sum = 0;
  for (const ParameterInfo& info : table_) sum += info.size();
  return sum;
}

std::span<float> Parameters::of(size_t index) {
  LEEWAY_CHECK(index < table_.size(), "the index must be in the table");
  return std::span(values_).subspan(static_cast<size_t>(offsets_[index]),
                                    static_cast<size_t>(table_[index].size()));
}
std::span<const float> Parameters::of(size_t index) const {
  LEEWAY_CHECK(index < table_.size(), "the index must be in the table");
  return std::span(values_).subspan(static_cast<size_t>(offsets_[index]),
                                    static_cast<size_t>(table_[index].size()));
}

const float* Parameters::find(std::string_view name) const {
  const auto place = places_.find(name);
  if (place == places_.end()) return base_ ? base_->find(name) : nullptr;
  return of(place->second).data();
}
float* Parameters::find(std::string_view name) {
  const auto place = places_.find(name);
  return place == places_.end() ? nullptr : of(place->second).data();
}

namespace {

template <class T, class P>
NetworkPointers<T> network_in(P& parameters) {
  NetworkPointers<T> network = network_by<T>(
      parameters.config(), [&](const std::string& name) { return parameters.find(name); });
  if (const LoraSettings* lora = parameters.lora()) {
    network.rank = lora->rank;
    network.lora_scale = lora->scale();
  }
  return network;
}

}  // namespace

NetworkPointers<const float> network_of(const Parameters& parameters) {
  return network_in<const float>(parameters);
}
NetworkPointers<float> network_of(Parameters& parameters) { return network_in<float>(parameters); }

uint32_t checksum(const Parameters& parameters) {
  std::vector<uint32_t> crcs;
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const auto values = parameters.of(i);
    crcs.push_back(
        crc32c({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}));
  }
  return checksum(crcs);
}

uint32_t checksum(std::span<const uint32_t> crcs) {
  std::string sums;
  for (const uint32_t crc : crcs) sums += fmt::format("{} ", crc);
  return crc32c(sums);
}

namespace {

// As PEFT does: B zero, so that the policy begins as its base; A uniform within 1/sqrt(inputs),
// which is Kaiming's bound for a = sqrt(5).
void initialise_adapter(Parameters& parameters, uint64_t seed) {
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const ParameterInfo& info = parameters.table()[i];
    const std::span<float> values = parameters.of(i);
    std::fill(values.begin(), values.end(), 0.0f);
    if (!is_lora_a(info.name)) continue;
    const double bound = 1.0 / std::sqrt(static_cast<double>(info.shape.back()));
    Rng rng = rng_of(seed, info.name);
    for (float& value : values) {
      value = static_cast<float>(bound * (2.0 * rng.uniform() - 1.0));
    }
  }
}

}  // namespace

void initialise(Parameters& parameters, uint64_t seed) {
  if (parameters.lora() != nullptr) return initialise_adapter(parameters, seed);
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const ParameterInfo& info = parameters.table()[i];
    const std::span<float> values = parameters.of(i);
    if (info.role == ParameterInfo::Role::norm || info.role == ParameterInfo::Role::bias) {
      std::fill(values.begin(), values.end(), info.role == ParameterInfo::Role::norm ? 1.0f : 0.0f);
      continue;
    }
    const double deviation = deviation_of(parameters.config(), info);
    Rng rng = rng_of(seed, info.name);
    for (float& value : values) value = static_cast<float>(deviation * rng.normal());
  }
}

}  // namespace leeway
