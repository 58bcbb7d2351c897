// Folders and what lies in them, by the system's own calls. PyTorch's libraries export parts of an
// older std::filesystem, and what is linked with them may be bound to those instead of to the
// compiler's own: code that such a library or program contains uses these functions.
#pragma once

#include <string>
#include <vector>

namespace leeway {

// Whether something has this name; a dead link counts, as opening it says what is wrong.
bool path_exists(const std::string& path);

// Makes a folder with those above it; one that is there already is fine. Throws Error naming the
// path and the reason.
void make_folders(const std::string& path);

// Names of a folder's entries, sorted. Throws Error naming the path and the reason.
std::vector<std::string> folder_names(const std::string& path);

// Removes a file, a link or a folder with all it holds; links are removed, never followed. What is
// not there is fine. Throws Error naming the path that is left and the reason.
void remove_tree(const std::string& path);

}  // namespace leeway
