// Which renderer a model folder gets, and what is said where it gets none.
#include "text/chat_template.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "base/rng.h"
#include "base/test_folder.h"
#include "leeway/error.h"
#include "text/renderer.h"
#include "text/renderers/json_value.h"

namespace leeway {
namespace {

// Published texts that are short enough to stand here; those of other families are known by their
// lengths and sums only.
const std::string kChatml =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' "
    "}}{% endif %}";
const std::string kSmollm2 =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n' }}{% endif %}";

// These have what marks a family's template, but are none.
const std::vector<std::pair<std::string, std::string>>& stand_ins() {
  static const std::vector<std::pair<std::string, std::string>> kTemplates = {
      {"qwen2.5",
       "{%- if tools %}{{- '<|im_start|>system\\n' }}{{- 'You are Qwen, created by Alibaba Cloud. "
       "You are a helpful assistant.' }}{{- \"<tools> {\\\"name\\\": <function-name>, "
       "\\\"arguments\\\": <args-json-object>}\" }}{{- '<tool_response>' }}{%- endif %}"},
      {"qwen3",
       "{{- '<|im_start|>' }}{{- '<args-json-object>' }}{%- if message.reasoning_content %}"
       "{%- if loop.index0 > ns.last_query_index %}{{- '<tool_response>' }}{%- if enable_thinking "
       "is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif "
       "%}"},
      {"qwen3.5",
       "{{- '<|im_start|><function=example_function_name><IMPORTANT>' }}{%- if loop.index0 > "
       "ns.last_query_index %}{%- if enable_thinking is defined and enable_thinking is false %}"
       "{{- '<think>' }}"},
      {"qwen3-coder",
       "{% macro render_extra_keys(json_dict, handled_keys) %}{{- \"<|im_start|>system\\nYou are "
       "Qwen, a helpful AI assistant that can interact with a computer to solve tasks.\" }}{{- "
       "\"You have access to the following functions:\\n\\n\" }}"
       "<function=example_function_name>"},
      {"glm4.5",
       "[gMASK]<sop>{%- if tools -%}<|observation|><arg_key>{{ '\\n<think></think>' }}/nothink{% "
       "set _args = tc.arguments %}"},
      {"glm4.6",
       "[gMASK]<sop>{%- if tools -%}<|observation|><arg_key>{{ '\\n<think></think>' }}/nothink{% "
       "set _args = tc.arguments or {} %}"},
      {"llama3",
       "{{- '<|start_header_id|><|eot_id|>' }}{%- if not date_string is defined %}{{- 'Cutting "
       "Knowledge Date: December 2023\\n' }}{{- \"Today Date: \" }}{%- if tools_in_user_message "
       "%}{{- 'Environment: ipython\\n' }}"},
      {"deepseek-v3.1",
       "{%- if not thinking is defined -%}{%- set ns.is_last_user = true "
       "-%}{{'<\xEF\xBD\x9CUser\xEF\xBD\x9C><\xEF\xBD\x9C"
       "Assistant\xEF\xBD\x9C><think></think><\xEF\xBD\x9Ctool\xE2\x96\x81"
       "calls\xE2\x96\x81"
       "begin\xEF\xBD\x9C>"
       "<\xEF\xBD\x9Ctool\xE2\x96\x81output\xE2\x96\x81"
       "begin\xEF\xBD\x9C>'}}{%- if not thinking -%}"},
      {"kimi-k2",
       "{%- if tools -%}\n  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson "
       "}}<|im_end|>\n{%- endif -%}<|im_system|>system<|im_middle|>You are Kimi, an AI assistant "
       "created by Moonshot AI.<|im_end|>\n  {% endif %}<|tool_calls_section_begin|>"},
      {"kimi-k2-thinking",
       "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}{%- set ns = "
       "namespace(last_non_tool_call_assistant_msg=-1) -%}{{ tojson(separators=(',', ':')) }}You "
       "are "
       "Kimi, an AI assistant created by Moonshot AI.<|tool_calls_section_begin|><think></think>"},
      {"gpt-oss",
       "{%- macro render_typescript_type(param_spec) -%}{{- strftime_now(\"%Y-%m-%d\") }}"
       "future_final_message{{- \"<|start|>assistant<|channel|>analysis<|message|>\" "
       "}}<|call|>"},
  };
  return kTemplates;
}

std::string json_text(const std::string& text) { return to_json(std::string_view(text)); }

class ChatTemplate : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& content) const {
    std::ofstream(folder_.path() + "/" + name) << content;
  }
  std::string found() const { return renderer_name_for(folder_.path()); }
  std::string refusal() const {
    try {
      return "found " + found();
    } catch (const Error& error) {
      return error.what();
    }
  }
  void expect_refused(const std::vector<std::string>& parts) const {
    const std::string text = refusal();
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  }

  testing::TestFolder folder_;
};

TEST_F(ChatTemplate, APublishedTextIsFoundHoweverItsLineBreaksAreWritten) {
  for (const auto& [name, text] : {std::pair("chatml", kChatml), std::pair("smollm2", kSmollm2)}) {
    EXPECT_EQ(renderer_name_of_template("template", text), name);
    EXPECT_EQ(renderer_name_of_template("template", text + "\n"), name);
    std::string broken, windows;
    for (size_t i = 0; i < text.size(); ++i) {
      const bool escaped = text[i] == '\\' && text[i + 1] == 'n';
      broken += escaped ? '\n' : text[i];
      windows += escaped ? "\r\n" : std::string(1, text[i]);
      if (escaped) ++i;
    }
    EXPECT_EQ(renderer_name_of_template("template", broken), name);
    EXPECT_EQ(renderer_name_of_template("template", windows), name);
  }
}

// Templates that were changed here and there are in use, and write other bytes.
TEST_F(ChatTemplate, AChangeOfAnyCharacterIsRefused) {
  Rng rng(1);
  for (const auto& [name, text] : {std::pair("chatml", kChatml), std::pair("smollm2", kSmollm2)}) {
    for (size_t i = 0; i < text.size(); ++i) {
      std::string other = text;
      other[i] = static_cast<char>('a' + (other[i] + 1 + rng.below(24)) % 26);
      if (other == text) continue;
      EXPECT_THROW(renderer_name_of_template("template", other), Error) << name << " at " << i;
      other = text;
      EXPECT_THROW(renderer_name_of_template("template", other.erase(i, 1)), Error) << i;
    }
    EXPECT_THROW(renderer_name_of_template("template", text + "\n\n"), Error);
    EXPECT_THROW(renderer_name_of_template("template", " " + text), Error);
  }
}

TEST_F(ChatTemplate, WhatHasAllMarksOfAFamilyIsRefusedAndTheFamilyNamed) {
  for (const auto& [name, text] : stand_ins()) {
    write("chat_template.jinja", "{#- <think> <|vision_start|> [gMASK] -#}\n" + text + "\n\n");
    expect_refused({"the nearest is " + name + ", but this is none of its published texts",
                    "a changed template may write anything"});
  }
}

TEST_F(ChatTemplate, ATemplateOfAnotherKindIsNearToNothing) {
  write(
      "chat_template.jinja",
      "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' "
      "+ message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif "
      "%}{% endfor %}");
  expect_refused({"and none is near", "one of qwen2.5, qwen3"});
}

TEST_F(ChatTemplate, IsReadFromBothFiles) {
  write("tokenizer_config.json", "{\"chat_template\": " + json_text(kChatml) + "}");
  EXPECT_EQ(found(), "chatml");
  write("tokenizer_config.json",
        "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"{{ x }}\"}, {\"name\": "
        "\"default\", \"template\": " +
            json_text(kSmollm2) + "}]}");
  EXPECT_EQ(found(), "smollm2");
  // A file of its own comes first, as in transformers.
  write("chat_template.jinja", kChatml);
  EXPECT_EQ(found(), "chatml");
}

TEST_F(ChatTemplate, WithoutATemplateTheModelTypeDecides) {
  for (const auto& [type, name] :
       std::vector<std::pair<std::string, std::string>>{{"qwen2", "qwen2.5"},
                                                        {"qwen3", "qwen3"},
                                                        {"qwen3_moe", "qwen3"},
                                                        {"qwen3_5", "qwen3.5"},
                                                        {"qwen3_5_moe", "qwen3.5"},
                                                        {"llama", "llama3"},
                                                        {"glm4_moe", "glm4.5"},
                                                        {"gpt_oss", "gpt-oss"},
                                                        {"deepseek_v3", "deepseek-v3.1"},
                                                        {"kimi_k2", "kimi-k2"}}) {
    write("config.json", "{\"model_type\": \"" + type + "\"}");
    EXPECT_EQ(found(), name);
  }
  write("tokenizer_config.json", "{\"chat_template\": null}");
  EXPECT_EQ(found(), "kimi-k2");
  write("config.json", "{\"model_type\": \"mamba\"}");
  expect_refused({"config.json: model_type = \"mamba\" has no renderer", "one of qwen2.5"});
  write("config.json", "{}");
  expect_refused({"config.json: has no model_type"});
}

TEST_F(ChatTemplate, AnUnknownTemplateNamesTheNearestAndTheDifference) {
  expect_refused({"has no chat template", "no config.json"});
  write("chat_template.jinja",
        "{{ '<|im_start|>' }}<args-json-object>{{ reasoning_content }}<think>\n\n</think>\n\n"
        "{%- if loop.index0 > ns.last_query_index %}<tool_response>");
  expect_refused({"chat_template.jinja: no renderer is known to write", "the nearest is qwen3, but",
                  "it has no \"enable_thinking\"", "one of qwen2.5, qwen3"});
  // The same family with something that changes what it writes.
  const std::string vision = stand_ins()[1].second;
  write("chat_template.jinja", vision + "{{ '<|vision_start|>' }}");
  expect_refused({"the nearest is qwen3, but it has \"<|vision_start|>\""});
  write("chat_template.jinja",
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>'}}<|im_start|>assistant{{ system }}");
  expect_refused({"the nearest is chatml, but it has \"system\""});
}

TEST_F(ChatTemplate, WhatIsNoTemplateIsRefusedWithItsPlace) {
  write("tokenizer_config.json", "{\"chat_template\": 3}");
  expect_refused({"tokenizer_config.json: chat_template must be text or a list", "not a number"});
  write("tokenizer_config.json", "{\"chat_template\": [{\"name\": \"rag\"}]}");
  expect_refused({"chat_template[0]: must have a name and a template"});
  write("tokenizer_config.json", "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"\"}]}");
  expect_refused({"none of its templates is called \"default\"", "there are: rag"});
  write("tokenizer_config.json", "{\"chat_template\": \"{{");
  expect_refused({"tokenizer_config.json line 1"});
  write("tokenizer_config.json", "[]");
  expect_refused({"tokenizer_config.json: must be an object, not a list"});
  write("chat_template.jinja", " \n");
  expect_refused({"chat_template.jinja: is empty"});
  write("chat_template.jinja", "hello");
  expect_refused({"chat_template.jinja: has no {{ or {%"});
  write("chat_template.jinja", std::string("{{ x }}\0", 8));
  expect_refused({"chat_template.jinja: is no text"});
  write("chat_template.jinja", std::string((1 << 20) + 1, 'x'));
  expect_refused({"chat_template.jinja: has 1048577 bytes", "at most 1048576"});
}

TEST_F(ChatTemplate, AnyBytesGiveANameOrAnError) {
  Rng rng(5);
  for (int round = 0; round < 2000; ++round) {
    std::string text = stand_ins()[rng.below(stand_ins().size())].second;
    for (uint64_t n = rng.below(6); n > 0 && !text.empty(); --n) {
      const size_t at = rng.below(text.size());
      if (rng.below(2)) {
        text.erase(at, 1 + rng.below(40));
      } else {
        text[at] = static_cast<char>(rng.below(256));
      }
    }
    try {
      const std::string name = renderer_name_of_template("template", text);
      EXPECT_NO_THROW(make_renderer(name, nullptr));
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("template: "), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace leeway
