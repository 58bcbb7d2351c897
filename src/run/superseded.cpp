#include "run/superseded.h"

#include <fmt/format.h>

#include <filesystem>

#include "base/files.h"
#include "leeway/error.h"

namespace leeway {

namespace fs = std::filesystem;

std::string Superseded::place_of(const std::string& name) {
  std::error_code error;
  for (int k = 1; folder_.empty(); ++k) {
    const std::string folder = fmt::format("{}/superseded_{}", run_, k);
    if (fs::create_directory(folder, error)) folder_ = folder;
    if (error && error != std::errc::file_exists) {
      throw Error(fmt::format("{}: cannot create: {}", folder, error.message()));
    }
  }
  const std::string place = folder_ + "/" + name;
  fs::create_directories(fs::path(place).parent_path(), error);
  if (error) throw Error(fmt::format("{}: cannot create: {}", place, error.message()));
  return place;
}

void Superseded::move(const std::string& name) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(run_ + "/" + name, error))) return;
  for (fs::path parent = fs::path(name).parent_path(); !parent.empty();
       parent = parent.parent_path()) {
    if (!fs::is_symlink(fs::path(run_) / parent, error)) continue;
    left_.push_back(name);
    return;
  }
  const std::string place = place_of(name);
  fs::rename(run_ + "/" + name, place, error);
  if (error) throw Error(fmt::format("{}/{}: cannot move: {}", run_, name, error.message()));
}

void Superseded::keep(const std::string& name, const std::string& lines) {
  write_file_atomically(place_of(name), lines);
}

}  // namespace leeway
