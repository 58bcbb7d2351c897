// Reads [trainer.loss]: the preset, its keys, and what of the file another preset on the command
// line leaves behind.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "config/findings.h"
#include "config/given.h"

namespace leeway {

// The keys of all native presets and corrections, and those of the table itself.
std::vector<std::string> native_keys(const Catalog& catalog);

// The loss settings of the document, in order. With loss_only the document has no others.
std::vector<const Given*> loss_part(const Document& document, ConfigScope scope);

// Fills the preset, the settings and the spec of `config`. Returns false if the loss has problems,
// or if keys are to be dropped first; there is no spec then.
bool read_loss(const Catalog& catalog, const Document& document,
               const std::vector<const Given*>& part, Config& config, Findings& findings);

// Every setting of `config`'s loss, with its origin in `part`.
std::vector<EffectiveValue> loss_values(const std::vector<const Given*>& part,
                                        const Config& config);

}  // namespace leeway
