// Configuration keys of other code bases beside ours: what an unknown key may have been meant to
// be, and the table of docs/migration.md.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

struct ForeignKey {
  const char* code_base;  // "verl"
  const char* key;        // as it is written there: "actor_rollout_ref.actor.clip_ratio"
  // Full names of our keys that set the same thing; none: we have no such setting, and `note` says
  // why, or what to do instead.
  std::vector<const char*> ours;
  const char* note;  // what differs; may be empty if `ours` is not
};

// By code base, in the order of docs/migration.md.
std::span<const ForeignKey> foreign_keys();

// What an unknown key is called elsewhere and here, in words: "max_async_level is prime-rl's
// orchestrator.max_async_level; here orchestrator.max_off_policy_steps". `name` is its full name
// ("trainer.loss.kl_coef"). Empty: no code base in the table has it.
std::string foreign_hint(std::string_view name);
// Whether some code base has a key of this whole name, tables included, so that no other reading of
// it is as likely.
bool is_foreign_path(std::string_view name);

// Whether `table` ("actor_rollout_ref") is a table of another code base's keys.
bool is_foreign_table(std::string_view table);

// The table of docs/migration.md, from its first marker comment to its last.
std::string migration_markdown();

}  // namespace leeway
