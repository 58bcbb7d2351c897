#include "run/run_sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "leeway/error.h"
#include "orchestrator/steady_clock.h"
#include "run/engine_sampler.h"
#include "run/ranks_sampler.h"
#include "run/run_ranks.h"

#ifdef LEEWAY_POOL
#include "base/json.h"
#include "pool/child_servers.h"
#include "pool/curl_http.h"
#include "pool/name_source.h"
#include "pool/pool_sampler.h"
#include "run/devices.h"
#endif

namespace leeway {
namespace {

Metrics in_process_metrics(Sampler& sampler) {
  if (auto* ranks = dynamic_cast<RanksSampler*>(&sampler)) return ranks->take_metrics();
  return dynamic_cast<EngineSampler&>(sampler).take_metrics();
}

}  // namespace

void RunSampler::sample_in_process(const PolicySnapshot& weights, int threads, Clock& clock) {
  const EngineOptions options = setup_.engine_options(threads);
  if (setup_.ranks == nullptr) {
    sampler_ = std::make_unique<EngineSampler>(weights, options);
    return;
  }
  sampler_ = setup_.ranks->make_sampler(weights, options);
  // An evaluation's bits must not depend on the number of ranks: it is in float32, or on a GPU in
  // the precision of training.
  if (!options.backend && options.precision != Precision::float32) return;
  if (options.precision == Precision::fp8) return;
  shared_ = std::make_unique<SharedSampler>(*sampler_, weights.version(), clock);
}

#ifdef LEEWAY_POOL
namespace {

// http://host:8000/v1/ as http://host:8000
std::string server_root(std::string url) {
  const auto strip = [&](const char* end) {
    if (url.ends_with(end)) url.resize(url.size() - std::string(end).size());
  };
  strip("/");
  strip("/v1");
  return url;
}

std::vector<std::string> headers_of(const InferenceTable& table) {
  std::vector<std::string> headers = table.headers;
  if (table.api_key_var.empty()) return headers;
  const char* key = std::getenv(table.api_key_var.c_str());
  const std::string text = key == nullptr ? "" : key;
  const bool plain =
      std::all_of(text.begin(), text.end(), [](unsigned char c) { return c > 32 && c < 127; });
  if (text.empty() || !plain) {
    throw Error(
        fmt::format("inference.api_key_var = \"{}\": the variable is {}; it must have the "
                    "servers' key",
                    table.api_key_var, text.empty() ? "not set" : "not one plain word"));
  }
  headers.push_back("Authorization: Bearer " + text);
  return headers;
}

PoolContext context_of(const RunSetup& setup) {
  const RunConfig& run = setup.config.run;
  return {.table = run.inference,
          .model = {.vocab_size = setup.weights.config().vocab_size,
                    .max_length = setup.weights.config().max_position_embeddings,
                    .weights = setup.weights.lora() != nullptr ? ServedWeights::adapter
                                                               : ServedWeights::whole},
          .headers = headers_of(run.inference),
          .temperature = run.rollout.temperature};
}

std::unique_ptr<ServerSource> source_of(const InferenceTable& table) {
  if (table.pool == InferencePool::elastic) {
    return std::make_unique<NameServers>(table.hostname, table.port, table.sync_interval);
  }
  std::vector<ServerAddress> servers;
  for (size_t i = 0; i < table.base_url.size(); ++i) {
    const std::string& admin =
        table.admin_base_url.empty() ? table.base_url[i] : table.admin_base_url[i];
    servers.push_back({server_root(table.base_url[i]), server_root(admin)});
  }
  return std::make_unique<StaticServers>(std::move(servers));
}

// Options of the servers that the run starts: what [rollout] says of the engine in process.
std::vector<std::string> child_options(const RunSetup& setup) {
  const RunConfig& run = setup.config.run;
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int64_t threads = run.rollout.threads > 0
                              ? run.rollout.threads
                              : std::max<int64_t>(1, cores / setup.spawn_servers);
  std::vector<std::string> options = {
      "--device",          name_of(run.model.device),
      "--precision",       name_of(rollout_precision(run)),
      "--kv-after-swap",   name_of(run.rollout.kv_after_swap),
      "--kv-bytes",        std::to_string(run.rollout.kv_bytes),
      "--max-sequences",   std::to_string(run.rollout.max_sequences),
      "--threads",         std::to_string(threads),
      "--max-requests",    "65536",
      "--max-connections", "65536"};
  if (run.model.device == Device::cuda) options.emplace_back("--device-weights");
  return options;
}

}  // namespace

void check_servers(const RunSetup& setup) {
  if (setup.spawn_servers > 0 && setup.config.run.inference.pool != InferencePool::in_process) {
    throw Error(
        fmt::format("--spawn-servers {}: inference.pool = \"{}\" names servers already; "
                    "leave one of them out",
                    setup.spawn_servers, name_of(setup.config.run.inference.pool)));
  }
  if (setup.samples_in_process() || setup.spawn_servers > 0) return;
  SteadyClock clock;
  PoolSampler pool(context_of(setup), source_of(setup.config.run.inference),
                   std::make_unique<CurlHttp>(), nullptr, clock);
  pool.wait_for_server([] { return false; });
}

RunSampler::RunSampler(const RunSetup& setup, std::shared_ptr<const PolicySnapshot> weights,
                       int threads, RunFiles& files, Progress& progress,
                       const StopCondition& should_stop, Clock& clock)
    : setup_(setup), files_(files), progress_(progress) {
  if (setup.samples_in_process()) {
    sample_in_process(*weights, threads, clock);
    return;
  }
  PoolContext context = context_of(setup);
  // Adapters are small files.
  const std::optional<WeightSharing> sharing = setup.weights.lora() != nullptr
                                                   ? std::nullopt
                                                   : weight_sharing(setup.config.run.model.device);
  auto store = std::make_unique<WeightFolders>(files.folder() + "/broadcast",
                                               sharing ? sharing->share : WeightFolders::Share());
  const PolicyVersion version = weights->version();
  std::unique_ptr<ServerSource> source;
  if (setup.spawn_servers > 0) {
    // Also what a server starts with that is started again, when newer weights have replaced the
    // published ones.
    std::string model = setup.config.run.model.path;  // that of an adapter is there already
    if (!setup.config.run.model.lora.enabled) {
      model = children_model_ = files.folder() + "/servers/model";
      save_parameters(weights->host(), model);
    }
    auto children = std::make_unique<ChildServers>(
        ChildServersOptions{.count = setup.spawn_servers,
                            .model = model,
                            .weights_root = store->folder(),
                            .log_folder = files.folder() + "/servers",
                            .options = child_options(setup)});
    context.table.dialect = InferenceDialect::leeway;
    context.headers.push_back("Authorization: Bearer " + children->key());
    source = std::move(children);
  } else {
    source = source_of(setup.config.run.inference);
  }
  auto pool = std::make_unique<PoolSampler>(std::move(context), std::move(source),
                                            std::make_unique<CurlHttp>(), std::move(store), clock);
  PoolSampler& servers = *pool;
  sampler_ = std::move(pool);
  servers.update_weights(std::move(weights), version);
  shared_ = std::make_unique<SharedSampler>(servers, version, clock);
  try {
    servers.wait_for_server(should_stop);
  } catch (const Error&) {
    tell();
    throw;
  }
  tell();
}

RunSampler::~RunSampler() {
  sampler_.reset();
  std::error_code ignored;
  if (!children_model_.empty()) std::filesystem::remove_all(children_model_, ignored);
}

Metrics RunSampler::take_metrics() {
  if (auto* pool = dynamic_cast<PoolSampler*>(sampler_.get())) return pool->take_metrics();
  return in_process_metrics(*sampler_);
}

void RunSampler::tell() {
  auto* pool = dynamic_cast<PoolSampler*>(sampler_.get());
  if (pool == nullptr) return;
  for (const std::string& line : pool->take_log()) progress_.note(line);
  for (const MemberEvent& event : pool->take_events()) {
    const std::string state = name_of(event.state);
    const std::string line = fmt::format("server {}: {}: {}", event.server, state, event.text);
    // Each new version is two lines per server: those are for the log.
    const bool usual =
        event.state == MemberState::syncing || (event.state == MemberState::ready && !event.first);
    if (usual) {
      files_.log(line);
      continue;
    }
    files_.write_server_event(event.server, state, event.text);
    progress_.note(line);
  }
}

#else

void check_servers(const RunSetup& setup) {
  if (setup.samples_in_process()) return;
  throw Error(
      fmt::format("{}: this program was built without libcurl and cannot speak to servers; "
                  "install libcurl4-openssl-dev and build it again",
                  setup.spawn_servers > 0 ? "--spawn-servers" : "inference.pool"));
}

RunSampler::RunSampler(const RunSetup& setup, std::shared_ptr<const PolicySnapshot> weights,
                       int threads, RunFiles& files, Progress& progress, const StopCondition&,
                       Clock& clock)
    : setup_(setup), files_(files), progress_(progress) {
  sample_in_process(*weights, threads, clock);
}

RunSampler::~RunSampler() = default;

Metrics RunSampler::take_metrics() { return in_process_metrics(*sampler_); }

void RunSampler::tell() {}

#endif

}  // namespace leeway
