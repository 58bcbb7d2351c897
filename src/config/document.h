// Turns a file's TOML and the command line into a Document.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/findings.h"
#include "config/given.h"
#include "config/toml_text.h"

namespace leeway {

// The value of a node, if it is one of the four scalar kinds or a list of text.
std::optional<Scalar> scalar_of(const toml::node& node);
// The kind of a node that is not a scalar: "a list", "a table", "a date or time".
const char* kind_of(const toml::node& node);
// A short form of a node, for messages.
std::string node_text(const toml::node& node);

// A suggestion for an unknown key of `section`, which is under `path`; nullptr if the table itself
// is unknown.
std::string remedy(const Known& known, const Section* section, const std::string& path,
                   const std::string& key);

// Sort key of a problem: position in the file; problems of the command line come after.
uint64_t order_of(const toml::source_region& region);
inline constexpr uint64_t kOrderOfUnset = uint64_t{1} << 60;
inline constexpr uint64_t kOrderOfSet = uint64_t{1} << 61;

// Removes what --unset names from a file's tree: "sft", "trainer.loss.kl_tau", "environment.1" (in
// the file's own numbering), or "environment.weight" if there is one environment. With loss_only, a
// key without a path is one of the loss. A name that does not exist is a problem, reported with the
// nearest name.
void remove_unset(toml::table& root, const std::string& file, std::vector<std::string> unsets,
                  ConfigScope scope, Problems& problems);

// Reads a file's tree. With loss_only, only [trainer.loss] is read. Unknown tables or keys, and
// tables or lists in place of a value, are problems.
Document read_document(const Known& known, const std::string& name, const toml::table& root,
                       ConfigScope scope, Problems& problems);

// Adds one --set. With loss_only, a key without a path is one of the loss. Throws Error.
void add_assignment(const Known& known, const std::string& assignment, ConfigScope scope,
                    uint64_t order, Document& document);

}  // namespace leeway
