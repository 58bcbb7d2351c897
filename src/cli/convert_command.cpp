#include <fmt/format.h>

#include <chrono>
#include <optional>

#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "cli/choice_option.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/terminal_progress.h"
#include "gguf/convert.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "run/durations.h"

namespace leeway {
namespace {

struct Options {
  std::string input, output;
  ConvertOptions convert;
  bool no_tokenizer = false, json = false;
};

bool names_folder(const std::string& path) {
  if (!is_present(path)) throw Error(fmt::format("{}: No such file or directory", path));
  return is_folder(path);
}

std::string types_text(const Conversion& result) {
  std::vector<std::string> parts;
  for (const auto& [type, count] : result.types) parts.push_back(fmt::format("{} {}", count, type));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string result_json(const Options& options, const Conversion& result, double seconds) {
  JsonWriter json;
  json.begin_object();
  json.key("output").value(options.output);
  json.key("architecture").value(result.architecture);
  json.key("parameters").value(static_cast<double>(result.parameters));
  json.key("types").begin_object();
  for (const auto& [type, count] : result.types) json.key(type).value(static_cast<double>(count));
  json.end_object();
  json.key("bytes").value(static_cast<double>(result.bytes));
  json.key("seconds").value(seconds);
  json.key("warnings").begin_array();
  for (const std::string& warning : result.warnings) json.value(warning);
  json.end_array();
  json.end_object();
  return json.text() + "\n";
}

void run(Options options, bool type_given, bool dtype_given) {
  const bool from_folder = names_folder(options.input);
  const bool to_gguf = options.output.ends_with(".gguf");
  if (from_folder && !to_gguf) {
    throw Error(
        fmt::format("{}: {} is a folder, and a folder becomes a GGUF file: its name must "
                    "end with .gguf",
                    options.output, options.input));
  }
  if (!from_folder && to_gguf) {
    throw Error(
        fmt::format("{}: {} is a GGUF file already; it becomes a folder, whose name does "
                    "not end with .gguf",
                    options.output, options.input));
  }
  if (from_folder && is_adapter_folder(options.input)) {
    throw Error(fmt::format(
        "{}: is a LoRA adapter, a part of a model; put it into its base first: leeway merge BASE "
        "{} FOLDER, then leeway convert FOLDER {}",
        options.input, options.input, options.output));
  }
  if (!from_folder && type_given) throw Error("--type: is for GGUF files; for folders use --dtype");
  if (from_folder && dtype_given) throw Error("--dtype: is for folders; for GGUF files use --type");

  Interrupt interrupt("stopping");
  TerminalProgress progress;
  options.convert.tokenizer = !options.no_tokenizer;
  options.convert.progress = [&](int64_t done, int64_t total) {
    if (interrupt.asked()) throw Error(fmt::format("stopped; {} is not written", options.output));
    constexpr int64_t kMillion = 1'000'000;
    progress.count("convert", "million weights", static_cast<size_t>(done / kMillion),
                   static_cast<size_t>(total / kMillion));
  };
  const auto start = std::chrono::steady_clock::now();
  const Conversion result =
      from_folder ? convert_folder_to_gguf(options.input, options.output, options.convert)
                  : convert_gguf_to_folder(options.input, options.output, options.convert);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const std::string& warning : result.warnings) warn(warning);
  progress.note(fmt::format("{}: {}, {} parameters, {:.1f} MB in {}; in the GGUF file: {}",
                            options.output, result.architecture, result.parameters,
                            static_cast<double>(result.bytes) / 1e6, duration_text(seconds),
                            types_text(result)));
  if (options.json) print(result_json(options, result, seconds));
}

}  // namespace

void add_convert(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "convert",
      "Turns a GGUF file into a Hugging Face folder with weights, config, tokenizer and chat\n"
      "template, or a folder into a GGUF file that llama.cpp serves.");
  auto options = std::make_shared<Options>();
  command->add_option("input", options->input, "A GGUF file (llama, qwen2, qwen3), or a folder")
      ->required()
      ->type_name("PATH");
  command->add_option("output", options->output, "The folder to make, or a file named *.gguf")
      ->required()
      ->type_name("PATH");
  const CLI::Option* type = add_choice(*command, "--type", options->convert.type,
                                       "How a GGUF file stores matrices; vectors are float32");
  const CLI::Option* dtype =
      add_choice(*command, "--dtype", options->convert.dtype,
                 "How a folder stores weights: exact (16-bit ones as they are, others in float32), "
                 "or all rounded to bf16");
  command->add_flag("--no-tokenizer", options->no_tokenizer, "Weights and config alone");
  command->add_flag("--overwrite", options->convert.overwrite,
                    "Replace what an earlier conversion wrote");
  command->add_flag("--json", options->json, "The result as JSON");
  command->callback(
      [options, type, dtype] { run(*options, type->count() > 0, dtype->count() > 0); });
}

}  // namespace leeway
