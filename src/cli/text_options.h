// The options of commands that read and write a model's text.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>

#include "base/folders.h"
#include "cli/output.h"
#include "generate/model_text.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
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

// MODEL, also as --model. `folder` must outlive the parsing.
inline void add_model_option(CLI::App& command, std::string& folder) {
  const auto set = [&folder](const std::string& name) {
    if (!folder.empty()) throw Error("MODEL and --model name a model each; give one");
    folder = name;
  };
  command.add_option_function<std::string>("model", set,
                                           "Hugging Face folder (Qwen3, Qwen2, Llama)");
  command.add_option_function<std::string>("--model", set, "The same as MODEL")->type_name("MODEL");
}

// Throws Error unless it is the folder of an adapter.
inline void check_adapter_option(const std::string& folder) {
  if (path_exists(folder + "/adapter_config.json")) return;
  throw Error(fmt::format(
      "--adapter {}: {}; give an adapter's folder, such as "
      "RUN/weights/step_200 or one that PEFT saved",
      folder, path_exists(folder) ? "has no adapter_config.json" : "there is no such folder"));
}

// Throws Error unless MODEL, and the adapter where one is named, is a folder here.
inline void check_model_option(const std::string& folder, const std::string& adapter = "") {
  if (folder.empty()) throw Error("MODEL is required: a Hugging Face folder on this disk");
  check_model_folder("MODEL " + folder, folder);
  if (!adapter.empty()) check_adapter_option(adapter);
}

// The model of MODEL and --adapter, with a warning for an adapter that names another base.
inline Parameters load_named_policy(const std::string& folder, const std::string& adapter) {
  const std::string warning = other_base_warning(adapter, folder);
  if (!warning.empty()) warn(warning);
  return load_policy(folder, adapter);
}

// --adapter. `folder` must outlive the parsing.
inline void add_adapter_option(CLI::App& command, std::string& folder) {
  command.add_option("--adapter", folder,
                     "A LoRA adapter over the model, as PEFT saves it (docs/lora.md)");
}

}  // namespace leeway
