// Folders whose files are known by length and checksum, so that damage is found and named.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/file_writer.h"
#include "base/json.h"

namespace leeway {

using FileSums = std::map<std::string, FileSum>;  // by name within the folder

// The file is read once, piece by piece. Throws Error naming the path and the reason.
FileSum sum_of_file(const std::string& path);

// {"NAME": {"bytes": n, "crc32c": n}, ..}, as a value in `json`; and back. `name` is that of the
// file which holds it, for the Error that names what is wrong. Names are those of files in the same
// folder, never paths.
void write_sums(JsonWriter& json, const FileSums& sums);
FileSums read_sums(const std::string& name, const rapidjson::Value& files);

// Throws Error naming the first file that is missing or not as its sum says.
void check_sums(const std::string& folder, const FileSums& sums);

// A folder of weights carries its sums as checksums.json, which other programs do not look at.
// Written last: a folder without one is not checked.
void write_checksums(const std::string& folder, const FileSums& sums);
// Throws Error naming the damaged file and the remedy; does nothing where there is no
// checksums.json.
void check_checksums(const std::string& folder);
// Before files of the folder are written anew.
void remove_checksums(const std::string& folder);

// Throws Error with both numbers unless `bytes` and a little more are free where `folder` is, which
// may not exist yet.
void refuse_full_disk(const std::string& folder, uint64_t bytes);

}  // namespace leeway
