// Directory operations on plain system calls. PyTorch's libraries export parts of an older
// std::filesystem, and code linked with them may be bound to those instead of to the compiler's
// own; code that ends up in such a library or program uses these functions instead.
#pragma once

#include <string>
#include <vector>

namespace leeway {

// Whether the name exists. A dangling link counts as existing: opening it reports the problem.
bool path_exists(const std::string& path);

// The path from the root on, without links in it. Throws Error if it does not exist.
std::string absolute_path(const std::string& path);

// Whether it is a folder, or a link to one.
bool is_folder(const std::string& path);

// Whether both names lead to the same file or folder, which exists.
bool same_path(const std::string& a, const std::string& b);

// Creates a folder and its parents; an existing folder is fine. Throws Error naming the path and
// the reason.
void make_folders(const std::string& path);

// Names of a folder's entries, sorted. Throws Error naming the path and the reason.
std::vector<std::string> folder_names(const std::string& path);

// Removes a file, a link or a folder with everything in it. Links are removed, never followed. A
// path that does not exist is fine. Throws Error naming the path that could not be removed and the
// reason.
void remove_tree(const std::string& path);

}  // namespace leeway
