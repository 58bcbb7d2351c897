// Loading weights into a server that is running.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "model/shared_weights.h"
#include "server/engine_thread.h"
#include "server/served_adapter.h"
#include "server/worker.h"

namespace leeway {

// A folder of a whole model, or of an adapter over the model that is there now.
struct WeightUpdate {
  std::string folder;  // empty: the model that is there now, without its adapter
  std::optional<SharedWeights> shared = {};   // in a GPU's memory, instead of a folder
  std::optional<PolicyVersion> version = {};  // absent: that of the name step_N, else the next
  std::string adapter_name = {};  // in requests; empty: the folder. A whole model has none.
  bool must_be_adapter = false;
};

// On the server's thread, except where it says otherwise.
class WeightUpdates {
 public:
  // `sharing`: null where weights are taken from no memory; must outlive it. `post` runs a function
  // on the server's thread. `adapter` gets the name of the current one.
  WeightUpdates(EngineThread& engine, std::shared_ptr<const PolicySnapshot> first,
                ServedAdapter& adapter, const std::string& root, const WeightSharing* sharing,
                std::function<void(std::function<void()>)> post);

  // The version's number and checksum are there when `done` is called: status 200, or another and
  // the reason. The engine goes on sampling with the old weights until the new ones are loaded, and
  // for good if they are refused. Throws ApiError 403 for a folder that is not below the root and
  // for memory where none is taken, and 503 while another update is under way.
  void start(const WeightUpdate& update,
             std::function<void(int status, const std::string& message)> done);

  const PolicySnapshot& current() const { return *current_; }
  std::shared_ptr<const PolicySnapshot> shared() const { return current_; }

 private:
  // What is below the current adapter, or the current weights where there is none.
  std::shared_ptr<const Parameters> model() const;
  // On the worker's thread. Throws Error.
  static std::shared_ptr<const PolicySnapshot> load(const WeightUpdate& update,
                                                    std::shared_ptr<const Parameters> model,
                                                    PolicyVersion version);
  std::shared_ptr<const PolicySnapshot> take(const SharedWeights& shared, const ModelConfig& config,
                                             PolicyVersion version) const;

  EngineThread& engine_;
  std::shared_ptr<const PolicySnapshot> current_;
  ServedAdapter& adapter_;
  std::string root_;
  const WeightSharing* sharing_;
  std::function<void(std::function<void()>)> post_;
  bool busy_ = false;
  Worker worker_;
};

// N of a last path component step_N.
std::optional<PolicyVersion> version_of_folder(const std::string& folder);

// The folder without links, if it is one below `root`. Throws ApiError 403 and 400.
std::string folder_below(const std::string& root, const std::string& folder);

}  // namespace leeway
