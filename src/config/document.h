// From a file's TOML and the command line to a Document.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/findings.h"
#include "config/given.h"
#include "config/toml_text.h"

namespace leeway {

// The value of a node, if it is one of the four kinds.
std::optional<Scalar> scalar_of(const toml::node& node);
// What it is if it is none: "a list", "a table", "a date or time".
const char* kind_of(const toml::node& node);
// A node in few words, for messages.
std::string node_text(const toml::node& node);

// What to write instead of an unknown key of `section`, which stands under `path`; nullptr: of no
// table that is known.
std::string remedy(const Known& known, const Section* section, const std::string& path,
                   const std::string& key);

// Where a problem of a file stands, and those of the command line after it.
uint64_t order_of(const toml::source_region& region);
inline constexpr uint64_t kOrderOfUnset = uint64_t{1} << 60;
inline constexpr uint64_t kOrderOfSet = uint64_t{1} << 61;

// Takes out of a file's tree what --unset names: "sft", "trainer.loss.kl_tau", "environment.1" (in
// the file's own numbers), or "environment.weight" where there is one. With loss_only, a key
// without a path is one of the loss. What is not there is a problem, with the nearest name.
void remove_unset(toml::table& root, const std::string& file, std::vector<std::string> unsets,
                  ConfigScope scope, Problems& problems);

// Reads a file's tree. With loss_only, nothing but [trainer.loss] is looked at. Problems are a
// table or key that is not known, and a table or list where a value belongs.
Document read_document(const Known& known, const std::string& name, const toml::table& root,
                       ConfigScope scope, Problems& problems);

// Adds one --set. With loss_only, a key without a path is one of the loss. Throws Error.
void add_assignment(const Known& known, const std::string& assignment, ConfigScope scope,
                    uint64_t order, Document& document);

}  // namespace leeway
