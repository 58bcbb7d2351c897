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
                             const std::string& root, const WeightSharing* sharing,
                             std::function<void(std::function<void()>)> post)
    : engine_(engine),
      current_(std::move(first)),
      root_(root),
      sharing_(sharing),
      post_(std::move(post)) {}

std::shared_ptr<const PolicySnapshot> WeightUpdates::load(const std::string& folder,
                                                          std::optional<PolicyVersion> given,
                                                          PolicyVersion version) const {
  check_folder_sums(folder, given);
  auto snapshot = std::make_shared<const PolicySnapshot>(load_parameters(folder), version);
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

void WeightUpdates::start(const WeightUpdate& update,
                          std::function<void(int status, const std::string& message)> done) {
  if (update.shared && sharing_ == nullptr) {
    throw ApiError(403,
                   "this server takes no weights from a GPU's memory: start it with "
                   "--device-weights");
  }
  const std::string folder = update.shared ? "" : folder_below(root_, update.folder);
  if (busy_) throw ApiError(503, "other weights are being loaded: try again when they are");
  std::optional<PolicyVersion> given = update.version;
  if (!given && !update.shared) given = version_of_folder(folder);
  const PolicyVersion version = given.value_or(current_->version() + 1);
  busy_ = true;
  // Runs on the worker's thread or the engine's, and there may outlive this object; what it posts
  // does not.
  const auto finish = [this, post = post_, done = std::move(done)](
                          int status, const std::string& message,
                          std::shared_ptr<const PolicySnapshot> weights) {
    post([this, done, status, message, weights = std::move(weights)] {
      busy_ = false;
      if (status == 200) current_ = weights;
      done(status, message);
    });
  };
  worker_.post(
      [this, folder, shared = update.shared, config = current_->config(), given, version, finish] {
        std::shared_ptr<const PolicySnapshot> weights;
        try {
          weights = shared ? take(*shared, config, version) : load(folder, given, version);
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
