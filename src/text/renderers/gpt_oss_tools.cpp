#include "text/renderers/gpt_oss_tools.h"

#include <fmt/format.h>

#include <algorithm>

#include "leeway/error.h"
#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

// The template's own line breaks and indentation reach its output at these two places.
constexpr std::string_view kPropertyIndent = "\n                ";
constexpr std::string_view kVariantIndent = "                    ";

[[noreturn]] void wrong(const std::string& where, const std::string& what) {
  throw Error(fmt::format("{}: {} (renderer gpt-oss)", where, what));
}

// The member if it is there and Python takes it for true.
const JsonValue* given(const JsonValue& object, std::string_view key) {
  const JsonValue* member = object.find(key);
  return member && member->truthy() ? member : nullptr;
}

const std::string& text_of(const JsonValue& object, std::string_view key,
                           const std::string& where) {
  const JsonValue* member = object.find(key);
  if (!member) wrong(where, fmt::format("the template needs a {}", key));
  if (!member->is(Kind::string)) {
    wrong(where, fmt::format("{} must be a string, not {}", key, name_of(member->kind)));
  }
  return member->text;
}

const JsonValue& of_kind(const JsonValue& member, Kind kind, const std::string& where) {
  if (!member.is(kind)) {
    wrong(where, fmt::format("must be {}, not {}", name_of(kind), name_of(member.kind)));
  }
  return member;
}

std::string joined(const std::vector<JsonValue>& items, std::string_view separator) {
  std::string text;
  for (const JsonValue& item : items) {
    if (&item != &items.front()) text += separator;
    text += to_python_repr(item);
  }
  return text;
}

bool requires_name(const JsonValue& schema, const std::string& name, const std::string& where) {
  const JsonValue* required = given(schema, "required");
  if (!required) return false;
  const auto& names = of_kind(*required, Kind::array, where + ".required").items;
  return std::any_of(names.begin(), names.end(), [&](const JsonValue& listed) {
    return listed.is(Kind::string) && listed.text == name;
  });
}

size_t characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string type_of(const JsonValue& schema, const std::string& where);

std::string array_type(const JsonValue& schema, const std::string& where) {
  std::string type = "any[]";
  if (const JsonValue* items = given(schema, "items")) {
    const JsonValue* named = items->find("type");
    const std::string_view name =
        named && named->is(Kind::string) ? std::string_view(named->text) : std::string_view();
    if (name == "string" || name == "boolean") {
      type = fmt::format("{}[]", name);
    } else if (name == "number" || name == "integer") {
      type = "number[]";
    } else {
      const std::string inner = type_of(*items, where + ".items");
      if (inner != "object | object" && characters(inner) <= 50) type = inner + "[]";
    }
  }
  return given(schema, "nullable") ? type + " | null" : type;
}

// Variants in a row, each with its description and default behind it.
std::string variants(const JsonValue& one_of, const std::string& where) {
  const std::string place = where + ".oneOf";
  std::string text;
  for (const JsonValue& variant : of_kind(one_of, Kind::array, place).items) {
    text += type_of(variant, place);
    if (given(variant, "description")) text += "// " + text_of(variant, "description", place);
    if (const JsonValue* value = variant.find("default")) {
      text += fmt::format("{}// default: {}", kVariantIndent, to_json(*value));
    }
    if (&variant != &one_of.items.back()) text += " | \n";
  }
  return text;
}

std::string object_type(const JsonValue& schema, const std::string& where) {
  const JsonValue* properties = given(schema, "properties");
  if (!properties) return "object";
  std::string text = "{\n";
  for (const auto& [name, inner] :
       of_kind(*properties, Kind::object, where + ".properties").members) {
    if (text.size() > 2) text += ", ";
    text += name + (requires_name(schema, name, where) ? "" : "?") + ": ";
    text += kPropertyIndent;
    text += type_of(inner, where + "." + name);
  }
  return text + "}";
}

std::string type_of(const JsonValue& schema, const std::string& where) {
  const JsonValue* type = schema.find("type");
  const bool is_list = type && type->is(Kind::array) && !type->items.empty();
  const std::string_view name =
      type && type->is(Kind::string) ? std::string_view(type->text) : std::string_view();
  if (name == "array") return array_type(schema, where);
  if (is_list) return joined(type->items, " | ");
  if (const JsonValue* one_of = given(schema, "oneOf")) return variants(*one_of, where);
  if (name == "string") {
    if (const JsonValue* choices = given(schema, "enum")) {
      const auto& items = of_kind(*choices, Kind::array, where + ".enum").items;
      return fmt::format("\"{}\"", joined(items, "\" | \""));
    }
    return given(schema, "nullable") ? "string | null" : "string";
  }
  if (name == "number" || name == "integer") return "number";
  if (name == "boolean") return "boolean";
  if (name == "object") return object_type(schema, where);
  return "any";
}

std::string parameter(const JsonValue& schema, bool required, const std::string& name,
                      const std::string& where) {
  std::string text;
  if (given(schema, "description")) {
    text += fmt::format("// {}\n", text_of(schema, "description", where));
  }
  text += fmt::format("{}{}: {}", name, required ? "" : "?", type_of(schema, where));
  if (const JsonValue* value = schema.find("default")) {
    if (given(schema, "enum")) {
      text += ", // default: " + text_of(schema, "default", where);
    } else if (given(schema, "oneOf")) {
      text += "// default: " + text_of(schema, "default", where);
    } else {
      text += ", // default: " + to_json(*value);
    }
  }
  return text + ",\n";
}

}  // namespace

std::string typescript_namespace(const std::vector<JsonValue>& tools) {
  std::string text = "## functions\n\nnamespace functions {\n\n";
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string where = fmt::format("tools[{}].function", i);
    const JsonValue* function = tools[i].find("function");
    if (!function) wrong(fmt::format("tools[{}]", i), "the template needs a function in it");
    text += fmt::format("// {}\ntype {} = ", text_of(*function, "description", where),
                        text_of(*function, "name", where));
    const JsonValue* parameters = given(*function, "parameters");
    const JsonValue* properties = parameters ? given(*parameters, "properties") : nullptr;
    if (!properties) {
      text += "() => any;\n\n";
      continue;
    }
    text += "(_: {\n";
    const std::string place = where + ".parameters";
    for (const auto& [name, schema] : of_kind(*properties, Kind::object, place).members) {
      text += parameter(schema, requires_name(*parameters, name, place), name, place + "." + name);
    }
    text += "}) => any;\n\n";
  }
  return text + "} // namespace functions";
}

}  // namespace leeway
