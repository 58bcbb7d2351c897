// What a run folder that is to go on holds.
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
  std::optional<RunIdentity> identity;  // nothing: the folder is older than identities
  std::optional<RunEnd> end;            // nothing: the run was killed, or is older than end.json
  std::optional<Checkpoint> from;       // the newest checkpoint that is whole
  std::vector<std::string> notes;       // what was passed over, and what is new

  bool supervised() const { return identity && identity->job == "sft"; }  // `leeway sft`
};

// Looks at a run folder and changes nothing. `check` throws Error for a checkpoint that is whole
// and of no use all the same. Throws Error where another process is at work on the run.
Resumption look_at_run(const std::string& folder,
                       const std::function<void(const Checkpoint&)>& check);

// Whether there is nothing left to do: the run has finished `max_steps` steps, and what it made is
// there, or cannot be made again. The second case, and checkpoints that cannot be read, are told in
// `notes`.
bool has_finished(Resumption& resumption, int64_t max_steps);

// Throws Error, with the remedy, where the run cannot go on to `max_steps` steps: there is no
// checkpoint, or it is past them already.
void refuse_without_checkpoint(const Resumption& resumption);
void refuse_fewer_steps(const Resumption& resumption, const char* key, int64_t max_steps);

}  // namespace leeway
