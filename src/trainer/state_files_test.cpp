#include "trainer/state_files.h"

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>

#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::bytes_of;
using testing::make_policy;
using testing::rolled_out;
using testing::same_bits;
using testing::small_table;
using testing::spec_of;
using testing::TestFolder;

TrainerTable scheduled_table() {
  TrainerTable table = small_table();
  table.optimizer.schedule = RateSchedule::cosine;
  table.optimizer.warmup_steps = 2;
  table.optimizer.weight_decay = 0.1;
  table.max_steps = 6;
  return table;
}

TEST(TrainerState, GoesOnAsIfNothingHadHappened) {
  const Parameters policy = make_policy();
  const TestFolder folder;
  Trainer first(policy, spec_of("icepop"), scheduled_table());
  for (uint64_t batch = 0; batch < 3; ++batch) first.train_batch(rolled_out(policy, batch, 8));
  first.save(folder.path());
  Trainer second(make_policy(99), spec_of("icepop"), scheduled_table());
  second.load(folder.path());
  EXPECT_EQ(second.optimizer_steps(), 3);
  EXPECT_TRUE(same_bits(first.parameters(), second.parameters()));
  for (uint64_t batch = 3; batch < 5; ++batch) {
    const std::vector<Sample> samples = rolled_out(policy, batch, 8);
    const BatchResult a = first.train_batch(samples), b = second.train_batch(samples);
    EXPECT_EQ(a.learning_rate, b.learning_rate);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_TRUE(same_bits(first.parameters(), second.parameters()));
  }
}

TEST(TrainerState, IsAModelFolderToo) {
  const Parameters policy = make_policy();
  const TestFolder folder;
  Trainer trainer(policy, spec_of("icepop"), small_table());
  trainer.train_batch(rolled_out(policy, 1, 8));
  trainer.save(folder.path());
  EXPECT_TRUE(same_bits(load_parameters(folder.path()), trainer.parameters()));
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"config.json", "model.safetensors",
                                                      "optimizer.safetensors", "trainer.json"}));
}

TEST(TrainerState, ThatIsBrokenIsRefusedAndChangesNothing) {
  const Parameters policy = make_policy();
  const auto save_with = [&](const TestFolder& folder, const std::function<void(AdamW&)>& spoil) {
    AdamW optimizer(policy.config());
    spoil(optimizer);
    save_state(folder.path(), policy, optimizer);
  };
  const auto cut = [](const std::string& path) {
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
  };
  const auto state = [](const std::string& steps) {
    return "{\"format\": 1, \"optimizer_steps\": " + steps + "}";
  };
  struct Case {
    std::function<void(const TestFolder&)> spoil;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {[](const TestFolder& f) { std::filesystem::remove(f.at("trainer.json")); },
       {"trainer.json"}},
      {[](const TestFolder& f) { std::filesystem::remove(f.at("optimizer.safetensors")); },
       {"optimizer.safetensors"}},
      {[](const TestFolder& f) { std::filesystem::remove(f.at("model.safetensors")); },
       {"model.safetensors"}},
      {[](const TestFolder& f) { std::filesystem::remove(f.at("config.json")); }, {"config.json"}},
      {[](const TestFolder& f) { f.write("trainer.json", "{"); }, {"trainer.json", "line 1"}},
      {[](const TestFolder& f) { f.write("trainer.json", "[]"); }, {"trainer.json", "format"}},
      {[](const TestFolder& f) { f.write("trainer.json", "{\"format\": 2}"); },
       {"trainer.json", "format"}},
      {[](const TestFolder& f) { f.write("trainer.json", "{\"format\": 1}"); },
       {"trainer.json", "optimizer_steps"}},
      {[&](const TestFolder& f) { f.write("trainer.json", state("-1")); }, {"optimizer_steps"}},
      {[&](const TestFolder& f) { f.write("trainer.json", state("1.5")); }, {"optimizer_steps"}},
      {[&](const TestFolder& f) { f.write("trainer.json", state("1e300")); }, {"optimizer_steps"}},
      {[&](const TestFolder& f) { f.write("trainer.json", state("NaN")); }, {"optimizer_steps"}},
      {[&](const TestFolder& f) { cut(f.at("optimizer.safetensors")); }, {"optimizer.safetensors"}},
      {[&](const TestFolder& f) { cut(f.at("model.safetensors")); }, {"model.safetensors"}},
      {[&](const TestFolder& f) {
         save_with(f, [](AdamW& adam) { adam.first_moment().of(2)[1] = testing::kNan; });
       },
       {"optimizer.safetensors", "m." + policy.table()[2].name}},
      {[&](const TestFolder& f) {
         save_with(f, [](AdamW& adam) { adam.second_moment().of(0)[1] = HUGE_VALF; });
       },
       {"optimizer.safetensors", "v." + policy.table()[0].name}},
      {[&](const TestFolder& f) {
         save_with(f, [](AdamW& adam) { adam.second_moment().of(0)[1] = -1.0f; });
       },
       {"optimizer.safetensors", "v." + policy.table()[0].name, "negative"}},
      {[&](const TestFolder& f) {
         std::filesystem::copy_file(f.at("model.safetensors"), f.at("optimizer.safetensors"),
                                    std::filesystem::copy_options::overwrite_existing);
       },
       {"optimizer.safetensors", "m."}},
      {[](const TestFolder& f) {
         ModelConfig config = testing::small_config(Family::llama);
         config.num_hidden_layers = 3;
         save_state(f.path(), testing::small_parameters(config), AdamW(config));
       },
       {"different model"}},
      {[](const TestFolder& f) {  // the same shapes, cut into other heads
         ModelConfig config = testing::small_config(Family::llama);
         config.num_attention_heads = 8, config.num_key_value_heads = 4, config.head_dim = 4;
         save_state(f.path(), testing::small_parameters(config), AdamW(config));
       },
       {"different model"}},
      {[](const TestFolder& f) {
         ModelConfig config = testing::small_config(Family::llama);
         config.rope_theta = 5e5;
         save_state(f.path(), testing::small_parameters(config), AdamW(config));
       },
       {"different model"}},
  };
  Trainer control(policy, spec_of("icepop"), small_table());
  control.train_batch(rolled_out(policy, 1, 8));
  const Parameters before = control.parameters();
  control.train_batch(rolled_out(policy, 2, 8));
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const TestFolder folder;
    Trainer trainer(policy, spec_of("icepop"), small_table());
    trainer.save(folder.path());
    cases[i].spoil(folder);
    trainer.train_batch(rolled_out(policy, 1, 8));
    testing::expect_refused([&] { trainer.load(folder.path()); }, cases[i].words);
    EXPECT_TRUE(same_bits(trainer.parameters(), before));
    EXPECT_EQ(trainer.optimizer_steps(), 1);
    trainer.train_batch(rolled_out(policy, 2, 8));
    EXPECT_TRUE(same_bits(trainer.parameters(), control.parameters()));
  }
}

TEST(TrainerState, OfAFolderThatCannotBeWrittenIsRefused) {
  const TestFolder folder;
  const std::string file = folder.write("file", "text");
  const Trainer trainer(make_policy(), spec_of("icepop"), small_table());
  testing::expect_refused([&] { trainer.save(file + "/below"); }, {"file"});
  EXPECT_EQ(bytes_of(file), "text");
}

TEST(TrainerState, IsACopyThatTrainingDoesNotChange) {
  const Parameters policy = make_policy();
  const TestFolder folder;
  Trainer trainer(policy, spec_of("icepop"), scheduled_table());
  trainer.train_batch(rolled_out(policy, 0, 8));
  const TrainingState state = trainer.state();
  EXPECT_TRUE(same_bits(state.policy, trainer.parameters()));
  trainer.train_batch(rolled_out(policy, 1, 8));
  EXPECT_FALSE(same_bits(state.policy, trainer.parameters()));
  const FileSums sums = save_state(folder.path(), state.policy, state.optimizer);
  EXPECT_NO_THROW(check_sums(folder.path(), sums));
  EXPECT_EQ(sums.size(), folder.names().size());
  TrainingState loaded{policy, AdamW(policy)};
  load_state(folder.path(), loaded.policy, loaded.optimizer);
  EXPECT_TRUE(same_bits(loaded.policy, state.policy));
  EXPECT_TRUE(same_bits(loaded.optimizer.first_moment(), state.optimizer.first_moment()));
  EXPECT_TRUE(same_bits(loaded.optimizer.second_moment(), state.optimizer.second_moment()));
  EXPECT_EQ(loaded.optimizer.steps(), 1);
}

TEST(TrainerState, ThatIsNotFiniteIsNamedAndNotSaved) {
  const Parameters policy = make_policy();
  TrainingState state{policy, AdamW(policy.config())};
  EXPECT_EQ(not_finite_text(state), "");
  state.optimizer.second_moment().of(1)[3] = std::numeric_limits<float>::infinity();
  const std::string name = policy.table()[1].name;
  EXPECT_EQ(not_finite_text(state).find("the second moment of " + name + " holds inf at ["), 0u)
      << not_finite_text(state);
  state.optimizer.first_moment().of(0)[0] = std::nanf("");
  EXPECT_EQ(not_finite_text(state).find("the first moment of "), 0u) << not_finite_text(state);
  state.policy.of(0)[0] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(not_finite_text(state).find(policy.table()[0].name + " holds -inf at [0, 0]"), 0u)
      << not_finite_text(state);

  // An epsilon that is 0 as a float divides by zero where there was no gradient.
  TrainerTable table = small_table();
  table.optimizer.epsilon = 1e-60;
  Trainer trainer(policy, spec_of("icepop"), table);
  trainer.train_batch(rolled_out(policy, 0, 8));
  const TestFolder folder;
  testing::expect_refused([&] { trainer.save(folder.path()); }, {"not saved", "holds"});
  EXPECT_TRUE(folder.names().empty());
}

}  // namespace
}  // namespace leeway
