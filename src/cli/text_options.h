// The options of commands that read and write a model's text.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>

#include "generate/model_text.h"
#include "text/renderer.h"

namespace leeway {

// --tokenizer and --renderer. `options` must outlive the parsing.
inline void add_text_options(CLI::App& command, ModelTextOptions& options) {
  command.add_option("--tokenizer", options.tokenizer,
                     "A tokenizer.json, or \"byte\", in place of the folder's");
  command
      .add_option("--renderer", options.renderer,
                  fmt::format("The chat format in place of the folder's (auto): {}",
                              fmt::join(renderer_names(), ", ")))
      ->type_name("NAME");
}

// --adapter. `folder` must outlive the parsing.
inline void add_adapter_option(CLI::App& command, std::string& folder) {
  command.add_option("--adapter", folder,
                     "A LoRA adapter over the model, as PEFT saves it (docs/lora.md)");
}

}  // namespace leeway
