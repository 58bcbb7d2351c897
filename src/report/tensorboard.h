// Writes scalars for TensorBoard, without depending on it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace leeway {

// One event file `events.out.tfevents.TIME.HOST.PID` in `folder`. Every record is written in one
// piece, so that TensorBoard can follow a run in progress and an interrupted run leaves a readable
// file. Not thread-safe. Wall times are seconds since 1970.
class TensorBoardWriter {
 public:
  // Creates the folder if it is missing and a new file in it; never writes to an existing file.
  // Throws Error naming the path and the reason.
  TensorBoardWriter(const std::string& folder, double wall_time);
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  // One event with all scalars of a step. TensorBoard stores float32; values that are not finite in
  // float32 are skipped, since it would draw them as points. Throws Error if the disk is full.
  void add(int64_t step, std::span<const std::pair<std::string, double>> scalars, double wall_time);

  const std::string& path() const { return path_; }

 private:
  void write_record(const std::string& event);

  std::string path_;
  int file_ = -1;
};

}  // namespace leeway
