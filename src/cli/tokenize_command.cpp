#include <fmt/format.h>

#include <iostream>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "leeway/error.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

std::string encode_line(const Tokenizer& tokenizer, const rapidjson::Document& json) {
  if (!json.IsString()) throw Error("a line must be a JSON string");
  JsonWriter out;
  out.begin_array();
  for (int32_t id :
       tokenizer.encode({json.GetString(), json.GetStringLength()}, SpecialTokens::recognise)) {
    out.value(static_cast<double>(id));
  }
  out.end_array();
  return out.text();
}

std::string decode_line(const Tokenizer& tokenizer, const rapidjson::Document& json) {
  if (!json.IsArray()) throw Error("a line must be a JSON list of ids");
  std::vector<int32_t> ids;
  for (const auto& item : json.GetArray()) {
    if (!item.IsInt()) throw Error("a line must be a JSON list of ids");
    ids.push_back(item.GetInt());
  }
  // Whole characters only: JSON cannot contain part of one.
  IncrementalDecoder decoder(tokenizer);
  std::string text;
  for (int32_t id : ids) text += decoder.push(id);
  text += decoder.finish();
  JsonWriter out;
  out.value(text);
  return out.text();
}

}  // namespace

void add_tokenize(CLI::App& app, Program&) {
  auto* command = app.add_subcommand("tokenize",
                                     "JSON strings in, id lists out, a line each (or back): "
                                     "special tokens recognised, none added");
  struct Options {
    std::string tokenizer;
    bool decode = false;
  };
  auto options = std::make_shared<Options>();
  command->add_option("--tokenizer", options->tokenizer, "A tokenizer.json, or \"byte\"")
      ->required();
  command->add_flag("--decode", options->decode, "Id lists in, JSON strings out");
  command->callback([options] {
    const auto tokenizer = named_tokenizer(options->tokenizer);
    std::string line;
    for (size_t number = 1; std::getline(std::cin, line); ++number) {
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      try {
        const rapidjson::Document json = parse_json("text", line);
        print((options->decode ? decode_line(*tokenizer, json) : encode_line(*tokenizer, json)) +
              "\n");
      } catch (const OutputError&) {
        throw;
      } catch (const Error& error) {
        throw Error(fmt::format("standard input line {}: {}", number, error.what()));
      }
    }
  });
}

}  // namespace leeway
