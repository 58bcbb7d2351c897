// `leeway serve` as a program: its options, its signals, and the client that OpenAI publishes.

#include <gtest/gtest.h>

#include <fstream>
#include <regex>

#include "base/files.h"
#include "base/test_folder.h"
#include "cli_helpers.h"
#include "live_program.h"
#include "python_packages.h"
#include "server/chain_model.h"
#include "server/test_support.h"

namespace leeway {
namespace {

using namespace testing;

// A folder with a model that thinks, calls a tool and ends, and the chat format of qwen3.
void write_model(const std::string& folder) {
  const std::vector<std::string> controls = chain_tokens(control_tokens_of("qwen3"));
  save_parameters(tool_calling_weights(controls), folder);
  JsonWriter card;
  card.begin_object().key("format").value(1.0).key("tokenizer").value("byte");
  card.key("control_tokens").begin_array();
  for (const std::string& token : controls) card.value(token);
  card.end_array().key("renderer").begin_object().key("name").value("qwen3");
  card.key("preserve_all_thinking").value(false);
  card.key("preserve_thinking_between_tool_calls").value(false);
  card.end_object().end_object();
  write_file_atomically(folder + "/leeway.json", card.text());
}

// The port of a server that says that it listens; 0 if it does not.
int port_of(LiveProgram& program) {
  static const std::regex kLine("listening on http://127\\.0\\.0\\.1:([0-9]+)\n");
  std::smatch match;
  std::string printed;
  program.wait_until([&](const std::string& all) { return contains(all, "\n"); });
  printed = program.printed();
  return std::regex_search(printed, match, kLine) ? std::stoi(match[1]) : 0;
}

class ServeProgram : public ::testing::Test {
 protected:
  ServeProgram() { write_model(model_); }
  std::vector<std::string> command(std::vector<std::string> more = {}) const {
    std::vector<std::string> args = {"serve", model_, "--port", "0", "--threads", "1"};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  TestFolder folder_;
  std::string model_ = folder_.at("model");
};

TEST_F(ServeProgram, AnswersAndEndsWithSigterm) {
  LiveProgram program(command(), LiveProgram::Streams::pipes);
  const int port = port_of(program);
  ASSERT_NE(port, 0) << program.printed();
  TestClient client(port);
  EXPECT_EQ(client.get("/health").status, 200);
  const HttpReply reply = client.post("/v1/completions", R"({"prompt": "a", "max_tokens": 2})");
  EXPECT_EQ(reply.status, 200) << reply.body;
  program.send(SIGTERM);
  EXPECT_EQ(program.wait(), 0) << program.printed();
  EXPECT_FALSE(client.read_some());
}

TEST_F(ServeProgram, AnswersWhatItHasBegunAndASecondSignalEndsIt) {
  const std::string body =
      R"({"token_ids": [1], "sampling_params": {"max_tokens": 900, "n": 100, "temperature": 0}})";
  const std::string request =
      "POST /inference/v1/generate HTTP/1.1\r\nContent-Length: " + std::to_string(body.size()) +
      "\r\n\r\n" + body;
  for (const bool twice : {false, true}) {
    LiveProgram program(command(), LiveProgram::Streams::pipes);
    const int port = port_of(program);
    ASSERT_NE(port, 0) << program.printed();
    TestClient client(port), watcher(port);
    client.send(request);
    ASSERT_TRUE(soon([&] { return metric(watcher, "leeway_requests") == 1; }));
    program.send(SIGTERM);
    ASSERT_TRUE(program.wait_for("once more to end at once"));
    if (twice) {
      program.send(SIGINT);
      EXPECT_EQ(program.wait(), 128 + SIGINT);
    } else {
      EXPECT_EQ(client.reply().status, 200);
      EXPECT_EQ(program.wait(), 0) << program.printed();
    }
  }
}

TEST_F(ServeProgram, TakesItsKeyFromAFileAndNeverShowsIt) {
  const std::string key = folder_.write("key", "s3cret-key\n");
  LiveProgram program(command({"--api-key-file", key}), LiveProgram::Streams::pipes);
  const int port = port_of(program);
  ASSERT_NE(port, 0) << program.printed();
  TestClient client(port);
  EXPECT_EQ(client.get("/v1/models").status, 401);
  EXPECT_EQ(client.call("GET", "/v1/models", "", "Authorization: Bearer s3cret-key\r\n").status,
            200);
  program.send(SIGTERM);
  EXPECT_EQ(program.wait(), 0);
  EXPECT_FALSE(contains(program.printed(), "s3cret"));
}

TEST_F(ServeProgram, RefusesWhatItCannotUse) {
  const auto refused = [&](const std::vector<std::string>& more, const std::string& words) {
    const RunResult result = run_program(command(more));
    EXPECT_EQ(result.code, 2) << result;
    EXPECT_TRUE(contains(result.err, words)) << result;
  };
  refused({"--host", "no.such.host.invalid"}, "no.such.host.invalid");
  refused({"--weights-root", folder_.at("nowhere")}, "nowhere");
  refused({"--device-weights"}, "--device cuda");
  refused({"--api-key-file", folder_.at("none")}, "none");
  refused({"--api-key-file", folder_.write("empty", "\n")}, "empty");
  refused({"--renderer", "qwen9"}, "qwen9");
  const RunResult missing = run_program({"serve", folder_.at("no_model")});
  EXPECT_EQ(missing.code, 2) << missing;
  LiveProgram program(command(), LiveProgram::Streams::pipes);
  const int port = port_of(program);
  ASSERT_NE(port, 0);
  const RunResult taken = run_program({"serve", model_, "--port", std::to_string(port)});
  EXPECT_EQ(taken.code, 2) << taken;
  EXPECT_TRUE(contains(taken.err, std::to_string(port))) << taken;
  program.send(SIGTERM);
  EXPECT_EQ(program.wait(), 0);
}

// ---------------------------------------------------------------------------------------------

class ServedClients : public ServeProgram {
 protected:
  // Runs a test in Python, which gets the URL and the key.
  void run_client(const PythonPackages& packages, const std::string& script) {
    if (!packages.skip.empty()) GTEST_SKIP() << packages.skip;
    ASSERT_FALSE(packages.program.empty());
    const std::string key = folder_.write("key", "k3y");
    LiveProgram program(command({"--api-key-file", key, "--name", "chain"}),
                        LiveProgram::Streams::pipes);
    const int port = port_of(program);
    ASSERT_NE(port, 0) << program.printed();
    const RunResult result = python({LEEWAY_SOURCE_DIR "/tests/python/" + script,
                                     "http://127.0.0.1:" + std::to_string(port) + "/v1", "k3y"},
                                    packages.program, std::chrono::seconds(300));
    EXPECT_EQ(result.code, 0) << result;
    program.send(SIGTERM);
    EXPECT_EQ(program.wait(), 0);
  }
};

TEST_F(ServedClients, TheClientOfOpenAI) {
  run_client(python_packages("python_openai", {"openai==3.49.0"}), "openai_client_test.py");
}

TEST_F(ServedClients, TasksetsOfVerifiers) {
  run_client(environment_packages(), "taskset_client_test.py");
}

}  // namespace
}  // namespace leeway
