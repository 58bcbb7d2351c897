// `leeway import`: dumps of other trainers and rollouts of a run as batches.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "base/files.h"
#include "cli_helpers.h"

namespace leeway {
namespace {

const char* const kExport =
    R"({"schema_version":1,"step":3,"rank":0,"micro_step":0,"micro_sequence_idx":0,)"
    R"("export_sequence_idx":0,"env_name":"sort","token_ids":[5,6,7,8],"position_ids":[0,1,2,3],)"
    R"("loss_mask":[false,true,true,true],"advantages":[0.5,0.5,0.5,0.5],)"
    R"("inference_logprobs":[0.0,-1.0,-2.0,-0.5],"trainer_logprobs":[-3.0,-1.1,-1.0,-0.6],)"
    R"("entropy":[1,1,1,1],"rl_weights":[null,null,null,null]})";

RunResult import(const std::string& kind, const std::string& path, const std::string& output) {
  return run_program({"import", kind, path, "--output", output});
}

TEST(Import, ReadsPrimeRlsTokenExports) {
  const TempFolder folder;
  const std::string step = folder / "token_exports/step_3";
  std::filesystem::create_directories(step);
  write_file_atomically(step + "/rank_0.jsonl", std::string(kExport) + "\n");
  std::string second = kExport;
  second.replace(second.find("\"rl_weights\":[null,null,null,null]"), 34,
                 "\"rl_weights\":[0,1,2,0],\"ce_weights\":[0,0,0,1]");
  write_file_atomically(step + "/rank_1.jsonl", second + "\n");
  const std::string output = folder / "batch.json";
  const RunResult result = import("prime-rl", step, output);
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_EQ(result.out, "");
  for (const char* words :
       {"2 sequences, 6 trained tokens", "prox, ref or teacher", "STABLE", "ce_weights"}) {
    EXPECT_TRUE(contains(result.err, words)) << words << ": " << result.err;
  }
  const Document batch = json_of(read_file(output));
  EXPECT_EQ(batch["sequences"][0]["rollout"][2].GetDouble(), -2.0);
  EXPECT_EQ(batch["sequences"][0]["weights"][0].GetDouble(), 0.0);  // the prompt
  EXPECT_EQ(batch["sequences"][1]["weights"][2].GetDouble(), 2.0);
  const RunResult loss = run_program({"loss", "eval", "--preset", "icepop", "--batch", output});
  ASSERT_EQ(loss.code, 0) << loss;
  // -A r over the trained tokens of both, the second weighted 1, 2, 0: five of six take part.
  const double r1 = std::exp(-0.1), r2 = std::exp(1.0), r3 = std::exp(-0.1);
  EXPECT_NEAR(json_of(loss.out)["loss"].GetDouble(), -0.5 * (r1 + r2 + r3 + r1 + 2 * r2) / 5.0,
              1e-12);
  EXPECT_EQ(run_program({"loss", "compare", "--batch", output}).code, 0);
}

TEST(Import, ReadsRolloutsOfARun) {
  const TempFolder folder;
  write_file_atomically(
      folder / "step_1.jsonl",
      R"({"group":0,"advantage":1.0,"batch_rollouts":2,"samples":[{"pi":[-1,-2],"rollout":[-1,-2],)"
      R"("loss_mask":[0,1],"versions":[0,0]}]})"
      "\n");
  const RunResult result = import("leeway", folder / "step_1.jsonl", folder / "batch.json");
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "1 of the batch's 2 rollouts")) << result;
  EXPECT_EQ(
      run_program({"loss", "eval", "--preset", "icepop", "--batch", folder / "batch.json"}).code,
      0);
}

// Tensors are stood in for by lists that have tolist().
TEST(Import, TheFunctionOfThePageWritesBatchesOfVerlAndTrl) {
  const TempFolder folder;
  const std::string page = read_file(LEEWAY_SOURCE_DIR "/docs/corrections.md");
  const std::string opening = "```python\n";
  const size_t begin = page.find(opening) + opening.size();
  ASSERT_NE(page.find("def write_batch", begin), std::string::npos);
  const std::string code = page.substr(begin, page.find("```", begin) - begin) + R"python(
class Tensor(list):
    def tolist(self): return [list(row) if isinstance(row, list) else row for row in self]
two = lambda a, b: Tensor([[a, b], [a, b]])
write_batch("verl.json", {
    "old_log_probs": two(-0.5, -1.0), "rollout_log_probs": two(-0.6, -1.2),
    "advantages": Tensor([[1.0, 1.0], [-1.0, -1.0]]), "response_mask": Tensor([[1, 1], [1, 0]])})
write_batch("trl.json", {
    "old_per_token_logps": two(-0.5, -1.0), "sampling_per_token_logps": two(-0.6, -1.2),
    "ref_per_token_logps": None, "advantages": Tensor([1.0, -1.0]),
    "completion_mask": Tensor([[1, 1], [1, 0]])})
)python";
  write_file_atomically(folder / "write.py", code);
  const std::string run = "cd '" + folder.path().string() + "' && python3 write.py";
  ASSERT_EQ(std::system(run.c_str()), 0);
  for (const char* name : {"verl.json", "trl.json"}) {
    const RunResult compared =
        run_program({"loss", "compare", "--batch", folder / name, "--preset", "grpo+tis"});
    ASSERT_EQ(compared.code, 0) << compared;
    EXPECT_TRUE(contains(compared.out, "3 trained tokens in 2 sequences")) << compared;
  }
  EXPECT_EQ(
      run_program({"loss", "eval", "--preset", "icepop", "--batch", folder / "verl.json"}).out,
      run_program({"loss", "eval", "--preset", "icepop", "--batch", folder / "trl.json"}).out);
}

TEST(Import, SaysWhatIsWrongWithADump) {
  const TempFolder folder;
  const auto refused = [&](const std::string& kind, const std::string& path,
                           const std::vector<std::string>& words) {
    const RunResult result = import(kind, path, folder / "batch.json");
    EXPECT_EQ(result.code, 2) << result;
    for (const std::string& word : words) {
      EXPECT_TRUE(contains(result.err, word)) << word << " is not in " << result.err;
    }
    EXPECT_FALSE(std::filesystem::exists(folder / "batch.json"));
  };
  refused("prime", "x", {"there is no kind prime", "prime-rl, slime and leeway"});
  refused("prime-rl", folder / "missing.jsonl", {"missing.jsonl"});
  refused("slime", folder / "missing.pt", {"missing.pt", "no such file"});
  std::filesystem::create_directories(folder / "empty");
  refused("prime-rl", folder / "empty", {"rank_R.jsonl", "step_10"});
  const auto line = [&](const std::string& text, const std::vector<std::string>& words) {
    write_file_atomically(folder / "rank_0.jsonl", text + "\n");
    refused("prime-rl", folder / "rank_0.jsonl", words);
  };
  line("{", {"rank_0.jsonl line 1"});
  line("[]", {"line 1", "is not an object"});
  line(R"({"schema_version":7})", {"line 1", "schema_version 1"});
  line(R"({"schema_version":1,"trainer_logprobs":[1]})", {"\"inference_logprobs\" is missing"});
  std::string uneven = kExport;
  uneven.replace(uneven.find("\"advantages\":[0.5,"), 18, "\"advantages\":[");
  line(uneven, {"different lengths"});
  std::string none = kExport;
  none.replace(none.find("[false,true,true,true]"), 22, "[false,false,false,false]");
  line(none, {"contains no sequence"});
}

}  // namespace
}  // namespace leeway
