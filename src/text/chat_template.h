// Which renderer a model folder's chat template is.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// The name of the renderer for the model in `model_folder`, by the text of its chat template:
// chat_template.jinja, else `chat_template` of tokenizer_config.json (text, or a list of
// {name, template}, of which "default" is taken). Without a template, by `model_type` of
// config.json. A template is recognised if its whole text is a published one whose bytes a renderer
// is known to write.
//
// Throws Error for any other template, with the nearest renderer, found by tokens, tags and
// sentences, and what is different; for a file that holds no template; and for a folder that says
// nothing about its chat format.
std::string renderer_name_for(const std::string& model_folder);

// Whether a model folder has a chat template, known or not. Throws Error for a file that cannot be
// read.
bool has_chat_template(const std::string& model_folder);

// The same as renderer_name_for for the text of a template; `where` is its place, for messages.
std::string renderer_name_of_template(const std::string& where, std::string_view chat_template);

}  // namespace leeway
