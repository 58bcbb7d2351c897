// What makes two folders the same run: an id drawn when it began, the configuration it may not
// change, and the content of the files it reads.
//
//   RUN/identity.json    {"format": 1, "run_id": "..", "job": "train", "config_hashes": [..],
//                         "data": {"sft.data": {"path": "..", "bytes": n, "crc32c": n}, ..}}
//
// Each checkpoint's manifest carries the id and both hashes, so that a step of another run, of
// another configuration or of other data is not taken for one of this run. Run folders without
// the file are older than it and are resumed without these comparisons.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"

namespace leeway {

// Whether a run may continue with another value of this key: neither what was trained so far nor
// what is trained from the same state depends on it. This includes the numbers of steps; whether
// they are at least those already done is checked elsewhere, against the checkpoint.
bool may_change(const std::string& key);
// Whether a run that goes on may have another value of it: these too, and what decides how failures
// are met and how programs are started, with which other rollouts may fail.
bool may_change_on_resume(const std::string& key);

// Whether the key names a file or a folder whose content is checksummed.
bool names_data(const std::string& key);

// CRC-32C over the keys that must not change, sorted by name, without the paths of data files,
// which are compared by content. `only_given` omits defaults that the file does not mention, so
// that a run's config.toml keeps its hash when a later version has more keys.
uint32_t configuration_hash(const Config& config, bool only_given);

// The content of a file, or of a model folder: its weights, config.json and tokenizer.json.
struct DataSum {
  std::string path;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
};

struct RunIdentity {
  std::string run_id;  // 32 hexadecimal digits
  std::string job;     // "train" or "sft"
  // Of the run's configurations, one for each time it continued with other settings; the last is
  // the current one.
  std::vector<uint32_t> config_hashes;
  std::map<std::string, DataSum> data;  // by key

  uint32_t data_hash() const;
};

// Data that the configuration reads, by key: data of environments and demonstrations, model,
// tokenizer, reference, teacher. Throws Error if something cannot be read.
std::map<std::string, DataSum> data_sums(const Config& config);

// With a new id.
RunIdentity new_identity(const Config& config, const std::string& job);

void write_identity(const std::string& run_folder, const RunIdentity& identity);
// Returns nothing if the folder has none. Throws Error if it cannot be read.
std::optional<RunIdentity> read_identity(const std::string& run_folder);

// Throws Error naming the first file of `now` whose content differs from that of the run.
void refuse_other_data(const std::string& run_folder, const RunIdentity& identity,
                       const std::map<std::string, DataSum>& now);

}  // namespace leeway
