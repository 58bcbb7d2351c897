#include "generate/folder_settings.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "base/test_folder.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// What reading the folder throws; empty: nothing.
template <class Read>
std::string problem_of(const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(FolderSettings, AreAllOptional) {
  const testing::TestFolder folder;
  const GenerationConfig generation = read_generation_config(folder.path());
  EXPECT_FALSE(generation.temperature || generation.top_k || generation.max_new_tokens);
  EXPECT_TRUE(generation.eos_token_id.empty());
  const TokenizerConfig tokenizer = read_tokenizer_config(folder.path());
  EXPECT_FALSE(tokenizer.add_bos_token.has_value());
  EXPECT_EQ(tokenizer.eos_token, "");
}

TEST(FolderSettings, AreReadAsTheHubWritesThem) {
  const testing::TestFolder folder;
  const auto generation = [&](const std::string& json) {
    write_file_atomically(folder.path() + "/generation_config.json", json);
    return read_generation_config(folder.path());
  };
  const GenerationConfig full = generation(
      R"({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null,
          "eos_token_id": [7, 9], "max_new_tokens": 2048, "max_length": 20, "other": {}})");
  EXPECT_FLOAT_EQ(full.temperature.value(), 0.6f);
  EXPECT_EQ(full.top_k, 20);
  EXPECT_FLOAT_EQ(full.top_p.value(), 0.95f);
  EXPECT_FALSE(full.min_p.has_value());
  EXPECT_EQ(full.max_new_tokens, 2048);
  EXPECT_EQ(full.eos_token_id, (std::vector<int32_t>{7, 9}));
  EXPECT_EQ(generation(R"({"eos_token_id": 7})").eos_token_id, std::vector<int32_t>{7});
  EXPECT_TRUE(full.not_applied.empty());
  EXPECT_EQ(
      generation(R"({"repetition_penalty": 1.05, "num_beams": 1, "typical_p": null})").not_applied,
      std::vector<std::string>{"repetition_penalty 1.05"});
  EXPECT_FLOAT_EQ(generation(R"({"do_sample": false, "temperature": 0.6})").temperature.value(),
                  0.0f);

  const auto tokenizer = [&](const std::string& json) {
    write_file_atomically(folder.path() + "/tokenizer_config.json", json);
    return read_tokenizer_config(folder.path());
  };
  const TokenizerConfig both =
      tokenizer(R"({"add_bos_token": true, "bos_token": {"content": "<s>", "lstrip": false},
                    "eos_token": "</s>", "chat_template": "x"})");
  EXPECT_EQ(both.add_bos_token, true);
  EXPECT_EQ(both.bos_token, "<s>");
  EXPECT_EQ(both.eos_token, "</s>");
}

TEST(FolderSettings, AreRefusedWithFileKeyAndValue) {
  const testing::TestFolder folder;
  const auto refused = [&](const std::string& file, const std::string& json,
                           const std::vector<std::string>& words) {
    const std::string path = folder.path() + "/" + file;
    write_file_atomically(path, json);
    const std::string problem = problem_of([&] {
      read_generation_config(folder.path());
      read_tokenizer_config(folder.path());
    });
    write_file_atomically(path, "{}");
    EXPECT_NE(problem.find(file), std::string::npos) << json << ": " << problem;
    for (const std::string& word : words) {
      EXPECT_NE(problem.find(word), std::string::npos) << json << ": " << problem;
    }
  };
  const std::string generation = "generation_config.json", tokenizer = "tokenizer_config.json";
  refused(generation, "{", {"line 1"});
  refused(generation, "[]", {"object"});
  refused(generation, R"({"temperature": "hot"})", {"temperature", "\"hot\"", "number"});
  refused(generation, R"({"temperature": -1})", {"temperature", "-1"});
  refused(generation, R"({"temperature": NaN})", {"temperature"});
  refused(generation, R"({"temperature": 1e99})", {"temperature"});
  refused(generation, R"({"top_p": 1.5})", {"top_p", "1.5"});
  refused(generation, R"({"top_k": 1.5})", {"top_k", "1.5"});
  refused(generation, R"({"top_k": -3})", {"top_k", "-3"});
  refused(generation, R"({"max_new_tokens": 0})", {"max_new_tokens", "0"});
  refused(generation, R"({"eos_token_id": "end"})", {"eos_token_id", "\"end\""});
  refused(generation, R"({"eos_token_id": [1, -2]})", {"eos_token_id", "-2"});
  refused(generation, R"({"do_sample": 1})", {"do_sample", "1"});
  refused(tokenizer, R"({"add_bos_token": "yes"})", {"add_bos_token", "\"yes\""});
  refused(tokenizer, R"({"add_bos_token": true})", {"add_bos_token", "bos_token"});
  refused(tokenizer, R"({"eos_token": 3})", {"eos_token", "3"});
  refused(tokenizer, R"({"bos_token": {"content": 3}})", {"bos_token", "3"});
  refused(tokenizer, R"({"eos_token": [)" + std::string(400, ' ') + "3]}", {"eos_token"});
}

TEST(FolderSettings, ATokenizersPostProcessorSaysWhatBeginsAText) {
  const testing::TestFolder folder;
  const auto before = [&](const std::string& processor) {
    const std::string path = folder.path() + "/tokenizer.json";
    write_file_atomically(path, R"({"post_processor": )" + processor + "}");
    return tokens_before_text(path);
  };
  const std::string single =
      R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
          {"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}]})";
  EXPECT_EQ(before(single), std::vector<std::string>{"<s>"});
  EXPECT_EQ(
      before(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"}, )" + single + "]}"),
      std::vector<std::string>{"<s>"});
  for (const char* none : {"null", R"({"type": "ByteLevel"})", "3", R"({"single": 3})",
                           R"({"single": [{"Sequence": {"id": "A"}}]})"}) {
    EXPECT_TRUE(before(none).empty()) << none;
  }
}

}  // namespace
}  // namespace leeway
