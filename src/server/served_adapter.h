// The adapter that a server has over its model: its name in requests. From any thread.
#pragma once

#include <mutex>
#include <string>
#include <utility>

namespace leeway {

struct AdapterName {
  std::string name, folder;  // empty: there is no adapter
};

class ServedAdapter {
 public:
  explicit ServedAdapter(AdapterName first) : now_(std::move(first)) {}
  AdapterName now() const {
    const std::lock_guard lock(mutex_);
    return now_;
  }
  void set(AdapterName next) {
    const std::lock_guard lock(mutex_);
    now_ = std::move(next);
  }

 private:
  mutable std::mutex mutex_;
  AdapterName now_;
};

}  // namespace leeway
