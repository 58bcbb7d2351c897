// `leeway generate` and `leeway logprobs` with text, end to end, on a golden model that reads and
// writes bytes.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cli_helpers.h"
#include "live_program.h"
#include "model/parameters.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

const std::string kModel = LEEWAY_SOURCE_DIR "/tests/data/hf/qwen3-tied";

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

RunResult generate(const std::vector<std::string>& more, const std::string& input = "") {
  return run_program(joined({"generate", kModel, "--tokenizer", "byte"}, more), {.input = input});
}
RunResult logprobs(const std::vector<std::string>& more, const std::string& input = "") {
  return run_program(joined({"logprobs", kModel, "--tokenizer", "byte"}, more), {.input = input});
}

std::string ids_json(const std::string& bytes) {
  std::string json = "{\"tokens\": [[";
  for (size_t i = 0; i < bytes.size(); ++i) {
    json += (i == 0 ? "" : ", ") + std::to_string(static_cast<unsigned char>(bytes[i]));
  }
  return json + "]]}";
}

const std::vector<std::string> kShort = {"--max-new-tokens", "24", "--seed", "5"};

TEST(GenerateText, APromptGivesTheTokensOfItsIdsAndStreamsTheirText) {
  const RunResult result = generate(joined({"--prompt", "Hello", "--json"}, kShort));
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_EQ(result.err, "");
  const Document json = json_of(result.out);
  const RunResult by_ids =
      run_program(joined({"generate", "--model", kModel, "--tokens", "-"}, kShort),
                  {.input = ids_json("Hello")});
  const Document ids = json_of(by_ids.out);
  EXPECT_EQ(text_of(json["tokens"]), text_of(ids["tokens"][0]));
  EXPECT_EQ(text_of(json["logprobs"]), text_of(ids["logprobs"][0]));
  EXPECT_EQ(text_of(json["processed_logprobs"]), text_of(ids["processed_logprobs"][0]));
  EXPECT_STREQ(json["finish"].GetString(), "length");
  EXPECT_EQ(text_of(json["content"]), text_of(json["text"]));

  const RunResult streamed = generate(joined({"--prompt", "Hello"}, kShort));
  ASSERT_EQ(streamed.code, 0) << streamed;
  EXPECT_EQ(streamed.out, std::string(json["text"].GetString()) + "\n");
  EXPECT_TRUE(contains(streamed.err, kModel + ": no end token")) << streamed.err;
  EXPECT_TRUE(contains(streamed.err, "tokens/s")) << streamed.err;
  EXPECT_EQ(lines_of(streamed.err).size(), 2u) << streamed.err;
  const RunResult quiet = generate(joined({"--prompt", "Hello", "--quiet"}, kShort));
  EXPECT_EQ(quiet.err, "");
  EXPECT_EQ(quiet.out, streamed.out);
}

TEST(GenerateText, AModelIsAFolderOnThisDisk) {
  for (const std::string command : {"generate", "logprobs", "serve"}) {
    SCOPED_TRACE(command);
    expect_mistake(run_program({command, "Qwen/Qwen3-0.6B"}),
                   {"MODEL Qwen/Qwen3-0.6B: there is no such folder; Leeway downloads nothing",
                    "hf download NAME --local-dir FOLDER", "leeway convert FILE.gguf FOLDER"});
    expect_mistake(run_program({command, "--model", kModel + "/config.json"}),
                   {"config.json: is a file, and a model is a folder"});
    expect_mistake(run_program({command}), {"MODEL is required"});
    expect_mistake(run_program({command, kModel, "--adapter", "nowhere"}),
                   {"--adapter nowhere: there is no such folder"});
    expect_mistake(run_program({command, kModel, "--model", kModel}), {"MODEL and --model"});
    const RunResult help = run_program({command, "--help"});
    EXPECT_TRUE(contains(help.out, "The same as MODEL")) << help;
    EXPECT_FALSE(contains(help.out, "REQUIRED")) << help;
  }
}

TEST(GenerateText, AClosedOutputIsNoFaultOfThePrompt) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full here";
  const RunResult result =
      run_program(joined({"generate", kModel, "--tokenizer", "byte", "--prompt", "Hello"}, kShort),
                  {.stdout_file = "/dev/full"});
  EXPECT_EQ(result.code, 2) << result;
  EXPECT_TRUE(contains(result.err, "leeway: cannot write the result to stdout")) << result;
}

TEST(GenerateText, SamplesAreObjectsOrNumberedTexts) {
  const RunResult json =
      generate(joined({"--prompt", "Hello", "--json", "--samples", "3"}, kShort));
  const std::vector<std::string> lines = lines_of(json.out);
  ASSERT_EQ(lines.size(), 3u) << json;
  std::string expected;
  for (size_t i = 0; i < 3; ++i) {
    const Document sample = json_of(lines[i]);
    expected += "[" + std::to_string(i + 1) + "/3]\n" + sample["text"].GetString() + "\n";
  }
  EXPECT_EQ(generate(joined({"--prompt", "Hello", "--samples", "3"}, kShort)).out, expected);
}

TEST(GenerateText, MessagesAreRenderedAndBothFormsMeanTheSame) {
  const TempFolder folder;
  const std::string list = R"([{"role": "user", "content": "Hi"}])";
  const std::string file = folder.write("talk.json", list);
  const RunResult by_list = generate(joined({"--messages", file, "--json"}, kShort));
  ASSERT_EQ(by_list.code, 0) << by_list;
  const RunResult by_object =
      generate(joined({"--messages", "-", "--json"}, kShort), "{\"messages\": " + list + "}");
  EXPECT_EQ(by_list.out, by_object.out);
  const RunResult by_marked_list =
      generate(joined({"--messages", "-", "--json"}, kShort), "\xEF\xBB\xBF" + list);
  EXPECT_EQ(by_list.out, by_marked_list.out) << "with a byte order mark";
  const Document json = json_of(by_list.out);
  // qwen3 is the model_type of the folder.
  const RunResult named =
      generate(joined({"--messages", file, "--json", "--renderer", "qwen3"}, kShort));
  EXPECT_EQ(by_list.out, named.out);
  const RunResult other =
      generate(joined({"--messages", file, "--json", "--renderer", "qwen2.5"}, kShort));
  EXPECT_NE(by_list.out, other.out);
  const RunResult streamed = generate(joined({"--messages", file}, kShort));
  EXPECT_EQ(streamed.out, std::string(json["text"].GetString()) + "\n");
  EXPECT_TRUE(contains(streamed.err, "renderer qwen3, ends at")) << streamed.err;
  // Without thinking the prompt has an empty block more.
  const RunResult silent =
      generate(joined({"--messages", file, "--json", "--no-thinking"}, kShort));
  EXPECT_EQ(silent.code, 0) << silent;
  EXPECT_NE(silent.out, by_list.out);
}

TEST(GenerateText, AStopTextEndsTheTextBeforeIt) {
  const Document whole = json_of(generate(joined({"--prompt", "Hello", "--json"}, kShort)).out);
  const std::string text = whole["text"].GetString();
  // A letter of it.
  const auto letter = std::find_if(text.begin() + 1, text.end(), [](char c) { return c > ' '; });
  ASSERT_NE(letter, text.end());
  const std::string stop(1, *letter);
  const Document cut = json_of(
      generate(joined({"--prompt", "Hello", "--json", "--stop", "never", "--stop", stop}, kShort))
          .out);
  EXPECT_EQ(cut["text"].GetString(), text.substr(0, text.find(stop)));
  EXPECT_STREQ(cut["finish"].GetString(), "stop");
}

TEST(GenerateText, AFolderDecidesAndFlagsWin) {
  const TempFolder folder;
  for (const char* name : {"config.json", "model.safetensors"}) {
    fs::copy_file(kModel + "/" + name, folder.path() / name);
  }
  const std::string path = folder.path().string();
  const auto run = [&](const std::vector<std::string>& more) {
    return run_program(
        joined({"generate", path, "--tokenizer", "byte", "--prompt", "Hello"}, more));
  };
  folder.write("generation_config.json",
               R"({"do_sample": false, "max_new_tokens": 9, "top_k": 7, "eos_token_id": [3]})");
  const RunResult greedy = run({});
  EXPECT_TRUE(contains(greedy.err, "temperature 0, top_k 7, max_new_tokens 9, ends at"))
      << greedy.err;
  EXPECT_EQ(greedy.out, run({"--seed", "8"}).out);
  EXPECT_EQ(greedy.out, run({"--temperature", "0", "--max-new-tokens", "9"}).out);
  const RunResult warm = run({"--temperature", "1", "--top-k", "0", "--seed", "8", "--json"});
  EXPECT_NE(json_of(warm.out)["text"].GetString(), greedy.out);
  EXPECT_EQ(json_of(warm.out)["tokens"].Size(), 9u);
  folder.write("generation_config.json", R"({"top_p": "much"})");
  expect_mistake(run({}), {"generation_config.json", "top_p", "\"much\"", "a number"});
  folder.write("generation_config.json", R"({"top_p": 3})");
  expect_mistake(run({}), {"generation_config.json", "top_p is 3"});
  fs::remove(folder.path() / "generation_config.json");
  folder.write("tokenizer_config.json", R"({"eos_token": ["a"]})");
  expect_mistake(run({}), {"tokenizer_config.json", "eos_token", "[\"a\"]"});
}

TEST(GenerateText, RefusesWhatCannotBe) {
  expect_mistake(generate({}), {"--prompt", "--messages", "--chat", "--tokens"});
  expect_mistake(generate({"--prompt", "a", "--chat"}), {"one of"});
  expect_mistake(generate({"--chat", "--json"}), {"--json with --chat", "--messages"});
  expect_mistake(generate({"--chat", "--samples", "2"}), {"--samples with --chat"});
  expect_mistake(generate({"--prompt", ""}), {"--prompt", "empty"});
  expect_mistake(generate({"--prompt", std::string(600, 'a')}), {"--prompt", "600", "512"});
  expect_mistake(generate({"--prompt", "abc", "--max-new-tokens", "600"}),
                 {"--prompt", "max_new_tokens 600", "512 positions"});
  expect_mistake(generate({"--prompt", "a", "--renderer", "qwen3"}), {"--renderer"});
  expect_mistake(generate({"--prompt", "a", "--stop", ""}), {"--stop", "empty"});
  expect_mistake(generate({"--prompt", "a", "--temperature", "-1"}), {"temperature", "-1"});
  expect_mistake(generate({"--chat", "--renderer", "qwen"}), {"--renderer qwen", "did you mean"});
  expect_mistake(generate({"--chat", "--renderer", "llama3", "--no-thinking"}), {"--no-thinking"});
  expect_mistake(generate({"--messages", "-"}, "{"), {"standard input", "line 1"});
  expect_mistake(generate({"--messages", "-"}, "[]"), {"standard input", "empty"});
  expect_mistake(generate({"--messages", "-"}, "{}"), {"messages"});
  expect_mistake(generate({"--messages", "-"}, R"([{"role": "bot", "content": "x"}])"),
                 {"messages[0]", "bot"});
  expect_mistake(
      generate({"--messages", "-"}, fmt::format(R"([{{"role": "{}"}}])", std::string(9999, 'x'))),
      {"unknown role \"xxx", "x\"..; roles"});
  expect_mistake(generate({"--messages", "-"}, R"([{"role": "user", "content": "\udc00"}])"),
                 {"standard input", "column 31", "surrogate"});
  expect_mistake(
      generate({"--messages", "-"}, R"([{"role": "user", "content": "a"}])" + std::string(1, '\0')),
      {"standard input", "NUL"});
  expect_mistake(generate({"--messages", "no/such.json"}), {"no/such.json"});
  expect_mistake(generate({"--prompt", "a", "--stop-id", "-1"}), {"--stop-id -1", "0 to 319"});
  expect_mistake(generate({"--prompt", "a", "--stop-id", "320"}), {"--stop-id 320", "0 to 319"});
  expect_mistake(run_program({"generate", kModel, "--prompt", "a"}),
                 {"tokenizer.json", "--tokenizer", "--tokens"});
  expect_mistake(generate({"--tokens", "-", "--max-new-tokens", "2"}), {"--tokenizer"});
  expect_mistake(run_program({"generate", kModel, "--tokens", "-"}), {"--max-new-tokens"});
  expect_mistake(
      run_program({"generate", kModel, "--tokens", "-", "--max-new-tokens", "2", "--json"}),
      {"--json"});
  expect_mistake(run_program({"generate", "no/such", "--prompt", "a"}), {"no/such"});
}

// ---------------------------------------------------------------------------------------------
// Chat

TEST(GenerateChat, RepliesLineByLineAsTheSameMessagesWould) {
  const std::vector<std::string> limits = {"--max-new-tokens", "20", "--renderer", "qwen2.5"};
  const RunResult chat =
      generate(joined({"--chat", "--seed", "5"}, limits), "Hello\n/exit\nnot read\n");
  ASSERT_EQ(chat.code, 0) << chat;
  const RunResult alone = generate(joined({"--messages", "-", "--seed", "5"}, limits),
                                   R"([{"role": "user", "content": "Hello"}])");
  EXPECT_EQ(chat.out, alone.out);
  EXPECT_FALSE(contains("\n" + chat.err, "\n> ")) << "no prompt without a terminal: " << chat.err;
  // A last line without its end counts, and the end of input ends the chat.
  const RunResult two = generate(joined({"--chat", "--seed", "5"}, limits), "Hello\n/regenerate");
  EXPECT_EQ(two.code, 0);
  EXPECT_TRUE(two.out.starts_with(chat.out)) << two;
  EXPECT_GT(two.out.size(), chat.out.size());
  EXPECT_EQ(generate({"--chat"}, "").code, 0);
}

// As in `| head`: nobody would read the other replies.
TEST(GenerateChat, EndsWithItsReader) {
  const RunResult result =
      run_program({"generate", kModel, "--tokenizer", "byte", "--chat", "--max-new-tokens", "4"},
                  {.input = "a\nb\nc\n", .stdout_file = "/dev/full"});
  EXPECT_EQ(result.code, 2) << result;
  const std::string reason = "cannot write the result to stdout";
  ASSERT_TRUE(contains(result.err, reason)) << result;
  EXPECT_EQ(result.err.find(reason), result.err.rfind(reason)) << "said once: " << result;
}

TEST(GenerateChat, TellsThatTheContextIsFull) {
  const std::string message(400, 'x');
  const RunResult chat =
      generate({"--chat", "--temperature", "0"}, message + "\n" + message + "\n");
  EXPECT_EQ(chat.code, 0) << chat;
  EXPECT_TRUE(contains(chat.err, "context is full")) << chat.err;
  EXPECT_TRUE(contains(chat.err, "/reset")) << chat.err;
}

// The golden model with room for replies of minutes, which consist of letters and never end.
std::string endless_model(const TempFolder& folder) {
  Parameters weights = load_parameters(kModel);
  float* rows = weights.find("model.embed_tokens.weight");
  const int64_t size = weights.config().hidden_size;
  for (int64_t id = 0; id < weights.config().vocab_size; ++id) {
    if (id < 'a' || id > 'z') std::fill_n(rows + id * size, size, 0.0f);
  }
  const std::string path = folder / "endless";
  save_parameters(weights, path);
  std::string config = file_text(path + "/config.json");
  const std::string key = "\"max_position_embeddings\": ";
  const size_t at = config.find(key);
  EXPECT_NE(at, std::string::npos) << config;
  config.replace(at, key.size() + 3, key + "400000");
  std::ofstream(path + "/config.json") << config;
  return path;
}

std::vector<std::string> endless_chat(const std::string& model) {
  return {"generate",
          model,
          "--tokenizer",
          "byte",
          "--chat",
          "--temperature",
          "0",
          "--kv-bytes",
          "700000000",
          "--max-new-tokens",
          "390000",
          "--threads",
          "1"};
}

size_t letters_in(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return c >= 'a' && c <= 'z'; }));
}

TEST(GenerateChat, CtrlCEndsTheReplyAndNotTheChat) {
  const TempFolder folder;
  LiveProgram chat(endless_chat(endless_model(folder)), LiveProgram::Streams::pipes);
  for (int turn = 1; turn <= 2; ++turn) {
    const size_t before = letters_in(chat.printed());
    chat.type("Hello\n");
    ASSERT_TRUE(chat.wait_until([&](const std::string& all) {
      return letters_in(all) > before + 400;
    })) << chat.printed();
    chat.send(SIGINT);
    const std::string wanted = "The reply is stopped.";
    ASSERT_TRUE(chat.wait_until([&](const std::string& all) {
      size_t count = 0;
      for (size_t at = 0; (at = all.find(wanted, at)) != std::string::npos; ++at) ++count;
      return count == static_cast<size_t>(turn);
    })) << chat.printed().substr(chat.printed().size() / 2);
  }
  chat.type("/exit\n");
  EXPECT_EQ(chat.wait(), 0);
}

TEST(GenerateChat, OnATerminalThereIsAPromptAndCtrlCTwiceLeaves) {
  if (!LiveProgram::has_terminals()) GTEST_SKIP() << "needs a pseudo-terminal";
  const TempFolder folder;
  LiveProgram chat(endless_chat(endless_model(folder)), LiveProgram::Streams::terminal);
  ASSERT_TRUE(chat.wait_for("\n> ")) << chat.printed();
  chat.type("Hello\n");
  ASSERT_TRUE(chat.wait_until([](const std::string& all) { return letters_in(all) > 1500; }))
      << chat.printed();
  chat.type("\x03");
  ASSERT_TRUE(chat.wait_for("tokens/s, stopped]")) << chat.printed();
  ASSERT_TRUE(chat.wait_until([](const std::string& all) { return all.ends_with("\n> "); }));
  // Within a fifth of a second two are one, and a terminal drops what is not read yet when the next
  // comes: pressed again until it is seen, with time in between.
  std::chrono::steady_clock::time_point last;
  const auto press = [&] {
    const auto now = std::chrono::steady_clock::now();
    if (now - last < std::chrono::milliseconds(500)) return false;
    last = now;
    chat.type("\x03");
    return false;
  };
  ASSERT_TRUE(chat.wait_until([&](const std::string& all) {
    return contains(all, "Ctrl-C once more leaves") || press();
  })) << chat.printed();
  chat.wait_until([&](const std::string&) { return chat.has_ended() || press(); });
  EXPECT_EQ(chat.wait(), 0);
}

// ---------------------------------------------------------------------------------------------
// Log-probabilities of text

TEST(LogprobsText, AreThoseOfItsIdsWithTotalAndPerplexity) {
  const std::string text = "Hello, w\xC3\xB6rld";
  const RunResult result = logprobs({"--text", text, "--json"});
  ASSERT_EQ(result.code, 0) << result;
  const Document json = json_of(result.out);
  const Document ids = json_of(
      run_program({"logprobs", "--model", kModel, "--tokens", "-"}, {.input = ids_json(text)}).out);
  EXPECT_EQ(text_of(json["logprobs"]), text_of(ids["logprobs"][0]));
  double total = 0;
  for (rapidjson::SizeType t = 1; t < json["logprobs"].Size(); ++t) {
    total += json["logprobs"][t].GetDouble();
  }
  const auto scored = static_cast<double>(text.size() - 1);
  EXPECT_NEAR(json["total"].GetDouble(), total, 1e-5);
  EXPECT_NEAR(json["perplexity"].GetDouble(), std::exp(-total / scored), 1e-3);
  EXPECT_EQ(json["tokens"].Size(), text.size());
  EXPECT_STREQ(json["text"][0].GetString(), "H");

  const RunResult table = logprobs({"--text", text});
  EXPECT_TRUE(contains(table.out, "token") && contains(table.out, "\"H\"")) << table.out;
  EXPECT_TRUE(contains(table.out, "total: 12 tokens, log-probability")) << table.out;
  const RunResult by_file = logprobs({"--text-file", "-"}, text);
  EXPECT_EQ(by_file.out, table.out);
  EXPECT_TRUE(contains(logprobs({"--text", "H"}).out, "no token has a log-probability"));
  EXPECT_TRUE(json_of(logprobs({"--text", "H", "--json"}).out)["perplexity"].IsNull());
}

TEST(LogprobsText, OfAConversationMarkWhatTheModelSamples) {
  const std::string talk =
      R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}])";
  const RunResult result = logprobs({"--messages", "-", "--renderer", "qwen2.5", "--json"}, talk);
  ASSERT_EQ(result.code, 0) << result;
  const Document json = json_of(result.out);
  size_t sampled = 0;
  double total = 0;
  for (rapidjson::SizeType t = 1; t < json["mask"].Size(); ++t) {
    if (json["mask"][t].GetInt() == 0) continue;
    ++sampled;
    total += json["logprobs"][t].GetDouble();
  }
  EXPECT_EQ(json["mask"].Size(), json["tokens"].Size());
  EXPECT_EQ(sampled, 3u) << "Y, o and the end token";
  EXPECT_EQ(json["sampled"]["tokens"].GetUint(), 3u);
  EXPECT_NEAR(json["sampled"]["total"].GetDouble(), total, 1e-5);
  const RunResult table = logprobs({"--messages", "-", "--renderer", "qwen2.5"}, talk);
  EXPECT_TRUE(contains(table.out, "sampled: 3 tokens")) << table.out;
}

TEST(LogprobsText, RefusesWhatCannotBe) {
  expect_mistake(logprobs({}), {"--text", "--messages", "--tokens"});
  expect_mistake(logprobs({"--text", ""}), {"--text", "empty"});
  expect_mistake(logprobs({"--text", std::string(513, 'a')}), {"--text", "513", "512"});
  expect_mistake(logprobs({"--text", "a", "--text-file", "b"}), {"one of"});
  expect_mistake(logprobs({"--text-file", "no/such.txt"}), {"no/such.txt"});
  expect_mistake(logprobs({"--text", "a", "--renderer", "qwen3"}), {"--renderer"});
  expect_mistake(logprobs({"--tokens", "-"}, R"({"tokens": []})"), {"--tokenizer"});
  expect_mistake(run_program({"logprobs", kModel, "--tokens", "-", "--json"}), {"--json"});
  expect_mistake(run_program({"logprobs", kModel, "--text", "a"}), {"tokenizer.json", "--tokens"});
}

}  // namespace
}  // namespace leeway
