// The memory of a training step of Qwen3's shapes, with every setting that is there to save it, and
// what src/trainer/device_memory.h computes for it beforehand. The parts of the trainer's backend
// (src/torch/torch_training.cpp) are made here, with weights that are drawn on the device: on the
// host those of the largest shape alone would take a minute. Prints one JSON object a line. With
// --ranks it is rank 0 of so many, without the others: memory and time are those of a rank whose
// collectives take none. With --sharding weights it has its part alone; what a pass gathers of
// others' parts is copied from its own.
//   gpu_memory_table [--tokens N] [--only 0.6B|1.7B|4B|8B|14B|32B] [--steps N] [--ranks N]
//                    [--sharding optimizer|weights] [--optimizer_state float32|int8]
//                    [--recompute_activations off|selective|layer]

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <string>

#include "base/json.h"
#include "base/rng.h"
#include "data/packed_batch.h"
#include "leeway/error.h"
#include "leeway/presets.h"
#include "torch/device_room.h"
#include "torch/flat_adamw.h"
#include "torch/sharded_weights.h"
#include "torch/tensor_head.h"
#include "torch/trunk.h"
#include "trainer/device_memory.h"

namespace leeway {
namespace {

using at::Tensor;

constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;
constexpr int64_t kLength = 2048;  // of a sequence
const at::Device kDevice(at::kCUDA, 0);

struct Options {
  int64_t tokens = 16384;
  std::string only;
  int steps = 3, ranks = 1;
  Sharding sharding = Sharding::optimizer;
  std::optional<OptimizerState> optimizer_state;  // empty: all
  std::optional<Recompute> recompute;
};

struct Shape {
  const char* name;
  int64_t hidden, layers, heads, inner;
  bool tied;
};
constexpr Shape kShapes[] = {
    {"0.6B", 1024, 28, 16, 3072, true},  {"1.7B", 2048, 28, 16, 6144, true},
    {"4B", 2560, 36, 32, 9728, true},    {"8B", 4096, 36, 32, 12288, false},
    {"14B", 5120, 40, 40, 17408, false}, {"32B", 5120, 64, 64, 25600, false}};

ModelConfig config_of(const Shape& shape) {
  ModelConfig config;
  config.vocab_size = 151936;
  config.hidden_size = shape.hidden;
  config.intermediate_size = shape.inner;
  config.num_hidden_layers = shape.layers;
  config.num_attention_heads = shape.heads;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.max_position_embeddings = 40960;
  config.rope_theta = 1e6;
  config.tie_word_embeddings = shape.tied;
  config.qk_norm = true;
  return config;
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGibi; }

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  at::cuda::getCurrentCUDAStream().synchronize();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

MicroBatch batch_of(const ModelConfig& config, int64_t tokens) {
  Rng rng(3);
  std::vector<Sample> samples;
  for (int64_t first = 0; first < tokens; first += kLength) {
    Sample& sample = samples.emplace_back();
    // The last token of a sample is trained and not read: it has no row.
    sample.ids.resize(static_cast<size_t>(std::min(kLength, tokens - first) + 1));
    for (int32_t& id : sample.ids) {
      id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(config.vocab_size)));
    }
    sample.advantages.assign(sample.ids.size(), 1.0f);
    sample.loss_mask.assign(sample.ids.size(), 1);
    sample.loss_mask[0] = 0;
  }
  const PackedBatch packed = pack_samples(samples, false);
  std::vector<size_t> all(samples.size());
  std::iota(all.begin(), all.end(), size_t{0});
  MicroBatch batch;
  gather(packed, all, batch);
  return batch;
}

// Rank 0 of a group whose other ranks have what it has, and give nothing.
class RankWithoutOthers final : public DeviceGroup {
 public:
  explicit RankWithoutOthers(int size) : size_(size) {}
  void give(const Tensor& numbers) { numbers_ = numbers; }

  int rank() const override { return 0; }
  int size() const override { return size_; }
  void reduce_scatter(const Tensor&) override {}
  void all_gather(const Tensor&) override {}
  void reduce_parts(const Tensor&, std::span<const int64_t>) override {}
  void gather_parts(const Tensor& whole, std::span<const int64_t> bounds) override {
    for (int64_t at = bounds[1]; at < whole.numel(); at += numbers_.numel()) {
      const int64_t count = std::min(numbers_.numel(), whole.numel() - at);
      whole.narrow(0, at, count).copy_(numbers_.narrow(0, 0, count));
    }
  }
  void send(const Tensor&, int) override {}
  void receive(const Tensor&, int) override {}

 private:
  int size_;
  Tensor numbers_;
};

// The trainer's tensors, and its step.
class Learner {
 public:
  explicit Learner(const DeviceMemoryUse& use)
      : layout_(use.model),
        own_(layout_.part_of(0, static_cast<int>(use.ranks))),
        recompute_(use.recompute),
        spec_(Catalog().make_spec("reinforce", {})),
        group_(static_cast<int>(use.ranks)) {
    const at::TensorOptions numbers = at::TensorOptions(kDevice).dtype(at::kFloat);
    low_ = at::zeros({own_.count}, numbers.dtype(at::kShort));
    moments_ = make_moments(layout_, kDevice, use.optimizer_state, own_);
    NetworkTensors network;
    if (use.sharding == Sharding::weights) {
      sharded_.emplace(layout_, kDevice, at::kBFloat16, group_);
      sharded_->own().normal_(0.0, 0.02), sharded_->rest().fill_(1.0);
      group_.give(sharded_->own());
      weights_ = sharded_->own();
      gradients_ = at::zeros({own_.count}, numbers);
      views_ = sharded_->use_gradients(gradients_);
      network = sharded_->network();
    } else {
      weights_ = at::empty({layout_.size}, numbers.dtype(at::kBFloat16));
      weights_.normal_(0.0, 0.02);
      weights_.narrow(0, layout_.decaying, layout_.size - layout_.decaying).fill_(1.0);
      gradients_ = at::zeros({layout_.size}, numbers);
      views_ = network_views(layout_, gradients_);
      network = network_views(layout_, weights_);
    }
    trunk_.emplace(use.model, network, TorchRopeTable(use.model, kDevice));
  }

  void pass(const MicroBatch& batch) {
    begin_gradients();
    const BatchOnDevice on(batch, kDevice, true);
    PassPieces* const pieces = sharded_ ? &*sharded_ : nullptr;
    if (sharded_) sharded_->begin(/*trains=*/true);
    TrunkRecord record;
    const Tensor hidden = trunk_->forward(on.tokens, batch.cu_seqlens, recompute_, &record, pieces);
    if (pieces != nullptr) pieces->at(PieceAct::work, kHeadPiece);
    const HeadLoss found =
        head_loss(pool_, {on, hidden, trunk_->head_weight(), trunk_->products()}, spec_, false,
                  static_cast<double>(batch.size()), views_.head, true);
    if (pieces != nullptr) pieces->at(PieceAct::give, kHeadPiece);
    trunk_->backward(std::move(record), found.d_hidden, views_, true, {}, pieces);
    if (sharded_) sharded_->sum_rest();
    if (!std::isfinite(found.loss.item<double>())) throw Error("the loss is not finite");
  }

  void step() {
    FlatAdamW step;
    step.copy = weights_.narrow(0, 0, own_.count), step.low = low_;
    step.decaying = std::min(layout_.decaying, own_.count);
    step.gradients = gradients_.narrow(0, 0, own_.count), step.moments = moments_;
    const double norm = norm_of(step.gradients);
    adamw_step(step, OptimizerTable(), ++steps_, 1e-6, norm > 1.0 ? 1.0 / norm : 1.0);
    if (sharded_) sharded_->weights_changed();
  }

 private:
  void begin_gradients() {
    if (sharded_) {
      gradients_.zero_(), sharded_->rest_gradients().zero_();
      return;
    }
    gradients_.narrow(0, layout_.decaying, layout_.size - layout_.decaying).zero_();
    if (!layout_.config.tie_word_embeddings) views_.embedding.zero_();
  }

  FlatLayout layout_;
  FlatRange own_;
  Recompute recompute_;
  LossSpec spec_;
  ThreadPool pool_{1};
  RankWithoutOthers group_;
  std::optional<ShardedWeights> sharded_;
  Tensor weights_, low_, gradients_;
  FlatMoments moments_;
  NetworkTensors views_;
  std::optional<Trunk> trunk_;
  int64_t steps_ = 0;
};

struct Row {
  DeviceMemoryUse use;
  int64_t used_before = 0;  // by CUDA itself
};

double median(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

void measure(const Options& options, const Row& row, JsonWriter& json) {
  const MicroBatch batch = batch_of(row.use.model, options.tokens);
  Learner learner(row.use);
  std::vector<double> passes, steps;
  for (int i = -1; i < options.steps; ++i) {  // one to warm up
    const auto begin = Clock::now();
    learner.pass(batch);
    const double of_pass = seconds_since(begin);
    const auto between = Clock::now();
    learner.step();
    const double of_step = seconds_since(between);
    if (i < 0) continue;
    passes.push_back(of_pass), steps.push_back(of_step);
  }
  const double pass = median(std::move(passes));
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  const auto& all = at::cuda::getDeviceProperties(0);
  const double used = gib(static_cast<int64_t>(all->totalGlobalMem) - free_bytes(kDevice));
  json.key("used_gib").value(used);
  json.key("beyond_context_gib").value(used - gib(row.used_before));
  json.key("allocated_gib").value(gib(stats.allocated_bytes[0].peak));
  json.key("reserved_gib").value(gib(stats.reserved_bytes[0].peak));
  json.key("forward_backward_seconds").value(pass);
  json.key("optimizer_seconds").value(median(std::move(steps)));
  // Six operations for a parameter and token, without attention.
  int64_t count = 0;
  for (const ParameterInfo& info : parameter_table(row.use.model)) count += info.size();
  const auto operations = 6.0 * static_cast<double>(count) * static_cast<double>(options.tokens);
  json.key("model_tflops").value(operations / pass / 1e12);
}

void print(const Options& options, const Shape& shape, const Row& row) {
  const DeviceMemory need = device_memory(row.use);
  JsonWriter json;
  json.begin_object().key("model").value(std::string(shape.name));
  json.key("tokens").value(static_cast<double>(options.tokens));
  json.key("ranks").value(static_cast<double>(options.ranks));
  json.key("sharding").value(std::string(name_of(options.sharding)));
  json.key("optimizer_state").value(std::string(name_of(row.use.optimizer_state)));
  json.key("recompute_activations").value(std::string(name_of(row.use.recompute)));
  json.key("computed_gib").value(gib(need.total()));
  json.key("state_gib").value(gib(need.weights + need.gradients + need.moments));
  json.key("gathered_gib").value(gib(need.gathered));
  json.key("activations_gib").value(gib(need.activations));
  json.key("workspace_gib").value(gib(need.workspace));
  c10::cuda::CUDACachingAllocator::emptyCache();
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  const bool fits = need.total() <= free_bytes(kDevice);
  json.key("fits").value(fits);
  if (fits) {
    try {
      measure(options, row, json);
    } catch (const c10::Error& error) {
      json.key("failure").value(std::string(error.what_without_backtrace()));
    }
  }
  std::printf("%s\n", json.end_object().text().c_str());
  std::fflush(stdout);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--tokens" && std::atoi(value.c_str()) > 0) {
      options.tokens = std::atoi(value.c_str());
    } else if (name == "--steps" && std::atoi(value.c_str()) > 0) {
      options.steps = std::atoi(value.c_str());
    } else if (name == "--ranks" &&
               FlatLayout::kMostRanks % std::max(1, std::atoi(value.c_str())) == 0) {
      options.ranks = std::atoi(value.c_str());
    } else if (name == "--only" && !value.empty()) {
      options.only = value;
    } else if (name == "--sharding" && value_named<Sharding>(value)) {
      options.sharding = *value_named<Sharding>(value);
    } else if (name == "--optimizer_state" && value_named<OptimizerState>(value)) {
      options.optimizer_state = value_named<OptimizerState>(value);
    } else if (name == "--recompute_activations" && value_named<Recompute>(value)) {
      options.recompute = value_named<Recompute>(value);
    } else {
      throw Error("gpu_memory_table: " + name + " " + value +
                  ": unknown option; the file's first lines have those that there are");
    }
  }
  if (options.sharding == Sharding::weights && options.ranks == 1) {
    throw Error("gpu_memory_table: --sharding weights is of several ranks: add --ranks N");
  }
  return options;
}

void run(const Options& options) {
  const at::NoGradGuard guard;
  use_expandable_segments();
  at::zeros({1}, kDevice);  // makes the context and the allocator
  const int64_t free = free_bytes(kDevice);
  const auto total = static_cast<int64_t>(at::cuda::getDeviceProperties(0)->totalGlobalMem);
  for (const Shape& shape : kShapes) {
    if (!options.only.empty() && options.only != shape.name) continue;
    for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
      for (const Recompute recompute : {Recompute::off, Recompute::selective, Recompute::layer}) {
        if (options.optimizer_state.value_or(state) != state) continue;
        if (options.recompute.value_or(recompute) != recompute) continue;
        Row row;
        row.use.model = config_of(shape);
        row.use.max_tokens = options.tokens, row.use.ranks = options.ranks;
        row.use.sharding = options.sharding;
        row.use.recompute = recompute, row.use.optimizer_state = state;
        row.used_before = total - free;
        print(options, shape, row);
      }
    }
  }
}

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  try {
    leeway::run(leeway::parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
