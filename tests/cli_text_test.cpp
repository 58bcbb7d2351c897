// The commands of the text layer, end to end: tokenize, render, trajectory.

#include <gtest/gtest.h>

#include "cli_helpers.h"
#include "live_program.h"

namespace leeway {
namespace {

TEST(Tokenize, TurnsLinesIntoIdsAndBack) {
  const RunResult ids =
      run_program({"tokenize", "--tokenizer", "byte"}, {.input = "\"ab\\u00e9\"\n\n\"\"\n"});
  EXPECT_EQ(ids.code, 0) << ids;
  EXPECT_EQ(ids.out, "[97, 98, 195, 169]\n[]\n");
  const RunResult text =
      run_program({"tokenize", "--tokenizer", "byte", "--decode"}, {.input = ids.out});
  EXPECT_EQ(text.code, 0) << text;
  EXPECT_EQ(text.out, "\"ab\u00e9\"\n\"\"\n");
}

TEST(Tokenize, NamesTheLineOfBadInput) {
  expect_mistake(run_program({"tokenize", "--tokenizer", "byte"}, {.input = "\n{\n"}), {"line 2"});
  expect_mistake(
      run_program({"tokenize", "--tokenizer", "byte", "--decode"}, {.input = "[1, 300]\n"}),
      {"line 1", "300"});
  expect_mistake(run_program({"tokenize", "--tokenizer", "no/such.json"}), {"no/such.json"});
  const TempFolder folder;
  expect_mistake(run_program({"tokenize", "--tokenizer", folder.write("t.json", "{}")}),
                 {"t.json", "model"});
}

const char* const kConversation = R"({"messages": [
  {"role": "user", "content": "2+2?"},
  {"role": "assistant", "reasoning_content": "easy", "content": "4"},
  {"role": "user", "content": "sure?"}], "add_generation_prompt": true})";

TEST(Render, WritesWhatTheTemplateWrites) {
  const TempFolder folder;
  const std::string input = folder.write("c.json", kConversation);
  const RunResult plain = run_program({"render", "--renderer", "qwen3", "--input", input});
  EXPECT_EQ(plain.code, 0) << plain;
  EXPECT_EQ(
      plain.out,
      "{\"text\": \"<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>\\n"
      "<|im_start|>user\\nsure?<|im_end|>\\n<|im_start|>assistant\\n\"}\n");
  const RunResult kept =
      run_program({"render", "--renderer", "qwen3", "--input", input, "--preserve-all-thinking"});
  EXPECT_TRUE(contains(kept.out, "<think>\\neasy\\n</think>")) << kept;
}

TEST(Render, TakesMessagesAloneAndTheModelsOwnTemplate) {
  const TempFolder folder;
  const std::string list = folder.write("l.json", R"([{"role": "user", "content": "2+2?"}])");
  const std::string object =
      folder.write("o.json", R"({"messages": [{"role": "user", "content": "2+2?"}]})");
  const RunResult plain = run_program({"render", "--renderer", "qwen3", "--input", list});
  ASSERT_EQ(plain.code, 0) << plain;
  EXPECT_EQ(plain.out, run_program({"render", "--renderer", "qwen3", "--input", object}).out);
  const std::string model = LEEWAY_SOURCE_DIR "/tests/data/hf/qwen3-tied";
  const RunResult found = run_program({"render", "--model", model, "--input", list});
  EXPECT_EQ(found.code, 0) << found;
  EXPECT_EQ(found.out,
            run_program({"render", "--renderer", "auto", "--model", model, "--input", list}).out);
  expect_mistake(run_program({"render", "--input", list}), {"--renderer", "--model", "--config"});
  expect_mistake(run_program({"render", "--model", "Qwen/Qwen3-0.6B", "--input", list}),
                 {"--model Qwen/Qwen3-0.6B: there is no such folder", "hf download"});
}

TEST(Tokenize, TakesTheFolderOfATokenizer) {
  const TempFolder folder;
  std::filesystem::create_directories(folder / "m");
  expect_mistake(run_program({"tokenize", "--tokenizer", folder / "m"}), {"m/tokenizer.json"});
  folder.write("m/tokenizer.json", "{}");
  expect_mistake(run_program({"tokenize", "--tokenizer", folder / "m"}),
                 {"m/tokenizer.json", "model"});
}

TEST(Render, TakesTheRendererFromTheConfig) {
  const TempFolder folder;
  const std::string input = folder.write("c.json", kConversation);
  const std::string config = folder.write(
      "run.toml", "[orchestrator.renderer]\nname = \"qwen3\"\npreserve_all_thinking = true\n");
  const RunResult kept = run_program({"render", "--config", config, "--input", input});
  EXPECT_EQ(kept.code, 0) << kept;
  EXPECT_TRUE(contains(kept.out, "easy")) << kept;
  const RunResult shown = run_program({"config", config});
  EXPECT_TRUE(contains(shown.out, "preserve_all_thinking = true")) << shown;
  EXPECT_TRUE(contains(shown.out, "run.toml line 3")) << shown;
}

TEST(Render, FindsTheRendererByTheModelsTemplate) {
  const TempFolder folder;
  const std::string input = folder.write("c.json", kConversation);
  const std::string model = folder.path().string();
  folder.write("config.json", R"({"model_type": "qwen3"})");
  const RunResult named = run_program({"render", "--renderer", "qwen3", "--input", input});
  const RunResult found =
      run_program({"render", "--renderer", "auto", "--model", model, "--input", input});
  EXPECT_EQ(found.code, 0) << found;
  EXPECT_EQ(found.out, named.out);
  const std::string config =
      folder.write("run.toml", "[model]\npath = \"" + model +
                                   "\"\n[orchestrator.renderer]\nname = \"auto\"\n"
                                   "thinking_retention = \"all\"\n");
  const RunResult kept = run_program({"render", "--config", config, "--input", input});
  EXPECT_EQ(kept.code, 0) << kept;
  EXPECT_TRUE(contains(kept.out, "easy")) << kept;
  EXPECT_EQ(run_program({"config", config}).code, 0);

  folder.write("chat_template.jinja", "{{ messages }}");
  expect_mistake(run_program({"config", config}),
                 {"run.toml line 4", "name = \"auto\"", "chat_template.jinja", "none is near"});
  expect_mistake(run_program({"render", "--renderer", "auto", "--input", input}), {"--model"});
  expect_mistake(run_program({"render", "--renderer", "qwen3", "--model", model, "--input", input}),
                 {"--model has no effect"});
  const std::string scratch = folder.write("s.toml", "[orchestrator.renderer]\nname = \"auto\"\n");
  expect_mistake(run_program({"config", scratch}), {"s.toml line 2", "auto", "model.path"});
}

TEST(Render, RefusesFlagsWhereThereIsNoThinkingAndWhatTheTemplateRefuses) {
  const TempFolder folder;
  const std::string input = folder.write("c.json", kConversation);
  expect_mistake(
      run_program({"render", "--renderer", "llama3", "--input", input, "--preserve-all-thinking"}),
      {"llama3", "thinking"});
  expect_mistake(run_program({"render", "--renderer", "qwen4", "--input", input}),
                 {"qwen4", "qwen3"});
  expect_mistake(run_program({"render", "--input", input}), {"--renderer"});
  const std::string fine = folder.write("f.toml", "[orchestrator.renderer]\nname = \"qwen3\"\n");
  expect_mistake(
      run_program({"render", "--config", fine, "--input", input, "--preserve-all-thinking"}),
      {"--preserve-all-thinking", "--config"});
  const std::string config = folder.write(
      "run.toml", "[orchestrator.renderer]\nname = \"qwen2.5\"\npreserve_all_thinking = true\n");
  expect_mistake(run_program({"config", config}), {"run.toml line 2", "qwen2.5", "thinking"});
  const std::string retained = folder.write(
      "t.toml", "[orchestrator.renderer]\nname = \"chatml\"\nthinking_retention = \"all\"\n");
  expect_mistake(run_program({"config", retained}),
                 {"t.toml line 2", "chatml", "thinking_retention"});
  const std::string nameless =
      folder.write("n.toml", "[orchestrator.renderer]\npreserve_all_thinking = true\n");
  expect_mistake(run_program({"config", nameless}), {"n.toml line 2", "inert"});
  const std::string misspelt =
      folder.write("m.toml", "[orchestrator.renderer]\nname = \"qwen3\"\npreserve_all = true\n");
  expect_mistake(run_program({"config", misspelt}), {"m.toml line 3", "preserve_all"});
  const std::string bad =
      folder.write("b.json", R"({"messages": [{"role": "robot", "content": "x"}]})");
  expect_mistake(run_program({"render", "--renderer", "qwen3", "--input", bad}),
                 {"b.json", "robot"});
}

const char* const kSteps =
    "{\"rollout\": \"a\", \"prompt_ids\": [1, 2], \"completion_ids\": [3, 4], \"logprobs\": [-1, "
    "-2]}\n"
    "{\"rollout\": \"b\", \"prompt_ids\": [7], \"completion_ids\": [8]}\n"
    "\n"
    "{\"rollout\": \"a\", \"prompt_ids\": [1, 2, 3, 4, 5], \"completion_ids\": [6]}\n"
    "{\"rollout\": \"a\", \"prompt_ids\": [1, 2, 9, 5], \"completion_ids\": [6]}\n";

// Escape sequences of the program's own would be shown as text, as all others are.
TEST(Trajectory, PrintsTheSameOnATerminal) {
  if (!LiveProgram::has_terminals()) GTEST_SKIP() << "needs a pseudo-terminal";
  const TempFolder folder;
  const std::string file = folder.write("steps.jsonl", kSteps);
  LiveProgram shown({"trajectory", file}, LiveProgram::Streams::terminal);
  EXPECT_EQ(shown.wait(), 0);
  std::string text = shown.printed();
  std::erase(text, '\r');
  EXPECT_EQ(text, run_program({"trajectory", file}).out);
}

TEST(Trajectory, ShowsWhereThePrefixHoldsAndBreaks) {
  const TempFolder folder;
  const std::string file = folder.write("steps.jsonl", kSteps);
  const RunResult text = run_program({"trajectory", file});
  EXPECT_EQ(text.code, 0) << text;
  EXPECT_TRUE(contains(text.out, "rollout a: 3 steps, 2 samples")) << text;
  EXPECT_TRUE(contains(text.out, "sampled_tokens_changed")) << text;
  EXPECT_TRUE(contains(text.out, "expected 3, found 9")) << text;
  const RunResult json = run_program({"trajectory", file, "--json", "--html", folder / "t.html"});
  EXPECT_EQ(json.code, 0) << json;
  const auto document = json_of(json.out);
  EXPECT_EQ(document["rollouts"].Size(), 2u);
  EXPECT_EQ(document["rollouts"][0]["samples"].Size(), 2u);
  EXPECT_EQ(document["rollouts"][0]["samples"][0]["ids"].Size(), 6u);
  EXPECT_EQ(document["samples_per_rollout"].GetDouble(), 1.5);
  EXPECT_EQ(document["prefix_breaks"]["sampled_tokens_changed"].GetDouble(), 1.0);
  EXPECT_TRUE(contains(file_text(folder / "t.html"), "sampled_tokens_changed"));
}

TEST(Trajectory, NamesTheLineOfBadInput) {
  const TempFolder folder;
  auto refused = [&](const std::string& text, const std::vector<std::string>& words) {
    expect_mistake(run_program({"trajectory", folder.write("s.jsonl", text)}), words);
  };
  refused("", {"s.jsonl", "no steps"});
  refused("{\"prompt_ids\": [1], \"completion_ids\": [2]}\n[]\n", {"s.jsonl line 2"});
  refused("{\"prompt_ids\": [1]}\n", {"line 1", "completion_ids"});
  refused("{\"prompt_ids\": [1.5], \"completion_ids\": [2]}\n", {"line 1", "1.5"});
  refused("{\"prompt_ids\": [1], \"completion_ids\": [2], \"logprobs\": []}\n",
          {"line 1", "0 logprobs"});
  refused("{\"prompt_ids\": [1], \"completion_ids\": [\n", {"line 1"});
  refused("{\"prompt_ids\": [-1], \"completion_ids\": [2]}\n", {"line 1", "-1"});
  refused("{\"prompt_ids\": [1], \"completion_ids\": [2], \"logprobs\": [NaN]}\n", {"line 1"});
  refused("{\"prompt_ids\": [1], \"completion_ids\": [2], \"mask\": [0.5]}\n", {"line 1", "0.5"});
}

}  // namespace
}  // namespace leeway
