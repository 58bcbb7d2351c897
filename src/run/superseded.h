// What a resumed run writes again is moved aside, never deleted.
#pragma once

#include <string>
#include <vector>

namespace leeway {

// RUN/superseded_K, K = 1, 2, ..: made when the first thing goes there, with the names that things
// had in the run folder. Every method throws Error (a full disk); what was not moved is then still
// in its place.
class Superseded {
 public:
  explicit Superseded(std::string run_folder) : run_(std::move(run_folder)) {}

  // RUN/name, if it is there: a file, a folder, or a symbolic link, which is moved itself. What
  // lies behind a link, as in a `weights/` that leads to another disk, belongs to another place: it
  // stays, and `left` says so.
  void move(const std::string& name);
  // Lines that are about to be taken out of RUN/name.
  void keep(const std::string& name, const std::string& lines);

  bool empty() const { return folder_.empty(); }
  const std::string& folder() const { return folder_; }
  // Names that a link kept from being moved.
  const std::vector<std::string>& left() const { return left_; }

 private:
  std::string place_of(const std::string& name);

  std::string run_, folder_;
  std::vector<std::string> left_;
};

}  // namespace leeway
