// Folders whose files are recorded by length and checksum, so that damage is detected and reported.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/file_writer.h"
#include "base/json.h"

namespace leeway {

using FileSums = std::map<std::string, FileSum>;  // keyed by file name within the folder

// Reads the file in pieces. Throws Error naming the path and the reason.
FileSum sum_of_file(const std::string& path);

// Writes {"NAME": {"bytes": n, "crc32c": n}, ..} as a value in `json`, and reads it back. `name` is
// the file that contains the value, for error messages. The keys are names of files in the same
// folder, never paths.
void write_sums(JsonWriter& json, const FileSums& sums);
FileSums read_sums(const std::string& name, const rapidjson::Value& files);

// Throws Error naming the first file that is missing or does not match its sum.
void check_sums(const std::string& folder, const FileSums& sums);

// Stores the sums of a folder of weights in checksums.json, which other programs ignore. It is
// written last; a folder without it is not checked.
void write_checksums(const std::string& folder, const FileSums& sums);
// Throws Error naming the damaged file and the remedy. Does nothing if there is no checksums.json.
void check_checksums(const std::string& folder);
// Call before files of the folder are rewritten.
void remove_checksums(const std::string& folder);

// Throws Error with both numbers unless the disk of `folder` (which may not exist yet) has room for
// `bytes` plus a small margin.
void refuse_full_disk(const std::string& folder, uint64_t bytes);

}  // namespace leeway
