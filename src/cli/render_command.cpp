#include <fmt/format.h>

#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "leeway/error.h"
#include "model/model_config.h"
#include "run/configured_renderer.h"
#include "text/messages_json.h"

namespace leeway {
namespace {

// An object with "messages", or the list of messages alone.
RenderRequest read_request(const std::string& file) {
  const std::string json = read_file(file);
  const size_t first = json.find_first_not_of(" \t\r\n");
  if (first == std::string::npos || json[first] != '[') return read_render_request(file, json);
  return {read_messages(file, json), {}};
}

}  // namespace

void add_render(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "render",
      "A conversation as the model's chat template writes it: text, token ids, loss mask");
  struct Options {
    RendererConfig renderer;
    std::string config, input, tokenizer, model;
  };
  auto options = std::make_shared<Options>();
  auto* name =
      command->add_option("--renderer", options->renderer.name,
                          fmt::format("One of {}, or auto: by the chat template of --model",
                                      fmt::join(renderer_names(), ", ")));
  auto* from_config = command
                          ->add_option("--config", options->config,
                                       "A TOML file; its [orchestrator.renderer] is used")
                          ->excludes(name);
  command
      ->add_option("--model", options->model, "A model folder, whose chat template is found (auto)")
      ->excludes(from_config);
  command->add_option("--input", options->input, "Messages as JSON; see docs/formats.md")
      ->required();
  command->add_option("--tokenizer", options->tokenizer,
                      "A tokenizer.json, or \"byte\"; adds ids and mask to the output");
  command
      ->add_flag("--preserve-all-thinking", options->renderer.preserve_all_thinking,
                 "Keep past thinking always")
      ->excludes(from_config);
  command
      ->add_flag("--preserve-thinking-between-tool-calls",
                 options->renderer.preserve_thinking_between_tool_calls,
                 "Keep it after the last user message if a tool message follows that")
      ->excludes(from_config);
  command->callback([&program, options] {
    RendererConfig renderer = options->renderer;
    std::string model = options->model;
    if (!options->config.empty()) {
      const Config config = parse_config(program.catalog, options->config,
                                         read_file(options->config), {}, ConfigScope::whole);
      if (config.renderer.name.empty()) {
        throw Error(fmt::format("{}: has no [orchestrator.renderer] with a name", options->config));
      }
      renderer = config.renderer;
      model = config.run.model.path;
    } else if (renderer.name.empty()) {
      if (model.empty()) throw Error("render: give --renderer, --model or --config");
      renderer.name = "auto";
    } else if (renderer.name == "auto" && model.empty()) {
      throw Error("render: --renderer auto needs --model, the folder whose chat template decides");
    } else if (renderer.name != "auto" && !model.empty()) {
      throw Error(fmt::format("render: --model has no effect with --renderer {}; leave it out",
                              renderer.name));
    }
    if (!model.empty()) check_model_folder("--model " + model, model);
    renderer = with_found_name(std::move(renderer), model);
    std::unique_ptr<Tokenizer> tokenizer;
    if (!options->tokenizer.empty()) tokenizer = named_tokenizer(options->tokenizer);
    const auto made = make_configured_renderer(renderer, tokenizer.get());
    const RenderRequest request = read_request(options->input);
    JsonWriter json;
    json.begin_object();
    try {
      json.key("text").value(made->render_text(request.messages, request.options));
      if (tokenizer != nullptr) {
        const Rendered rendered = made->render(request.messages, request.options);
        json.key("ids").begin_array();
        for (int32_t id : rendered.ids) json.value(static_cast<double>(id));
        json.end_array().key("mask").begin_array();
        for (uint8_t m : rendered.loss_mask) json.value(static_cast<double>(m));
        json.end_array();
      }
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", options->input, error.what()));
    }
    json.end_object();
    print(json.text() + "\n");
  });
}

}  // namespace leeway
