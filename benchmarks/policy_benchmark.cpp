// Sampling and training of whole policies on the CPU, compared with what a user would write in
// plain libtorch, taking turns in one process. See benchmarks/README.md for the method.
//   policy_benchmark [--json FILE] [--repeats N] [--model 1M|10M]

#include <cstdlib>
#include <fstream>
#include <numeric>

#include "base/files.h"
#include "engine/engine.h"
#include "leeway/presets.h"
#include "policy_workload.h"
#include "report.h"

namespace leeway {
namespace {

constexpr double kKilo = 1e3, kMega = 1e6, kGiga = 1e9, kMebi = 1048576.0;

#ifdef LEEWAY_HAS_TORCH
// `run` with one thread and with all, in ATen and in its BLAS.
std::vector<Contender> with_threads(const std::string& name, int cores,
                                    const std::function<void()>& run) {
  std::vector<Contender> ways;
  for (int aten : {1, cores}) {
    for (int blas : {1, cores}) {
      ways.push_back(
          {name + ", ATen " + std::to_string(aten) + " BLAS " + std::to_string(blas), [=] {
             PlainDecoder::set_threads(aten, blas);
             run();
           }});
      if (cores == 1) return ways;
    }
  }
  return ways;
}
#endif

// ---------------------------------------------------------------------------------------------
// Leeway

// The gradients of one optimizer step: forward, head and backward.
class LeewayTraining {
 public:
  LeewayTraining(ThreadPool& pool, const Model& model, const PackedWorkload& batch)
      : pool_(pool),
        model_(model),
        batch_(batch),
        spec_(Catalog().make_spec("icepop", {})),
        gradients_(model.parameters.config()),
        hidden_(static_cast<size_t>(batch.count() * model.parameters.config().hidden_size)),
        d_hidden_(hidden_.size()),
        logprobs_(static_cast<size_t>(batch.count())) {}

  // Activation memory is reused from step to step, as a trainer does.
  double run(const TrainingOptions& options) {
    std::ranges::fill(gradients_.flat(), 0.0f);
    training_forward(pool_, model_.parameters, batch_.packed(), options, hidden_, &activations_);
    activation_bytes = activations_.bytes();
    HeadProblem problem = head_problem(model_, batch_, hidden_.data());
    problem.rows = batch_.rows;
    problem.all_rows = false;
    const auto head_size = static_cast<size_t>(problem.vocabulary * problem.hidden_size);
    const BatchView<float> view = {.offsets = batch_.cu_seqlens,
                                   .pi = logprobs_,
                                   .rollout = batch_.rollout,
                                   .advantages = batch_.advantages,
                                   .mask = batch_.mask};
    const HeadResult result = policy_head(pool_, problem, spec_, view, {}, logprobs_, {}, d_hidden_,
                                          std::span(gradients_.find("lm_head.weight"), head_size));
    training_backward(pool_, model_.parameters, batch_.packed(), d_hidden_, activations_,
                      gradients_);
    return result.loss;
  }

  const Parameters& gradients() const { return gradients_; }
  size_t activation_bytes = 0;  // from the last run

 private:
  ThreadPool& pool_;
  const Model& model_;
  const PackedWorkload& batch_;
  LossSpec spec_;
  Parameters gradients_;
  Activations activations_;
  AlignedVector<float> hidden_, d_hidden_;
  std::vector<float> logprobs_;
};

constexpr int64_t kPrompt = 32, kNewTokens = 64, kLargestBatch = 128;

EngineOptions engine_options(const Model& model, Precision precision) {
  constexpr int64_t kBlocks = kLargestBatch * ((kPrompt + kNewTokens) / kBlockKeys + 1);
  EngineOptions options;
  options.precision = precision;
  options.kv_bytes =
      kBlocks * static_cast<int64_t>(KvStore::block_bytes(model.parameters.config()));
  options.max_sequences = kLargestBatch;
  return options;
}

// Samples all prompts to the end; results are in the order of the prompts.
std::vector<SampledSequence> sample(Engine& engine,
                                    const std::vector<std::vector<int32_t>>& prompts) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    engine.submit({.prompt = prompts[i], .max_new_tokens = kNewTokens, .seed = i});
  }
  while (!engine.idle()) engine.step();
  std::vector<SampledSequence> finished = engine.take_finished();
  LEEWAY_CHECK(finished.size() == prompts.size(), "every prompt must have a sample");
  std::ranges::sort(finished, {}, &SampledSequence::request);
  return finished;
}

// ---------------------------------------------------------------------------------------------
// Sections

// A line of /proc/self/status, in bytes.
double memory_status(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return 1024.0 * std::atof(line.c_str() + key.size() + 1);
  }
  return kNone;
}

void head_memory(Report& report, ThreadPool& pool) {
  report.begin("head_memory",
               "Policy head with gradients, vocabulary 151936, hidden 64, logits in 64 MiB (MiB)",
               {{"rows", "rows", 6},
                {"full_logits_mib", "all logits", 12, 1},
                {"workspace_mib", "workspace", 12, 1},
                {"resident_growth_mib", "resident growth", 16, 1},
                {"seconds", "seconds", 9, 3}});
  constexpr int64_t kVocabulary = 151936, kWidth = 64;
  const LossSpec spec = Catalog().make_spec("icepop", {});
  for (int64_t rows : {64, 512}) {
    Rng rng(5);
    auto floats = [&](int64_t count, double deviation) {
      AlignedVector<float> values(static_cast<size_t>(count));
      for (float& value : values) value = static_cast<float>(deviation * rng.normal());
      return values;
    };
    const AlignedVector<float> hidden = floats(rows * kWidth, 1.0);
    const AlignedVector<float> weight = floats(kVocabulary * kWidth, 0.1);
    AlignedVector<float> d_hidden(hidden.size(), 1.0f), d_weight(weight.size(), 1.0f);
    const auto count = static_cast<size_t>(rows);
    std::vector<float> logprobs(count), advantages(count, 1.0f);
    const std::vector<float> rollout(count, -std::log(static_cast<float>(kVocabulary)));
    const std::vector<int64_t> targets(count, 7), offsets = {0, rows};
    HeadProblem problem;
    problem.tokens = rows;
    problem.hidden_size = kWidth;
    problem.vocabulary = kVocabulary;
    problem.hidden = rows_of(hidden.data(), kWidth);
    problem.weight = rows_of(weight.data(), kWidth);
    problem.targets = targets;
    problem.chunk_bytes = int64_t{64} << 20;
    const BatchView<float> view = {
        .offsets = offsets, .pi = logprobs, .rollout = rollout, .advantages = advantages};

    // Resets the high-water mark to the current size.
    std::ofstream("/proc/self/clear_refs") << "5";
    const double before = memory_status("VmRSS");
    const double seconds = seconds_of(
        [&] { policy_head(pool, problem, spec, view, {}, logprobs, {}, d_hidden, d_weight); });
    report.add({double(rows), static_cast<double>(rows * kVocabulary) * 4.0 / kMebi,
                static_cast<double>(head_workspace_bytes(problem)) / kMebi,
                (memory_status("VmHWM") - before) / kMebi, seconds});
  }
}

void machine(Report& report, ThreadPool& pool) {
  report.begin("machine", "The machine",
               {{"what", "what", -46}, {"value", "value", 10, 1}, {"unit", "unit", 8}});
  report.add({"threads", double(pool.threads()), ""});
  double load[1] = {kNone};
  getloadavg(load, 1);
  report.add({"load average of the last minute", load[0], ""});
#ifdef LEEWAY_HAS_TORCH
  report.add({"libtorch", PlainDecoder::libtorch_version(), ""});
  double product = std::numeric_limits<double>::infinity();
  for (int blas : {1, pool.threads()}) {
    PlainDecoder::set_threads(1, blas);
    for (int i = 0; i < 5; ++i) product = std::min(product, PlainDecoder::product_seconds(1024));
  }
  report.add(
      {"libtorch float32 product of 1024 x 1024", 2.0 * 0x1p30 / product / kGiga, "GFLOP/s"});
#endif
  const std::vector<uint64_t> memory(size_t{32} << 20, 1);  // 256 MiB
  std::vector<uint64_t> sums(static_cast<size_t>(pool.threads()));
  const size_t share = memory.size() / sums.size();
  double reading = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 5; ++i) {
    reading = std::min(reading, seconds_of([&] {
                         pool.run(sums.size(), [&](size_t k) {
                           sums[k] = std::accumulate(
                               memory.begin() + static_cast<int64_t>(k * share),
                               memory.begin() + static_cast<int64_t>((k + 1) * share), uint64_t{0});
                         });
                       }));
  }
  LEEWAY_CHECK(std::accumulate(sums.begin(), sums.end(), uint64_t{0}) == share * sums.size(),
               "what was read");
  report.add(
      {"reading 256 MiB", static_cast<double>(memory.size()) * 8.0 / reading / kGiga, "GB/s"});
}

void describe(Report& report, const std::vector<Model>& models) {
  report.begin("models", "Models (Qwen3, head untied)",
               {{"model", "model", -5},
                {"parameters", "parameters", 12},
                {"forward_mflop_per_token", "MFLOP/token", 12, 2},
                {"weight_mb_float32", "MB float32", 11, 2},
                {"weight_mb_bf16", "MB bf16", 9, 2},
                {"weight_mb_int8", "MB int8", 9, 2}});
  for (const Model& model : models) {
    report.add({model.name, static_cast<double>(model.parameters.count()),
                (model.body_flops(0) + model.head_flops()) / kMega, model.weight_bytes(4) / kMega,
                model.weight_bytes(2) / kMega, model.weight_bytes(1) / kMega});
  }
}

void decode(Report& report, const std::vector<Model>& models, [[maybe_unused]] int cores,
            int repeats) {
  report.begin("decode",
               "Sampling, prompts of 32 tokens, 64 new ones, temperature 1, prompts included",
               {{"model", "model", -5},
                {"batch", "batch", 6},
                {"what", "what", -46},
                {"tokens_per_second", "tokens/s", 10},
                {"times_plain", "x plain", 8, 2},
                {"gflops", "GFLOP/s", 8, 1},
                {"weight_kb_per_token", "kB/token", 9, 1},
                {"weight_gb_per_second", "GB/s", 7, 2}});
  for (const Model& model : models) {
    Engine float32(model.parameters, 0, engine_options(model, Precision::float32));
    Engine bf16(model.parameters, 0, engine_options(model, Precision::bf16));
    Engine int8(model.parameters, 0, engine_options(model, Precision::int8));
#ifdef LEEWAY_HAS_TORCH
    PlainDecoder plain(model.parameters);
#endif
    for (int64_t batch : {int64_t{1}, int64_t{32}, kLargestBatch}) {
      Rng rng(11);
      std::vector<std::vector<int32_t>> prompts;
      for (int64_t b = 0; b < batch; ++b) prompts.push_back(random_ids(model, kPrompt, rng));
      std::vector<Contender> contenders;
      std::vector<double> bytes;
#ifdef LEEWAY_HAS_TORCH
      std::vector<int64_t> flat;
      for (const auto& prompt : prompts) flat.insert(flat.end(), prompt.begin(), prompt.end());
      std::vector<Contender> ways;
      for (auto [name, cache] : {std::pair{"growing", PlainDecoder::Cache::concatenated},
                                 std::pair{"fixed", PlainDecoder::Cache::preallocated}}) {
        for (Contender& way :
             with_threads(std::string("libtorch, ") + name + " cache", cores,
                          [&, cache = cache] { plain.sample(flat, batch, kNewTokens, cache); })) {
          ways.push_back(std::move(way));
        }
      }
      contenders.push_back(best_of(ways));
      bytes.push_back(4);
#endif
      contenders.push_back({"leeway float32", [&] { sample(float32, prompts); }});
      contenders.push_back({"leeway bf16", [&] { sample(bf16, prompts); }});
      contenders.push_back({"leeway int8", [&] { sample(int8, prompts); }});
      bytes.insert(bytes.end(), {4, 2, 1});
      measure(contenders, repeats);

      // Each prompt token and each new token except the last goes through the body, each new token
      // through the head.
      const double passed = static_cast<double>(kPrompt + kNewTokens - 1);
      const double flops = passed * model.body_flops(0.5 * (passed + 1)) +
                           static_cast<double>(kNewTokens) * model.head_flops();
      for (size_t i = 0; i < contenders.size(); ++i) {
        const double seconds = contenders[i].seconds;
        const double weights = model.weight_bytes(bytes[i]);
        report.add({model.name, double(batch), contenders[i].name,
                    static_cast<double>(batch * kNewTokens) / seconds,
                    bytes.size() > 3 ? contenders[0].seconds / seconds : kNone,
                    static_cast<double>(batch) * flops / seconds / kGiga,
                    weights / static_cast<double>(batch) / kKilo,
                    weights * static_cast<double>(kNewTokens) / seconds / kGiga});
      }
    }
  }
}

void train(Report& report, ThreadPool& pool, const std::vector<Model>& models, int repeats) {
  constexpr int64_t kSequences = 40;
  const std::vector<int64_t> mixed = mixed_lengths(kSequences);
  const int64_t total = std::accumulate(mixed.begin(), mixed.end(), int64_t{0});
  const std::vector<int64_t> equal(kSequences, total / kSequences);
  report.begin(
      "training",
      "Gradients of all parameters under IcePop, 40 sequences, half of the tokens trained; "
      "mixed: 16 to " +
          std::to_string(*std::max_element(mixed.begin(), mixed.end())) + " tokens, " +
          std::to_string(total) + " in all; equal: " + std::to_string(equal[0]) + " each",
      {{"model", "model", -5},
       {"lengths", "lengths", -7},
       {"what", "what", -46},
       {"tokens", "tokens", 7},
       {"computed_tokens", "computed", 9},
       {"tokens_per_second", "tokens/s", 10},
       {"times_plain", "x plain", 8, 2},
       {"useful_gflops", "GFLOP/s", 8, 1},
       {"activation_mb", "kept MB", 8, 1}});
  for (const Model& model : models) {
    for (const auto& [name, lengths] : {std::pair{"mixed", mixed}, std::pair{"equal", equal}}) {
      const PackedWorkload batch = training_batch(pool, model, lengths);
      LeewayTraining leeway(pool, model, batch);
      std::vector<Contender> contenders;
      std::vector<double> computed, kept;
#ifdef LEEWAY_HAS_TORCH
      PlainDecoder plain(model.parameters);
      const auto trained = static_cast<double>(batch.rows.size());
      const std::vector<PaddedBatch> whole = padded_batches(batch, false, kSequences);
      const std::vector<PaddedBatch> parts = padded_batches(batch, true, 8);
      for (const auto& [way, part] : {std::pair{"libtorch, one batch", &whole},
                                      std::pair{"libtorch, sorted, 8 at a time", &parts}}) {
        contenders.push_back(best_of(
            with_threads(way, pool.threads(), [&, p = part] { plain.train(*p, trained); })));
        double padded = 0.0;
        for (const PaddedBatch& p : *part) padded += static_cast<double>(p.rows * p.columns);
        computed.push_back(padded);
        kept.push_back(kNone);
      }
#endif
      // Each contender has its own activations, so that none of them grows while being timed.
      LeewayTraining fast(pool, model, batch), recomputing(pool, model, batch);
      contenders.push_back({"leeway, exact", [&] { leeway.run({}); }});
      contenders.push_back({"leeway, fast (products by OpenBLAS)", [&] {
#ifdef LEEWAY_HAS_TORCH
                              PlainDecoder::set_threads(1, 1);  // the pool already uses all threads
#endif
                              fast.run({.numerics = Numerics::fast});
                            }});
      contenders.push_back({"leeway, exact, activations recomputed",
                            [&] { recomputing.run({.recompute_activations = true}); }});
      computed.insert(computed.end(), 3, static_cast<double>(batch.count()));
      leeway.run({});
      recomputing.run({.recompute_activations = true});
      for (const LeewayTraining* one : {&leeway, &leeway, &recomputing}) {
        kept.push_back(static_cast<double>(one->activation_bytes) / kMega);
      }
      measure(contenders, repeats);

      // The minimum work: forward and twice that backward, the head on trained tokens only.
      const auto tokens = static_cast<double>(batch.count());
      const double flops = 3.0 * (tokens * model.body_flops(batch.mean_keys()) +
                                  static_cast<double>(batch.rows.size()) * model.head_flops());
      // Compared with the better of the two libtorch variants.
      const double plain_seconds =
          contenders.size() > 3 ? std::min(contenders[0].seconds, contenders[1].seconds) : kNone;
      for (size_t i = 0; i < contenders.size(); ++i) {
        const double seconds = contenders[i].seconds;
        report.add({model.name, name, contenders[i].name, tokens, computed[i], tokens / seconds,
                    plain_seconds / seconds, flops / seconds / kGiga, kept[i]});
      }
    }
  }
}

// Checks that all contenders compute the same, so that their times are comparable.
class Checks {
 public:
  Checks(Report& report, ThreadPool& pool) : report_(report), pool_(pool) {
    report_.begin(
        "checks", "Do they compute the same?",
        {{"model", "model", -5}, {"what", "what", -60}, {"difference", "difference", 12, 8}});
  }

  void sampling(const Model& model) {
    Rng rng(13);
    std::vector<std::vector<int32_t>> prompts;
    for (int b = 0; b < 4; ++b) prompts.push_back(random_ids(model, kPrompt, rng));

    Engine engine(model.parameters, 0, engine_options(model, Precision::float32));
    std::vector<std::vector<int32_t>> sequences = prompts;
    std::vector<float> logprobs;
    const std::vector<SampledSequence> finished = sample(engine, prompts);
    for (size_t b = 0; b < prompts.size(); ++b) {
      const SampledSequence& c = finished[b];
      sequences[b].insert(sequences[b].end(), c.ids.begin(), c.ids.end());
      logprobs.insert(logprobs.end(), c.raw_logprobs.begin(), c.raw_logprobs.end());
    }
    add(model, "log-probabilities: leeway sampling, leeway training",
        difference(model, sequences, logprobs), 0.0);

#ifdef LEEWAY_HAS_TORCH
    PlainDecoder plain(model.parameters);
    std::vector<int64_t> flat;
    for (const auto& prompt : prompts) flat.insert(flat.end(), prompt.begin(), prompt.end());
    double sampling_difference = 0.0;
    for (auto cache : {PlainDecoder::Cache::concatenated, PlainDecoder::Cache::preallocated}) {
      const auto rows = static_cast<int64_t>(prompts.size());
      const PlainDecoder::Sampled sampled = plain.sample(flat, rows, kNewTokens, cache);
      sequences = prompts;
      for (size_t i = 0; i < sampled.ids.size(); ++i) {
        sequences[i / kNewTokens].push_back(static_cast<int32_t>(sampled.ids[i]));
      }
      sampling_difference =
          std::max(sampling_difference, difference(model, sequences, sampled.logprobs));
    }
    add(model, "log-probabilities: libtorch sampling, leeway training", sampling_difference, 1e-3);
#endif
  }

#ifdef LEEWAY_HAS_TORCH
  void training(const Model& model) {
    const PackedWorkload batch = training_batch(pool_, model, mixed_lengths(12));
    const auto trained = static_cast<double>(batch.rows.size());
    LeewayTraining leeway(pool_, model, batch);
    PlainDecoder plain(model.parameters);
    Parameters expected(model.parameters.config());
    double loss_difference = 0.0, gradient_difference = 0.0;
    for (int64_t at_once : {12, 4}) {
      const double loss = plain.train(padded_batches(batch, true, at_once), trained);
      plain.copy_gradients_to(expected);
      for (bool recompute : {false, true}) {
        loss_difference = std::max(
            loss_difference, std::abs(leeway.run({.recompute_activations = recompute}) - loss));
        double squares = 0.0, off = 0.0;
        for (size_t i = 0; i < expected.flat().size(); ++i) {
          const double e = expected.flat()[i];
          squares += e * e;
          off += std::pow(leeway.gradients().flat()[i] - e, 2);
        }
        gradient_difference = std::max(gradient_difference, std::sqrt(off / squares));
      }
    }
    add(model, "loss: libtorch, leeway", loss_difference, 1e-4);
    add(model, "gradients of all parameters, relative: libtorch, leeway", gradient_difference,
        1e-3);
  }
#endif

 private:
  void add(const Model& model, const std::string& what, double difference, double allowed) {
    report_.add({model.name, what, difference});
    if (!(difference <= allowed)) throw Error(what + ": too far apart to compare times");
  }

  // The largest difference between sampled logprobs of the prompts [rows, kNewTokens] and Leeway's
  // training path.
  double difference(const Model& model, const std::vector<std::vector<int32_t>>& sequences,
                    std::span<const float> logprobs) {
    const PackedWorkload batch = pack(sequences);
    const std::vector<float> all = logprobs_of(pool_, model, batch);
    double largest = 0.0;
    for (size_t i = 0; i < logprobs.size(); ++i) {
      const auto first = static_cast<size_t>(batch.cu_seqlens[i / kNewTokens]) + kPrompt - 1;
      largest = std::max(largest, std::abs(double(all[first + i % kNewTokens]) - logprobs[i]));
    }
    return largest;
  }

  Report& report_;
  ThreadPool& pool_;
};

struct Options {
  std::string json, model;
  int repeats = 5;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--json" && !value.empty()) {
      options.json = value;
    } else if (name == "--model" && (value == "1M" || value == "10M")) {
      options.model = value;
    } else if (name == "--repeats" && std::atoi(value.c_str()) > 0) {
      options.repeats = std::atoi(value.c_str());
    } else {
      throw Error("policy_benchmark: " + name + " " + value +
                  ": unknown option; options are --json FILE, --repeats N, --model 1M|10M");
    }
  }
  return options;
}

void run(const Options& options) {
  Report report;
  ThreadPool pool;
  // First, before freed memory could hide growth.
  head_memory(report, pool);
  std::vector<Model> models = benchmark_models();
  std::erase_if(models, [&](const Model& model) {
    return !options.model.empty() && model.name != options.model;
  });
  machine(report, pool);
  describe(report, models);
  Checks checks(report, pool);
  for (const Model& model : models) {
    checks.sampling(model);
#ifdef LEEWAY_HAS_TORCH
    checks.training(model);
#endif
  }
  decode(report, models, pool.threads(), options.repeats);
  train(report, pool, models, options.repeats);
  if (!options.json.empty()) {
    write_file_atomically(options.json, report.json(pool.threads(), options.repeats));
  }
}

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  try {
    leeway::run(leeway::parse(argc, argv));
    return 0;
  } catch (const leeway::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
