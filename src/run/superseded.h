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

  // Moves RUN/name, if it exists: a file, a folder, or a symbolic link, which is moved itself. What
  // is behind a link, as in a `weights/` that points to another disk, stays where it is, and `left`
  // lists it.
  void move(const std::string& name);
  // Keeps lines that are about to be removed from RUN/name.
  void keep(const std::string& name, const std::string& lines);

  bool empty() const { return folder_.empty(); }
  const std::string& folder() const { return folder_; }
  // Names that were not moved because of a link.
  const std::vector<std::string>& left() const { return left_; }

 private:
  std::string place_of(const std::string& name);

  std::string run_, folder_;
  std::vector<std::string> left_;
};

}  // namespace leeway
