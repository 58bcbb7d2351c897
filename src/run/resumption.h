// What a run folder contains that is to be resumed.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "run/checkpoints.h"
#include "run/folder_hold.h"
#include "run/run_end.h"
#include "run/run_identity.h"

namespace leeway {

struct Resumption {
  std::string folder;
  FolderHold hold;                      // taken before anything is read
  std::optional<RunIdentity> identity;  // nothing if the folder is older than identities
  std::optional<RunEnd> end;            // nothing if the run was killed, or is older than end.json
  std::optional<Checkpoint> from;       // the newest complete checkpoint
  std::vector<std::string> notes;       // what was skipped, and what has changed

  bool supervised() const { return identity && identity->job == "sft"; }  // `leeway sft`
};

// Inspects a run folder without changing anything. `check` throws Error for a checkpoint that is
// complete but unusable. Throws Error if another process is working on the run.
Resumption look_at_run(const std::string& folder,
                       const std::function<void(const Checkpoint&)>& check);

// Whether there is nothing left to do: the run has finished `max_steps` steps, and its results
// exist or cannot be recreated. The latter, and unreadable checkpoints, are reported in `notes`.
bool has_finished(Resumption& resumption, int64_t max_steps);

// Throws Error with the remedy if the run cannot continue to `max_steps` steps: there is no
// checkpoint, or it is already past them.
void refuse_without_checkpoint(const Resumption& resumption);
void refuse_fewer_steps(const Resumption& resumption, const char* key, int64_t max_steps);

}  // namespace leeway
