#include "run/run_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "leeway/error.h"
#include "run/devices.h"
#include "run/ranks_sampler.h"
#include "run/sampling_worker.h"

namespace leeway {
namespace {

// Cross entropy, as the supervised phase has it.
LossSpec supervised_loss(const Catalog& catalog) { return catalog.make_spec("reinforce", {}); }

// What the others need to know of a run.
std::string run_message(const RunSetup& setup) {
  ByteWriter message;
  message.put(LEEWAY_VERSION);
  message.put(config_toml(setup.config));
  message.put(model_config_json(setup.weights.config()));
  const LoraSettings* lora = setup.weights.lora();
  message.put(lora != nullptr);
  if (lora == nullptr) return message.take();
  message.put(lora->rank);
  message.put(lora->alpha);
  message.put(uint64_t{lora->targets.size()});
  for (const std::string& target : lora->targets) message.put(target);
  return message.take();
}

struct ToldRun {
  Config config;
  Parameters like;  // the policy's shape, over an adapter's base
};

ToldRun read_run(const std::string& message, const Catalog& catalog) {
  ByteReader from(message);
  if (const std::string version = from.get_string(); version != LEEWAY_VERSION) {
    throw Error(fmt::format("this is leeway {}, rank 0 has {}: use one version on all hosts",
                            LEEWAY_VERSION, version));
  }
  Config config =
      parse_config(catalog, "rank 0's configuration", from.get_string(), {}, ConfigScope::whole);
  ModelConfig model = parse_model_config("rank 0's model", from.get_string());
  if (!from.get_bool()) {
    // Of weights in parts a rank never has all on the host.
    const bool sharded = config.run.trainer.sharding == Sharding::weights;
    Parameters like =
        sharded ? Parameters::shape_of(std::move(model)) : Parameters(std::move(model));
    return {std::move(config), std::move(like)};
  }
  LoraSettings lora;
  lora.rank = from.get<int64_t>();
  lora.alpha = from.get<double>();
  lora.targets.resize(from.get_count(1));
  for (std::string& target : lora.targets) target = from.get_string();
  auto base = std::make_shared<const Parameters>(load_parameters(config.run.model.path));
  return {std::move(config), Parameters(std::move(base), std::move(lora))};
}

}  // namespace

int cores_of_rank(int local_size) {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / local_size);
}

void RunRanks::begin(const RunSetup& setup, const Catalog& catalog) {
  const RunConfig& run = setup.config.run;
  check_ranks(size(), run);
  for (int r = 1; r < size(); ++r) ranks_.send(r, Channel::training, run_message(setup));
  loss_ = setup.config.loss_spec;
  supervised_ = supervised_loss(catalog);
  training_ = std::make_unique<RanksTraining>(
      ranks_, std::vector<const LossSpec*>{&*loss_, &*supervised_}, rank_backend(run));
}

std::string RunRanks::line() const {
  return fmt::format("{} ranks share the run, {} of them on this machine with {} core{} each",
                     size(), local_size_, cores(), cores() == 1 ? "" : "s");
}

RunRanks::~RunRanks() {
  try {
    if (training_ == nullptr) {
      ranks_.abort("rank 0: there is no run to share");
    } else {
      training_->end();
      end_sampling(ranks_);
    }
  } catch (const Lost&) {
    // They have ended.
  }
}

std::unique_ptr<Sampler> RunRanks::make_sampler(const PolicySnapshot& weights,
                                                const EngineOptions& options) {
  training_->keep_snapshots();
  return std::make_unique<RanksSampler>(
      ranks_, weights, RanksSamplerOptions{options, [this](PolicyVersion version) {
                                             return training_->others_keep(version);
                                           }});
}

void serve_run(Ranks& ranks, int local_size, const Catalog& catalog) {
  std::optional<ToldRun> told;
  std::optional<LossSpec> supervised;
  const std::string message = ranks.receive(0, Channel::training);
  try {
    told = read_run(message, catalog);
    supervised = supervised_loss(catalog);
    check_device(told->config);
    choose_device_memory(told->config.run.model.device, false);
  } catch (const std::exception& error) {
    ranks.abort(fmt::format("rank {}: {}", ranks.rank(), error.what()));
    throw;
  }
  const RunConfig& run = told->config.run;
  const ThreadPlan threads = plan_threads(run, cores_of_rank(local_size));
  KeptSnapshots snapshots;
  SamplingWorker sampling(
      ranks, told->like,
      {.engine = engine_options(run, threads.sampler),
       .snapshot = [&](PolicyVersion version) { return snapshots.take(version); }});
  try {
    serve_training(ranks,
                   {.like = &told->like,
                    .specs = {&told->config.loss_spec, &*supervised},
                    .threads = threads.trainer,
                    .make = rank_backend(run)},
                   snapshots);
  } catch (...) {
    snapshots.end();
    throw;
  }
  snapshots.end();
}

}  // namespace leeway
