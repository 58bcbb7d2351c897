#include <fmt/format.h>

#include <cstdlib>
#include <optional>

#include "cli/choice_option.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/serve_signals.h"
#include "cli/text_options.h"
#include "leeway/error.h"
#include "model/adapter_io.h"

#ifdef LEEWAY_SERVER
#include "base/files.h"
#include "base/folders.h"
#include "run/devices.h"
#include "server/server.h"
#include "server/weights.h"
#endif

namespace leeway {
namespace {

constexpr const char* kMeaning =
    "The model over HTTP, for OpenAI's clients and for vLLM's and SGLang's.\n"
    "  leeway serve MODEL\n"
    "  curl http://127.0.0.1:8000/v1/completions -d '{\"prompt\": \"Once\", \"max_tokens\": 16}'\n"
    "It listens on this machine alone unless --host says otherwise, and says on stderr when it is\n"
    "ready. SIGTERM or Ctrl-C ends it when the requests there are have been answered; a second "
    "one\n"
    "ends it at once. docs/serving.md has the routes, their limits and notes on security.";

#ifdef LEEWAY_SERVER

struct Options {
  ModelTextOptions text;
  ServerOptions server;
  std::string key_file, adapter;
  bool device_weights = false;
  std::optional<int64_t> kv_bytes;
  Device device = Device::cpu;
};

// The key from the file, or else from the variable; a line end after it does not count.
std::string api_key(const Options& options) {
  std::string key;
  if (!options.key_file.empty()) {
    key = read_file(options.key_file);
    while (!key.empty() && (key.back() == '\n' || key.back() == '\r')) key.pop_back();
    if (key.empty()) throw Error(options.key_file + ": is empty; it must hold the key");
  } else if (const char* variable = std::getenv("LEEWAY_API_KEY")) {
    key = variable;
    if (key.empty()) throw Error("LEEWAY_API_KEY is empty: unset it, or let it hold the key");
  }
  for (const char c : key) {
    if (c <= ' ' || c > '~') {
      throw Error(fmt::format("{}: a key has letters, digits and marks alone",
                              options.key_file.empty() ? "LEEWAY_API_KEY" : options.key_file));
    }
  }
  return key;
}

// The program's exit code.
int serve(Options& options) {
  check_model_option(options.text.folder, options.adapter);
  check_device(options.device, "--device cuda");
  ServerOptions& server = options.server;
  check_precision(options.device, server.engine.precision);
  server.api_key = api_key(options);
  if (options.device_weights) {
    if (options.device == Device::cpu) {
      throw Error("--device-weights: weights in a GPU's memory need --device cuda");
    }
    server.sharing = weight_sharing(options.device);
  }
  if (!server.weights_root.empty() && !path_exists(server.weights_root)) {
    throw Error(fmt::format("--weights-root {}: there is no such folder", server.weights_root));
  }
  server.folder = options.text.folder;
  if (server.name.empty()) server.name = server.folder;
  server.engine.backend = sampling_backend(options.device, server.engine.precision);
  server.engine.max_rows_per_step = rows_per_step(options.device);
  server.engine.kv_bytes = options.kv_bytes.value_or(default_kv_bytes(options.device));
  ServedText text =
      load_served_text(options.text, load_model_config(model_folder_of(server.folder)));
  const std::string& newest = options.adapter.empty() ? server.folder : options.adapter;
  auto weights = std::make_shared<const PolicySnapshot>(
      load_named_policy(server.folder, options.adapter), version_of_folder(newest).value_or(0));
  server.adapter = options.adapter;
  weights->checksum();
  server.on_failure = [](const std::string& reason) {
    say(fmt::format("leeway: the engine has failed, and all requests with it: {}", reason));
  };
  Server running(server, weights, std::move(text));
  weights.reset();
  const ServeSignals signals(running.drain_fd());
  say(fmt::format("listening on {}", running.url()));
  running.run();
  return running.failure().empty() ? 0 : 3;
}

void add_options(CLI::App& command, const std::shared_ptr<Options>& options) {
  ServerOptions& server = options->server;
  add_model_option(command, options->text.folder);
  command.add_option("--host", server.http.host, "Address to listen on; 0.0.0.0: all of them")
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--port", server.http.port, "0: any free one")
      ->check(CLI::Range(0, 65535))
      ->default_val(8000);
  command.add_option("--api-key-file", options->key_file,
                     "A file with the key that requests must carry; or the variable "
                     "LEEWAY_API_KEY; without either there is none");
  command.add_option("--weights-root", server.weights_root,
                     "Folder below which new weights may be loaded; without it none are");
  command.add_flag(
      "--device-weights", options->device_weights,
      "Also take new weights from the memory of the GPU, of a trainer on this machine; "
      "needs --device cuda and a key");
  command.add_option("--name", server.name, "The model's name in requests; otherwise the folder")
      ->type_name("NAME");
  add_text_options(command, options->text);
  add_adapter_option(command, options->adapter);
  add_choice(command, "--device", options->device, "Device to run on; cuda needs a GPU");
  add_choice(command, "--precision", server.engine.precision,
             "Dtype of the weights while sampling; int8 is for cpu, fp8 for cuda");
  add_choice(command, "--kv-after-swap", server.engine.kv_after_swap,
             "What running requests do with their KV cache when weights change");
  command
      .add_option(
          "--kv-bytes", options->kv_bytes,
          "Memory for the KV cache; requests beyond it wait. Otherwise 1 GiB; with cuda 16 GiB, "
          "or half of the free memory")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50));
  command
      .add_option("--max-sequences", server.engine.max_sequences,
                  "Samples that run at a time; others wait")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command
      .add_option("--max-requests", server.max_requests,
                  "Requests being answered at a time, those that wait included; others get 429")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command
      .add_option("--max-connections", server.http.connections,
                  "Open connections; others are closed at once")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command
      .add_option("--max-body-bytes", server.http.limits.body_bytes, "Of a request; others get 413")
      ->check(CLI::Range(size_t{1}, size_t{1} << 40))
      ->capture_default_str();
  const auto seconds = [&](const char* name, double& value, const char* meaning) {
    command.add_option(name, value, meaning)->check(CLI::Range(0.01, 1e6))->capture_default_str();
  };
  seconds("--request-seconds", server.http.request_seconds,
          "For a client to send a whole request, from its first byte on");
  seconds("--idle-seconds", server.http.idle_seconds, "For a connection without a request");
  seconds("--drain-seconds", server.drain_seconds,
          "For requests to be answered after SIGTERM; then they end with what they have");
  command.add_option("--threads", server.engine.threads, "0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

#endif

}  // namespace

void add_serve(CLI::App& app, [[maybe_unused]] Program& program) {
  auto* command = app.add_subcommand("serve", kMeaning);
#ifdef LEEWAY_SERVER
  auto options = std::make_shared<Options>();
  add_options(*command, options);
  command->callback([options, &program] { program.exit_code = serve(*options); });
#else
  command->allow_extras();
  command->callback([] {
    throw Error(
        "serve: this build has no server; install libevent-dev and prometheus-cpp-dev and build "
        "again (scripts/setup does both)");
  });
#endif
}

}  // namespace leeway
