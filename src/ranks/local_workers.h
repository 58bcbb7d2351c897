// The other ranks of a group on one host, as processes of the same program with the same arguments.
//
// They find rank 0 on loopback by the variables that torchrun sets too, write to a file each, do
// not get the terminal's Ctrl-C, and end when the thread that started them does: they are started
// by one that lives as long as the group.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "ranks/options.h"
#include "ranks/sockets.h"

namespace leeway {

struct LocalWorkersOptions {
  int size = 2;                            // ranks in all; this process is rank 0
  std::string program = "/proc/self/exe";  // what the workers run
  std::vector<std::string> arguments;      // without the program's name
  std::string log_folder;  // for rank_1.log ..; made if need be; "": a temporary one, which is
                           // removed if all goes well
};

class LocalWorkers {
 public:
  // Starts them. Throws Error if the system refuses.
  explicit LocalWorkers(LocalWorkersOptions options);
  // Ends those that still run.
  ~LocalWorkers();
  LocalWorkers(const LocalWorkers&) = delete;
  LocalWorkers& operator=(const LocalWorkers&) = delete;

  // For rank 0 to join them, once, while this object exists: it gives up if one of them ends
  // before. The caller sets `version`.
  RanksOptions leader();

  // "rank 2 ended with exit code 2: FILE ends with: .." for the first that ended in any other way
  // than with 0, or "".
  std::string failure();
  // Waits until all have ended, at most `seconds`, and ends those that have not. Returns failure().
  std::string wait(double seconds);

  const std::string& log_folder() const { return options_.log_folder; }
  pid_t process(int rank) const { return workers_[static_cast<size_t>(rank - 1)].process; }

 private:
  struct Worker {
    pid_t process = -1;
    bool running = false;
    int status = 0;
  };

  std::string log_of(int rank) const;
  void start(int rank);
  void look();  // who has ended since
  void end_all();

  LocalWorkersOptions options_;
  bool temporary_ = false;
  std::string job_;
  Descriptor listener_;
  int port_ = 0;
  std::vector<Worker> workers_;  // of rank 1, 2, ..
};

}  // namespace leeway
