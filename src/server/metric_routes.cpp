// /metrics, in the text format of Prometheus.
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include "server/routes.h"

namespace leeway {
namespace {

// Made anew for each answer from what the server counts anyway, so that no request pays for it.
std::string metrics_text(const ServerContext& context) {
  prometheus::Registry registry;
  const EngineStatus& status = context.status;
  const auto gauge = [&](const char* name, const char* meaning, double value,
                         const prometheus::Labels& labels) {
    prometheus::BuildGauge().Name(name).Help(meaning).Register(registry).Add(labels).Set(value);
  };
  const auto counter = [&](const char* name, const char* meaning, double value,
                           const prometheus::Labels& labels) {
    prometheus::BuildCounter().Name(name).Help(meaning).Register(registry).Add(labels).Increment(
        value);
  };
  const prometheus::Labels model = {{"model_name", context.model.options.name}};
  const auto number = [](auto value) { return static_cast<double>(value); };
  const double used =
      status.blocks == 0 ? 0 : 1 - number(status.free_blocks) / number(status.blocks);
  const double running = number(status.running), queued = number(status.queued);

  gauge("vllm:num_requests_running", "Samples that run", running, model);
  gauge("vllm:num_requests_waiting", "Samples that wait", queued, model);
  gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", used, model);
  counter("vllm:num_preemptions_total", "Samples whose memory was taken back: never", 0, model);
  counter("vllm:prompt_tokens_total", "Tokens of prompts", number(context.calls.prompt_tokens()),
          model);
  counter("vllm:generation_tokens_total", "Sampled tokens", number(context.calls.sampled_tokens()),
          model);
  for (const Finish how : {Finish::stop, Finish::length, Finish::cancelled, Finish::failed}) {
    prometheus::Labels labels = model;
    labels["finished_reason"] = how == Finish::cancelled ? "abort" : name_of(how);
    counter("vllm:request_success_total", "Samples that have ended, by how",
            number(context.calls.finished(how)), labels);
  }
  gauge("sglang:num_running_reqs", "Samples that run", running, model);
  gauge("sglang:num_queue_reqs", "Samples that wait", queued, model);
  gauge("sglang:token_usage", "Share of the KV cache in use, 0 to 1", used, model);
  counter("sglang:prompt_tokens_total", "Tokens of prompts", number(context.calls.prompt_tokens()),
          model);
  counter("sglang:generation_tokens_total", "Sampled tokens",
          number(context.calls.sampled_tokens()), model);
  gauge("leeway_weight_version", "Version of the weights", number(status.version), model);
  gauge("leeway_paused", "1 while nothing new is sampled", status.paused ? 1 : 0, model);
  gauge("leeway_engine_alive", "0 once the engine has failed", status.failure.empty() ? 1 : 0,
        model);
  gauge("leeway_connections", "Open connections", number(context.http.connections()), model);
  gauge("leeway_requests", "HTTP requests that are being sampled for", number(context.calls.size()),
        model);
  counter("leeway_sampled_tokens_total", "Sampled tokens, those of samples that run included",
          number(status.sampled_tokens), model);
  counter("leeway_steps_total", "Passes of the engine", number(status.steps), model);
  counter("leeway_step_seconds_total", "Time in passes", status.step_seconds, model);
  return prometheus::TextSerializer().Serialize(registry.Collect());
}

void metrics(ServerContext& context, const Exchange& exchange) {
  exchange->respond(
      {.body = metrics_text(context), .content_type = "text/plain; version=0.0.4; charset=utf-8"});
}

}  // namespace

void add_metric_routes(RouteTable& routes) { routes.add("GET", "/metrics", metrics); }

}  // namespace leeway
