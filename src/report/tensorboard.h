// Scalars for TensorBoard, written without it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace leeway {

// One event file `events.out.tfevents.TIME.HOST.PID` in `folder`. Every record is written whole and
// at once, so that TensorBoard can follow a run that goes on and an interrupted run leaves a file
// that reads to its end. One thread at a time. Wall times are seconds since 1970.
class TensorBoardWriter {
 public:
  // Makes the folder where it is missing, and a new file in it; never writes to one that is there.
  // Throws Error naming the path and the reason.
  TensorBoardWriter(const std::string& folder, double wall_time);
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  // One event with all scalars of a step. TensorBoard keeps float32; values that are not finite as
  // such are left out, since it would draw a gap as a point. Throws Error if the disk is full.
  void add(int64_t step, std::span<const std::pair<std::string, double>> scalars, double wall_time);

  const std::string& path() const { return path_; }

 private:
  void write_record(const std::string& event);

  std::string path_;
  int file_ = -1;
};

}  // namespace leeway
