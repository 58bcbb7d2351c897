// Loading weights, by the names that vLLM, prime-rl and SGLang have for it.
#include <fmt/format.h>

#include <charconv>
#include <limits>

#include "leeway/error.h"
#include "server/api_error.h"
#include "server/routes.h"

namespace leeway {

// SGLang sends versions as text.
std::optional<PolicyVersion> version_in(const JsonFields& fields) {
  const rapidjson::Value* value = fields.find("weight_version");
  if (value == nullptr) return {};
  if (!value->IsString()) {
    return static_cast<PolicyVersion>(
        *fields.integer("weight_version", 0, std::numeric_limits<PolicyVersion>::max()));
  }
  const std::string text = *fields.text("weight_version");
  PolicyVersion version = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), version);
  if (error != std::errc() || end != text.data() + text.size() || version < 0) {
    fields.refuse("weight_version", "must be a number from 0 on: tokens are stamped with it");
  }
  return version;
}

void start_update(ServerContext& context, const Exchange& exchange, const WeightUpdate& update,
                  bool resume) {
  context.check_ready();
  context.weights.start(update, [&context, exchange, resume](int code, const std::string& message) {
    if (code != 200) {
      return exchange->respond({.status = code, .body = error_json(code, message)});
    }
    const PolicySnapshot& weights = context.weights.current();
    const auto body = [version = weights.version(), checksum = weights.checksum()] {
      return fmt::format(R"({{"success": true, "status": "ok", "message": "loaded version {0}", )"
                         R"("leeway": {{"version": {0}, "checksum": "{1:08x}"}}}})",
                         version, checksum);
    };
    if (!resume) return exchange->respond({.body = body()});
    context.engine.resume(answer_when_done(context, exchange, body));
  });
}

namespace {

std::optional<std::string> folder_in(const JsonFields& fields) {
  for (const char* key : {"weight_dir", "model_path", "weights_path", "path"}) {
    if (fields.has(key)) return fields.text(key);
  }
  return {};
}

[[noreturn]] void refuse_no_folder(const char* key) {
  throw ApiError(400, fmt::format("{} is missing: the folder with the weights", key), key);
}

// As shared_weights_json writes it.
SharedWeights shared_in(const JsonFields& fields, const std::optional<WeightSharing>& sharing) {
  const auto text = [&](const char* key) {
    const std::optional<std::string> found = fields.text(key);
    if (!found) fields.refuse(key, "is missing");
    return *found;
  };
  const auto natural = [&](const char* key) {
    const auto found = fields.integer(key, 0, int64_t{1} << 50);
    if (!found) fields.refuse(key, "is missing");
    return *found;
  };
  const auto checked = [&](const char* key, const auto& read) {
    try {
      return read(text(key));
    } catch (const Error& error) {
      fields.refuse(key, error.what());
    }
  };
  SharedWeights shared;
  shared.device = text("device");
  if (sharing && shared.device != sharing->device) {
    fields.refuse("device", fmt::format("is another GPU than this server's, {}", sharing->device));
  }
  shared.handle = checked("handle", handle_bytes);
  shared.offset = natural("offset");
  shared.count = natural("count");
  shared.layout = checked("layout", hexadecimal_sum);
  shared.checksum = checked("checksum", hexadecimal_sum);
  return shared;
}

// {"weight_dir"}, {"update_info": {..}} or {"cuda_ipc": {..}}.
void update_weights(ServerContext& context, const Exchange& exchange) {
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields outer(body, "");
  const std::optional<JsonFields> info = outer.object("update_info");
  const JsonFields& fields = info ? *info : outer;
  WeightUpdate update;
  update.version = version_in(fields);
  if (!update.version) update.version = version_in(outer);
  const std::optional<std::string> folder = folder_in(fields);
  if (const std::optional<JsonFields> memory = outer.object("cuda_ipc")) {
    if (folder) throw ApiError(400, "cuda_ipc and a folder: one of them", "cuda_ipc");
    update.shared = shared_in(*memory, context.model.options.sharing);
  } else {
    if (!folder) refuse_no_folder("weight_dir");
    update.folder = *folder;
  }
  start_update(context, exchange, update, false);
}

void update_from_disk(ServerContext& context, const Exchange& exchange) {
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  const std::optional<std::string> folder = fields.text("model_path");
  if (!folder) refuse_no_folder("model_path");
  fields.flag("flush_cache");
  const bool abort = fields.flag("abort_all_requests").value_or(false);
  const bool keep_pause = fields.flag("keep_pause").value_or(true);
  const std::optional<PolicyVersion> version = version_in(fields);
  start_update(context, exchange, {.folder = *folder, .version = version}, !keep_pause);
  if (abort) context.engine.cancel_all();
}

void collective_rpc(ServerContext& context, const Exchange& exchange) {
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  const std::string method = fields.text("method").value_or("");
  if (method != "reload_weights") {
    throw ApiError(400, fmt::format("method \"{}\": only reload_weights is known", method),
                   "method");
  }
  const std::optional<JsonFields> arguments = fields.object("kwargs");
  const std::optional<std::string> folder =
      arguments ? arguments->text("weights_path") : std::nullopt;
  if (!folder) refuse_no_folder("kwargs.weights_path");
  start_update(context, exchange, {.folder = *folder, .version = version_in(*arguments)});
}

}  // namespace

void add_weight_routes(RouteTable& routes) {
  routes.add("POST", "/update_weights", update_weights);
  routes.add("POST", "/update_weights_from_disk", update_from_disk);
  routes.add("POST", "/collective_rpc", collective_rpc);
}

}  // namespace leeway
