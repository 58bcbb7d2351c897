#include "engine/cpu_backend.h"

#include "base/aligned.h"
#include "base/thread_pool.h"
#include "engine/checks.h"
#include "engine/host_draws.h"
#include "model/cpu_decoder.h"

namespace leeway {
namespace {

class CpuBackend final : public SamplingBackend {
 public:
  CpuBackend(const ModelConfig& config, const EngineOptions& options, int64_t most_blocks)
      : vocabulary_(config.vocab_size),
        block_bytes_(static_cast<int64_t>(KvStore::block_bytes(config))),
        pool_(options.threads),
        kv_(config, block_count(options, block_bytes_, most_blocks)),
        decoder_(config, options.precision, options.frozen),
        draws_(pool_) {}

  int64_t blocks() const override { return kv_.blocks(); }
  int64_t block_bytes() const override { return block_bytes_; }

  void load(const PolicySnapshot& weights) override { decoder_.load(pool_, weights.host()); }

  void run(const StepRows& pass, std::vector<Drawn>& drawn) override {
    const size_t wanted = pass.logit_rows.size() * static_cast<size_t>(vocabulary_);
    if (logits_.size() < wanted) logits_.resize(wanted);
    decoder_.run(pool_, pass.tokens, pass.sequences, kv_, pass.logit_rows, logits_.data());
    drawn.resize(pass.draws.size());
    draws_.draw(pass.draws, logits_.data(), vocabulary_, drawn);
  }

  void copy_blocks(std::span<const BlockCopy> copies) override {
    for (const BlockCopy& copy : copies) kv_.copy_block(copy.from, copy.to);
  }

 private:
  const int64_t vocabulary_, block_bytes_;
  ThreadPool pool_;
  KvStore kv_;
  SamplingDecoder decoder_;
  HostDraws draws_;
  AlignedVector<float> logits_;
};

}  // namespace

std::unique_ptr<SamplingBackend> make_cpu_backend(const ModelConfig& config,
                                                  const EngineOptions& options,
                                                  int64_t most_blocks) {
  return std::make_unique<CpuBackend>(config, options, most_blocks);
}

}  // namespace leeway
