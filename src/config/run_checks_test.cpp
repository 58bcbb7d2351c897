// Constraints between keys: every contradiction and every key without effect is refused.

#include <gtest/gtest.h>

#include "config/test_support.h"

namespace leeway {
namespace {

struct Case {
  std::string text;
  std::vector<std::string> says;
};

void expect_refused(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    expect_words(error_of(c.text), c.says);
  }
}

void expect_taken(const std::vector<std::string>& texts) {
  for (const std::string& text : texts) EXPECT_EQ(error_of(text), "") << text;
}

TEST(RunChecks, AModelHasAFolderOrAShape) {
  for (const char* key :
       {"model_type = \"llama\"", "vocab_size = 9", "hidden_size = 96", "intermediate_size = 9",
        "num_hidden_layers = 2", "num_attention_heads = 4", "num_key_value_heads = 2",
        "head_dim = 24", "max_position_embeddings = 9", "rms_norm_eps = 1", "rope_theta = 9",
        "tie_word_embeddings = false"}) {
    expect_refused({{std::string("[model]\npath = \"m\"\n") + key + "\n",
                     {"run.toml line 3: model.", key, "model.path = \"m\"", "leave out"}},
                    {std::string("[model]\n") + key + "\npath = \"m\"\n", {"line 2", key}}});
    expect_taken({std::string("[model]\n") + key + "\n",
                  std::string("[model]\npath = \"\"\n") + key + "\n"});
  }
  expect_taken({"[model]\npath = \"m\"\ntokenizer = \"byte\"\n"});
}

TEST(RunChecks, AProgramTakesThePlaceOfAnAdvantage) {
  const std::string command = "[orchestrator]\nadvantage_command = \"p\"\n";
  expect_refused(
      {{command + "advantage = \"none\"\n",
        {"line 3", "orchestrator.advantage = \"none\"", "inert", "orchestrator.advantage_command"}},
       {command + "length_penalty = 0.5\n", {"line 3", "orchestrator.length_penalty", "inert"}},
       {"[orchestrator]\nadvantage_timeout = 5\n",
        {"line 2", "orchestrator.advantage_timeout", "inert", "orchestrator.advantage_command"}},
       {command + "advantage_timeout = 0\n", {"line 3", "above 0"}}});
  expect_taken({command, command + "advantage_timeout = 5\nfilter_zero_advantages = true\n",
                "[orchestrator]\nadvantage = \"none\"\n",
                "[orchestrator]\nadvantage = \"batch_mean\"\nlength_penalty = 0.5\n"});
}

TEST(RunChecks, AGroupOfOneNeedsAnAdvantageThatDoesNotCompareItsRollouts) {
  const std::string one = "[orchestrator]\ngroup_size = 1\n";
  for (const char* kind :
       {"group_mean", "group_deviation", "leave_one_out", "max_rl", "reinforce_pp"}) {
    expect_refused({{one + "advantage = \"" + kind + "\"\n",
                     {"line 2", "orchestrator.group_size = 1", kind, "every advantage is 0",
                      "at least 2", "\"batch_mean\" or \"none\""}}});
  }
  expect_refused({{one, {"line 2", "orchestrator.group_size = 1", "\"group_mean\""}}});
  expect_taken({one + "advantage = \"batch_mean\"\n", one + "advantage = \"none\"\n",
                one + "advantage_command = \"p\"\n",
                one + "[[environment]]\nname = \"process\"\ncommand = \"p\"\n",
                one + "[trainer]\nteacher = \"t\"\n[trainer.loss]\nteacher_tau = 0.5\n"});
}

TEST(RunChecks, APoolHasItsServersAndItsKeys) {
  const std::string table = "[inference]\n", listed = table + "pool = \"static\"\n";
  const std::string named = table + "pool = \"elastic\"\n";
  const std::string urls = "base_url = [\"http://a:1\", \"https://b:2/v1\"]\n";
  const std::string one = listed + "base_url = \"http://a:1\"\n";
  expect_taken({table, table + "pool = \"in_process\"\n", listed + urls, one,
                listed + urls + "admin_base_url = [\"http://a:3\", \"http://b:4\"]\n",
                named + "hostname = \"h\"\n", one + "dialect = \"vllm\"\ndp_rank_count = 4\n",
                one + "headers = [\"X-Team: rl\"]\napi_key_var = \"KEY\"\n",
                one + "[rollout]\nkv_bytes = 4096\n"});
  expect_refused(
      {{listed, {"line 2", "inference.base_url"}},
       {named, {"line 2", "inference.hostname"}},
       {listed + "base_url = []\n", {"line 3", "a list of servers"}},
       {table + urls, {"line 2", "inference.base_url", "inert", "in_process"}},
       {table + "sync_interval = 3\n", {"line 2", "inert"}},
       {named + "hostname = \"h\"\n" + urls, {"line 4", "inference.pool = \"static\""}},
       {one + "port = 9\n", {"line 4", "inference.pool = \"elastic\""}},
       {listed + urls + "admin_base_url = \"http://a:3\"\n", {"line 4", "has 1 entries"}},
       {one + "headers = [\"X-Team\"]\n", {"line 4", "Name: value"}},
       {one + "headers = [\"A: b\\nC: d\"]\n", {"line 4", "one line"}},
       {one + "headers = [\"Authorization: x\"]\napi_key_var = \"K\"\n", {"line 4"}},
       {one + "dialect = \"sglang\"\ndp_rank_count = 2\n", {"line 5", "vLLM"}},
       {one + "dialect = \"vllm\"\n[rollout]\ntemperature = 0.7\n",
        {"line 6", "before temperature"}},
       {one + "[rollout]\nprecision = \"int8\"\n", {"line 5", "servers"}},
       {one + "[rollout]\nthreads = 2\n", {"line 5", "servers"}}});
  for (const char* url : {"a:1", "ftp://a", "http://", "http://u:p@a", "http://a?x", "http:///v1",
                          "http://a b", "", "http://a\\nb"}) {
    expect_refused({{listed + "base_url = \"" + url + "\"\n", {"line 3", "http://HOST:PORT"}}});
  }
  expect_refused({{listed + "base_url = [\"http://a\", \"http://a\"]\n", {"line 3", "twice"}}});
}

TEST(RunChecks, HeadsOfAModelDivide) {
  expect_refused(
      {{"[model]\nnum_attention_heads = 3\nhidden_size = 9\n",
        {"line 2", "model.num_attention_heads (3)", "multiple of model.num_key_value_heads (2)"}},
       {"[model]\nnum_key_value_heads = 3\n", {"line 2: model.num_key_value_heads = 3"}},
       {"[model]\nhidden_size = 97\n",
        {"line 2", "model.hidden_size (97)", "model.num_attention_heads (4)"}},
       {"[model]\nhead_dim = 23\n", {"line 2", "model.head_dim = 23", "even"}},
       {"[model]\nmodel_type = \"gpt2\"\n", {"line 2", "llama, qwen2, qwen3"}}});
  expect_taken({"[model]\nmodel_type = \"qwen3\"\nhidden_size = 97\n",
                "[model]\nnum_attention_heads = 8\nnum_key_value_heads = 8\n"});
}

TEST(RunChecks, ADeviceHasItsPrecisionsAndItsKeys) {
  const std::string cuda = "[model]\ndevice = \"cuda\"\n";
  expect_refused(
      {{"[model]\ndevice = \"gpu\"\n",
        {"line 2", "model.device", "cpu, cuda", "did you mean cuda?"}},
       {"[trainer]\nprecision = \"bf16\"\n",
        {"line 2", "trainer.precision", "float32", "model.device = \"cuda\""}},
       {cuda + "[rollout]\nprecision = \"int8\"\n", {"line 4", "rollout.precision", "bf16"}},
       {"[rollout]\nprecision = \"fp8\"\n",
        {"line 2", "rollout.precision", "GPU only", "model.device = \"cuda\"", "int8"}},
       {cuda + "[trainer]\nprecision = \"float32\"\n[rollout]\nprecision = \"fp8\"\n",
        {"rollout.precision", "trainer.precision", "bf16"}},
       {"[trainer]\noptimizer_state = \"int8\"\n",
        {"line 2", "trainer.optimizer_state", "cuda only", "inert", "leave it out"}},
       {cuda + "[trainer]\noptimizer_state = \"int4\"\n", {"line 4", "float32, int8"}},
       {"[trainer]\nsharding = \"weights\"\n",
        {"line 2", "trainer.sharding", "cuda only", "inert", "leave it out"}},
       {cuda + "[trainer]\nsharding = \"all\"\n", {"line 4", "optimizer, weights"}},
       {cuda + "[trainer]\nsharding = \"weights\"\nprecision = \"float32\"\n",
        {"trainer.sharding", "bf16", "leave trainer.precision out"}},
       {cuda + "path = \"m\"\n[model.lora]\nrank = 8\n[trainer]\nsharding = \"weights\"\n",
        {"trainer.sharding", "[model.lora]", "not for adapters"}},
       {"[trainer]\nrecompute_activations = \"all\"\n",
        {"line 2", "one of off, selective, layer; false is off, true is layer"}},
       {"[trainer]\nrecompute_activations = 1\n", {"line 2", "off, selective, layer"}},
       {"[trainer]\ngradient_slots = 6\n",
        {"line 2", "trainer.gradient_slots", "power of two", "4 or 8"}},
       {cuda + "[trainer]\ngradient_slots = 4\n", {"line 4", "trainer.gradient_slots", "inert"}},
       {cuda + "[trainer]\nnumerics = \"fast\"\n", {"line 4", "trainer.numerics", "CPU only"}},
       {cuda + "[trainer]\nthreads = 2\n", {"line 4", "trainer.threads", "inert"}}});
  expect_taken({cuda, cuda + "[trainer]\nprecision = \"bf16\"\n[rollout]\nprecision = \"bf16\"\n",
                cuda + "[trainer]\nprecision = \"float32\"\n",
                cuda + "[rollout]\nprecision = \"fp8\"\n",
                cuda + "[trainer]\noptimizer_state = \"int8\"\n",
                cuda + "[trainer]\nsharding = \"weights\"\n",
                "[trainer]\nrecompute_activations = \"selective\"\n",
                cuda + "[trainer]\nnumerics = \"exact\"\n[rollout]\nprecision = \"auto\"\n",
                "[trainer]\nprecision = \"float32\"\n",
                "[model]\ndevice = \"cpu\"\n[rollout]\nprecision = \"int8\"\n"});
}

TEST(RunChecks, RolloutsHaveTheTrainersPrecisionUnlessToldOtherwise) {
  RunConfig run;
  EXPECT_EQ(rollout_precision(run), Precision::float32);
  EXPECT_TRUE(rollouts_are_exact(run));
  run.rollout.precision = RolloutPrecision::bf16;  // other weights than the CPU trains
  EXPECT_EQ(rollout_precision(run), Precision::bf16);
  EXPECT_FALSE(rollouts_are_exact(run));

  run.model.device = Device::cuda;
  EXPECT_TRUE(rollouts_are_exact(run));
  run.rollout.precision = RolloutPrecision::fp8;
  EXPECT_EQ(rollout_precision(run), Precision::fp8);
  EXPECT_FALSE(rollouts_are_exact(run));
  run.rollout.precision = RolloutPrecision::automatic;
  EXPECT_EQ(rollout_precision(run), Precision::bf16);
  EXPECT_TRUE(rollouts_are_exact(run));
  run.trainer.precision = TrainingPrecision::float32;
  EXPECT_EQ(rollout_precision(run), Precision::float32);
  EXPECT_FALSE(rollouts_are_exact(run));
  run.model.device = Device::cpu, run.trainer.precision = TrainingPrecision::automatic;
  run.trainer.numerics = Numerics::fast;
  EXPECT_FALSE(rollouts_are_exact(run));
}

TEST(RunChecks, AFinalRateNeedsASchedule) {
  for (const std::string table : {"trainer", "sft"}) {
    expect_refused({{"[" + table + "]\nfinal_rate = 0\n",
                     {"line 2", table + ".final_rate", "inert", table + ".schedule", "linear"}},
                    {"[" + table + "]\nfinal_rate = 0.1\nschedule = \"constant\"\n", {"line 2"}}});
    expect_taken({"[" + table + "]\nfinal_rate = 0.1\nschedule = \"cosine\"\n"});
  }
}

TEST(RunChecks, LooksAtTheRewardNeedAReward) {
  for (const std::string key : {"check_every", "check_from", "check_prompts"}) {
    expect_refused(
        {{"[sft]\n" + key + " = 5\n", {"line 2", "sft." + key, "inert", "sft.stop_at_reward"}},
         {"[sft]\n" + key + " = 5\nstop_at_reward = 0\n", {"inert"}}});
    expect_taken({"[sft]\n" + key + " = 5\nstop_at_reward = 0.5\n"});
  }
}

TEST(RunChecks, StepsOfMinibatchesNeedMinibatches) {
  expect_refused({{"[trainer]\noptimizer_steps = \"minibatch\"\n",
                   {"line 2", "inert", "trainer.minibatches = 1"}},
                  {"[trainer]\nminibatches = 1\noptimizer_steps = \"minibatch\"\n", {"line 3"}}});
  expect_taken({"[trainer]\noptimizer_steps = \"minibatch\"\nminibatches = 2\n",
                "[trainer]\noptimizer_steps = \"batch\"\n"});
}

TEST(RunChecks, ATeacherIsGivenWhereTheLossReadsOne) {
  expect_refused({{"[trainer]\nteacher = \"t\"\n",
                   {"line 2", "trainer.teacher = \"t\"", "inert", "trainer.loss.teacher_tau"}},
                  {"[trainer.loss]\nteacher_tau = 0.5\n",
                   {"line 2", "trainer.loss.teacher_tau = 0.5", "trainer.teacher"}},
                  {"[trainer]\nteacher = \"t\"\n[trainer.loss]\nteacher_tau = 0\n", {"line 2"}}});
  expect_taken({"[trainer]\nteacher = \"t\"\n[trainer.loss]\nteacher_tau = 0.5\n"});
}

TEST(RunChecks, AReferenceIsGivenWhereTheLossReadsOne) {
  expect_refused({{"[trainer]\nreference = \"r\"\n",
                   {"line 2", "trainer.reference = \"r\"", "inert", "trainer.loss.preset"}},
                  {"[trainer]\nreference = \"r\"\n[trainer.loss]\npreset = \"grpo\"\n",
                   {"line 2", "ref_kl"}}});
  expect_taken({"[trainer]\nreference = \"initial\"\n",
                "[trainer]\nreference = \"r\"\n[trainer.loss]\npreset = \"grpo\"\nref_kl = 0.1\n"});
}

TEST(RunChecks, AProximalForwardIsSetWhereTheLossReadsProx) {
  for (const std::string value : {"always", "never"}) {
    expect_refused({{"[trainer]\nprox_forward = \"" + value + "\"\n",
                     {"line 2", "trainer.prox_forward", value, "inert", "\"icepop\""}}});
    expect_taken(
        {"[trainer]\nprox_forward = \"" + value + "\"\n[trainer.loss]\npreset = \"ppo\"\n"});
  }
  expect_taken({"[trainer]\nprox_forward = \"auto\"\n"});
}

TEST(RunChecks, AGroupFitsUnderWay) {
  expect_refused({{"[orchestrator]\nmax_inflight = 7\n",
                   {"line 2", "orchestrator.max_inflight (7)", "orchestrator.group_size (8)"}},
                  {"[orchestrator]\ngroup_size = 0\n", {"line 2", "1 to"}}});
  expect_taken({"[orchestrator]\nmax_inflight = 8\n"});
}

TEST(RunChecks, ATemperatureIsZeroOrNotTiny) {
  expect_refused({{"[rollout]\ntemperature = 1e-9\n", {"line 2", "rollout.temperature", "0"}}});
  expect_taken({"[rollout]\ntemperature = 0\n", "[rollout]\ntemperature = 1e-4\n"});
}

TEST(RunChecks, FilesOfRolloutsAreWrittenBeforeTheirGroupsCount) {
  expect_refused({{"[output]\nrollouts_groups = 3\nrollouts_every = 0\n",
                   {"line 2", "output.rollouts_groups", "inert", "output.rollouts_every"}}});
}

TEST(RunChecks, EnvironmentsTakeTheirOwnKeysOnly) {
  const std::string sort = "[[environment]]\nname = \"sort\"\n";
  const std::string sums = "[[environment]]\nname = \"arithmetic\"\n";
  const std::string calculator = "[[environment]]\nname = \"calculator\"\n";
  const std::string file = "[[environment]]\nname = \"jsonl\"\ndata = \"d\"\n";
  const std::vector<std::string> of_sort = {"min_length = 5", "max_length = 5"};
  const std::vector<std::string> of_sums = {"max_operand = 5", "terms = 3", "operators = \"*\""};
  const std::vector<std::string> of_file = {"eval_data = \"e\"", "verifier = \"regex\"",
                                            "prompt_key = \"p\"", "answer_key = \"a\""};
  for (const std::string& key : of_sort) {
    expect_taken({sort + key + "\n"});
    expect_refused({{sums + key + "\n", {"line 3", key, "is a key of environment sort"}},
                    {file + key + "\n", {"line 4", "environment sort", "\"jsonl\""}}});
  }
  for (const std::string& key : of_sums) {
    expect_taken({sums + key + "\n", calculator + key + "\n"});
    expect_refused({{sort + key + "\n", {"line 3", key, "arithmetic and calculator", "\"sort\""}}});
  }
  for (const std::string& key : of_file) {
    expect_taken({file + key + "\n"});
    expect_refused({{calculator + key + "\n", {"line 3", key, "is a key of environment jsonl"}}});
  }
  for (const std::string& environment : {sort, sums, calculator, file}) {
    expect_taken({environment + "id = \"x-1.y_\"\nweight = 0.5\n"});
  }
  expect_taken({calculator + "format_weight = 0.1\n", file + "format_weight = 0.1\n"});
  expect_refused({{sort + "format_weight = 0.1\n", {"line 3", "calculator and jsonl"}}});
}

TEST(RunChecks, EnvironmentsAreWellFormed) {
  const std::string sort = "[[environment]]\nname = \"sort\"\n";
  const std::string sums = "[[environment]]\nname = \"arithmetic\"\n";
  expect_refused(
      {{"\n[[environment]]\n", {"line 2", "environment.0 has no name", "sort", "jsonl"}},
       {"[[environment]]\nname = \"sorts\"\n", {"line 2", "did you mean sort?"}},
       {sort + "min_length = 9\n",
        {"line 3", "environment.0.min_length (9)", "environment.0.max_length (8)"}},
       {sort + "max_length = 3\n", {"line 3", "environment.0.max_length = 3"}},
       {sort + "max_length = 27\n", {"line 3", "1 to 26"}},
       {"[[environment]]\nname = \"jsonl\"\n", {"line 2", "environment.0.data"}},
       {"[[environment]]\nname = \"jsonl\"\ndata = \"\"\n", {"line 3", "environment.0.data"}},
       {"[[environment]]\nname = \"jsonl\"\ndata = \"d\"\nprompt_key = \"answer\"\n",
        {"line 4", "environment.0.answer_key", "differ"}},
       {sums + "operators = \"\"\n", {"line 3", "operators", "not empty"}},
       {sums + "operators = \"+/\"\n", {"line 3", "\"+/\"", "'*'"}},
       {sums + "operators = \"+-+\"\n", {"line 3", "\"+-+\"", "once"}},
       {sums + "operators = \"*\"\nmax_operand = 1000000\nterms = 4\n",
        {"line 4", "environment.0.max_operand", "environment.0.terms", "2^62"}},
       {sort + "weight = 0\n", {"line 3", "above 0"}},
       {sort + "id = \"a/b\"\n", {"line 3", "\"a/b\"", "letters"}},
       {sort + "id = \"all\"\n", {"line 3", "\"all\""}},
       {sort + "id = \"a\"\n" + sums + "id = \"a\"\n",
        {"line 6", "environment.0.id and environment.1.id", "\"a\""}},
       {sort + "id = \"sort_2\"\n" + sort, {"line 5", "sort_2"}}});
  expect_taken({sums + "operators = \"*-+\"\n", sums + "max_operand = 1000000\nterms = 4\n"});
}

const std::string kRenderer = "[orchestrator.renderer]\nname = \"qwen3\"\n";

TEST(RunChecks, ThinkingHasTwoSpellingsThatMustAgree) {
  struct Said {
    std::string text;
    bool all, between;
  };
  for (const Said& said : std::vector<Said>{
           {"", false, false},
           {"thinking_retention = \"last\"\n", false, false},
           {"thinking_retention = \"all\"\n", true, false},
           {"thinking_retention = \"between_tool_calls\"\n", false, true},
           {"preserve_all_thinking = true\nthinking_retention = \"all\"\n", true, false},
           {"preserve_thinking_between_tool_calls = true\nthinking_retention = \"all\"\n", true,
            true},
           {"thinking_retention = \"last\"\npreserve_all_thinking = false\n", false, false}}) {
    SCOPED_TRACE(said.text);
    const Config config = parse(kRenderer + said.text);
    EXPECT_EQ(config.renderer.preserve_all_thinking, said.all);
    EXPECT_EQ(config.renderer.preserve_thinking_between_tool_calls, said.between);
    // The dump says it in flags alone, so that --set on it contradicts nothing.
    const std::string dump = config_toml(config);
    EXPECT_EQ(dump.find("thinking_retention"), std::string::npos);
    EXPECT_EQ(values_of(parse(dump)), values_of(config));
  }
  EXPECT_EQ(parse(kRenderer + "preserve_all_thinking = true\n").renderer.thinking_retention,
            KeptThinking::all);
  EXPECT_EQ(origin_of(parse(kRenderer + "thinking_retention = \"all\"\n"),
                      "orchestrator.renderer.preserve_all_thinking"),
            "run.toml line 3");
  expect_refused(
      {{kRenderer + "thinking_retention = \"last\"\npreserve_all_thinking = true\n",
        {"line 3", "orchestrator.renderer.thinking_retention = \"last\"",
         "orchestrator.renderer.preserve_all_thinking = true (run.toml line 4)", "leave one"}},
       {kRenderer + "thinking_retention = \"all\"\npreserve_all_thinking = false\n",
        {"thinking_retention = \"all\"", "preserve_all_thinking = false"}},
       {kRenderer + "thinking_retention = \"between_tool_calls\"\npreserve_all_thinking = true\n",
        {"thinking_retention", "preserve_all_thinking = true"}},
       {kRenderer + "thinking_retention = \"last\"\n"
                    "preserve_thinking_between_tool_calls = true\n",
        {"thinking_retention", "preserve_thinking_between_tool_calls = true"}},
       {kRenderer + "thinking_retention = \"some\"\n", {"line 3", "last, between_tool_calls, all"}},
       {"[orchestrator.renderer]\nthinking_retention = \"all\"\n", {"line 2", "inert without"}}});
}

TEST(RunChecks, AutoTakesTheRendererOfAFolder) {
  expect_refused({{"[orchestrator.renderer]\nname = \"auto\"\n",
                   {"run.toml line 2: orchestrator.renderer.name = \"auto\"", "model.path"}}});
  expect_taken({"[model]\npath = \"m\"\n[orchestrator.renderer]\nname = \"auto\"\n"});
}

TEST(RunChecks, EnvironmentsWithoutAnIdAreCalledByNameAndNumber) {
  auto ids = [](const std::string& text) {
    std::string out;
    for (const EnvironmentTable& table :
         parse_config(catalog, "a", text, {}, ConfigScope::whole).run.environments) {
      out += table.id + " ";
    }
    return out;
  };
  const std::string sort = "[[environment]]\nname = \"sort\"\n";
  const std::string sums = "[[environment]]\nname = \"arithmetic\"\n";
  EXPECT_EQ(ids(sort), "sort ");
  EXPECT_EQ(ids(sort + sums), "sort arithmetic ");
  EXPECT_EQ(ids(sort + sums + sort), "sort_1 arithmetic sort_2 ");
  EXPECT_EQ(ids(sort + "id = \"sort\"\n" + sort), "sort sort_2 ");
}

}  // namespace
}  // namespace leeway
