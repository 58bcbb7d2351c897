// A comparison of presets on a batch, as `leeway loss compare` prints it.
#pragma once

#include <string>

#include "core/compare.h"
#include "run/batch_files.h"

namespace leeway {

// `batch_name` is what people know the batch by. The JSON is what the page of src/report shows.
std::string compare_json(const std::string& batch_name, const BatchFile& file,
                         const Comparison& comparison);
std::string compare_text(const std::string& batch_name, const BatchFile& file,
                         const Comparison& comparison);

}  // namespace leeway
