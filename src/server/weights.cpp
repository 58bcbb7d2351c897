#include "server/weights.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/checked_files.h"
#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "server/api_error.h"

namespace leeway {
namespace {

std::string real_path(const std::string& path) {
  char* resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return "";
  std::string result = resolved;
  std::free(resolved);
  return result;
}

// The files' sums as the trainer writes them beside the weights, where it does.
void check_folder_sums(const std::string& folder, std::optional<PolicyVersion> version) {
  const std::string path = folder + "/checksum.json";
  if (!is_present(path)) return;
  const rapidjson::Document document = parse_json(path, read_file(path));
  const auto files = document.IsObject() ? document.FindMember("files") : document.MemberEnd();
  if (!document.IsObject() || files == document.MemberEnd()) {
    throw Error(path + ": has no \"files\"");
  }
  const auto written = document.FindMember("version");
  if (version && written != document.MemberEnd() && written->value.IsInt() &&
      written->value.GetInt() != *version) {
    throw Error(fmt::format("{}: the weights are of version {}, not of {}", path,
                            written->value.GetInt(), *version));
  }
  check_sums(folder, read_sums(path, files->value));
}

}  // namespace

std::optional<PolicyVersion> version_of_folder(const std::string& folder) {
  std::string_view name = folder;
  while (name.size() > 1 && name.ends_with('/')) name.remove_suffix(1);
  name.remove_prefix(name.rfind('/') + 1);  // npos + 1 == 0
  if (!name.starts_with("step_")) return {};
  name.remove_prefix(5);
  PolicyVersion version = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), version);
  if (error != std::errc() || end != name.data() + name.size() || version < 0) return {};
  return version;
}

std::string folder_below(const std::string& root, const std::string& folder) {
  if (root.empty()) {
    throw ApiError(403,
                   "this server loads no weights: start it with --weights-root DIR, the folder "
                   "below which they are");
  }
  const std::string base = real_path(root), path = real_path(folder);
  // One message for what is elsewhere and for what does not exist, so that a client cannot find out
  // which files exist outside the root.
  if (path.empty() || base.empty() || (path != base && !path.starts_with(base + "/"))) {
    throw ApiError(403, fmt::format("{}: there is no such folder below --weights-root", folder));
  }
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    throw ApiError(400, fmt::format("{}: not a folder", folder));
  }
  return path;
}

WeightUpdates::WeightUpdates(EngineThread& engine, std::shared_ptr<const PolicySnapshot> first,
                             ServedAdapter& adapter, const std::string& root,
                             const WeightSharing* sharing,
                             std::function<void(std::function<void()>)> post)
    : engine_(engine),
      current_(std::move(first)),
      adapter_(adapter),
      root_(root),
      sharing_(sharing),
      post_(std::move(post)) {}

std::shared_ptr<const Parameters> WeightUpdates::model() const {
  std::shared_ptr<const Parameters> host = current_->shared_host();
  return host->base() ? host->base() : host;
}

std::shared_ptr<const PolicySnapshot> WeightUpdates::load(const WeightUpdate& update,
                                                          std::shared_ptr<const Parameters> model,
                                                          PolicyVersion version) {
  std::shared_ptr<const PolicySnapshot> snapshot;
  if (update.folder.empty()) {
    snapshot = std::make_shared<const PolicySnapshot>(std::move(model), version);
  } else {
    check_folder_sums(update.folder, update.version);
    if (is_adapter_folder(update.folder)) {
      snapshot = std::make_shared<const PolicySnapshot>(
          load_adapter(update.folder, std::move(model)), version);
    } else if (update.must_be_adapter) {
      throw Error(update.folder + ": is no adapter: there is no adapter_config.json");
    } else {
      snapshot = std::make_shared<const PolicySnapshot>(load_parameters(update.folder), version);
    }
  }
  snapshot->checksum();  // computed here, and not on the server's thread
  return snapshot;
}

std::shared_ptr<const PolicySnapshot> WeightUpdates::take(const SharedWeights& shared,
                                                          const ModelConfig& config,
                                                          PolicyVersion version) const {
  auto snapshot = sharing_->take(shared, config, version);
  if (const std::string problem = snapshot->not_finite_text(); !problem.empty()) {
    throw Error(problem);
  }
  return snapshot;
}

void WeightUpdates::start(const WeightUpdate& asked,
                          std::function<void(int status, const std::string& message)> done) {
  if (asked.shared && sharing_ == nullptr) {
    throw ApiError(403,
                   "this server takes no weights from a GPU's memory: start it with "
                   "--device-weights");
  }
  WeightUpdate update = asked;
  if (!update.folder.empty()) update.folder = folder_below(root_, asked.folder);
  if (busy_) throw ApiError(503, "other weights are being loaded: try again when they are");
  if (!update.version && !update.folder.empty()) {
    update.version = version_of_folder(update.folder);
  }
  const PolicyVersion version = update.version.value_or(current_->version() + 1);
  busy_ = true;
  // Runs on the worker's thread or the engine's, and there may outlive this object; what it posts
  // does not.
  const auto finish = [this, update, post = post_, done = std::move(done)](
                          int status, const std::string& message,
                          std::shared_ptr<const PolicySnapshot> weights) {
    post([this, update, done, status, message, weights = std::move(weights)] {
      busy_ = false;
      if (status == 200) {
        current_ = weights;
        const std::string& name = update.adapter_name.empty() ? update.folder : update.adapter_name;
        const bool is_adapter = !update.shared && weights->host().lora() != nullptr;
        adapter_.set(is_adapter ? AdapterName{name, update.folder} : AdapterName{});
      }
      done(status, message);
    });
  };
  worker_.post([this, update, config = current_->config(),
                model = update.shared ? nullptr : model(), version, finish] {
    std::shared_ptr<const PolicySnapshot> weights;
    try {
      weights =
          update.shared ? take(*update.shared, config, version) : load(update, model, version);
    } catch (const Error& error) {
      return finish(400, error.what(), nullptr);
    } catch (const std::exception& error) {
      return finish(500, error.what(), nullptr);
    }
    engine_.update_weights(weights, [finish, weights](const std::string& failure) {
      finish(failure.empty() ? 200 : 400, failure, weights);
    });
  });
}

}  // namespace leeway
