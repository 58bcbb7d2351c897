// Adapters in PEFT's layout, in and out.

#include "model/adapter_io.h"

#include <fmt/format.h>

#include <limits>
#include <map>

#include "base/files.h"
#include "base/folders.h"
#include "model/test_configs.h"

namespace leeway {
namespace {

using testing::edited;
using testing::expect_refused;
using testing::small_config;
using testing::TestFolder;

std::shared_ptr<const Parameters> base_of(Family family) {
  return std::make_shared<const Parameters>(testing::small_parameters(small_config(family)));
}

Parameters some_adapter(std::shared_ptr<const Parameters> base, const std::string& base_path = "") {
  Parameters adapter(
      std::move(base),
      {.rank = 3, .alpha = 6.0, .targets = {"q_proj", "up_proj"}, .base_path = base_path});
  Rng rng(4);
  for (float& value : adapter.flat()) value = static_cast<float>(rng.normal());
  return adapter;
}

TEST(AdapterIo, SavesAndLoadsEveryBit) {
  const auto base = base_of(Family::qwen3);
  const Parameters adapter = some_adapter(base, "/models/base");
  const TestFolder folder;
  const FileSums sums = save_parameters(adapter, folder.path());
  EXPECT_EQ(sums.size(), 3u);
  EXPECT_TRUE(is_adapter_folder(folder.path()));
  EXPECT_TRUE(is_complete_folder(folder.path()));
  const Parameters loaded = load_adapter(folder.path(), base);
  for (size_t i = 0; i < adapter.table().size(); ++i) {
    EXPECT_TRUE(std::equal(adapter.of(i).begin(), adapter.of(i).end(), loaded.of(i).begin()));
  }
  EXPECT_TRUE(loaded.lora()->same_network(*adapter.lora()));
  EXPECT_EQ(loaded.lora()->base_path, "/models/base");
  EXPECT_EQ(loaded.base(), base);
  const SafetensorsFile file(folder.path() + "/adapter_model.safetensors");
  EXPECT_NE(file.find("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"), nullptr);
}

// As ranks write it: parts of adapter_model.safetensors with an index.
TEST(AdapterIo, LoadsAnAdapterInParts) {
  const auto base = base_of(Family::qwen3);
  const Parameters adapter = some_adapter(base);
  const TestFolder folder;
  save_adapter(adapter, folder.path());
  std::vector<TensorToSave> parts[2];
  std::map<std::string, std::string> files;
  for (size_t i = 0; i < adapter.table().size(); ++i) {
    const ParameterInfo& info = adapter.table()[i];
    const std::string name = adapter_tensor_name(info.name);
    parts[i % 2].push_back({name, info.shape, adapter.of(i)});
    files[name] = stored_part_name(kAdapterStem, i % 2, 2);
  }
  for (size_t i = 0; i < 2; ++i) {
    write_safetensors(folder.at(stored_part_name(kAdapterStem, i, 2)), parts[i]);
  }
  const std::string index = "adapter_model.safetensors.index.json";
  write_file_atomically(folder.at(index), stored_index_json(files, 0));
  remove_tree(folder.at("adapter_model.safetensors"));
  EXPECT_EQ(checksum(load_adapter(folder.path(), base)), checksum(adapter));

  const std::string second = stored_part_name(kAdapterStem, 1, 2);
  write_safetensors(folder.at(second), std::span(parts[1]).subspan(1));
  expect_refused([&] { load_adapter(folder.path(), base); },
                 {index, adapter_tensor_name(adapter.table()[1].name), second});
  remove_tree(folder.at(second));
  expect_refused([&] { load_adapter(folder.path(), base); }, {index, second, "missing"});
  save_adapter(adapter, folder.path());
  EXPECT_EQ(folder.names(),
            (std::vector<std::string>{"adapter_config.json", "adapter_model.safetensors",
                                      "leeway_base.json"}));
}

TEST(AdapterIo, AFolderOfAnAdapterFindsItsBase) {
  const TestFolder model, folder, nowhere;
  const auto base = base_of(Family::llama);
  save_parameters(*base, model.path());
  save_parameters(some_adapter(base, model.path()), folder.path());
  EXPECT_EQ(model_folder_of(folder.path()), model.path());
  EXPECT_EQ(model_folder_of(model.path()), model.path());
  const Parameters loaded = load_parameters(folder.path());
  ASSERT_NE(loaded.lora(), nullptr);
  EXPECT_TRUE(testing::same_bits(*loaded.base(), *base));
  save_parameters(some_adapter(base, "Qwen/Qwen3-0.6B"), nowhere.path());
  expect_refused(
      [&] { load_parameters(nowhere.path()); },
      {"adapter_config.json", "base_model_name_or_path", "Qwen/Qwen3-0.6B", "--adapter"});
}

TEST(AdapterIo, AnAdapterGoesOverTheWeightsThatItWasTrainedOver) {
  const TestFolder right, wrong, folder;
  const auto base = base_of(Family::llama);
  Parameters changed = *base;
  changed.flat()[0] += 0.5f;
  const auto other = std::make_shared<const Parameters>(changed);
  save_parameters(*base, right.path());
  save_parameters(*other, wrong.path());
  save_parameters(some_adapter(base, right.path()), folder.path());
  EXPECT_EQ(load_policy(right.path(), folder.path()).lora()->base_sum, checksum(*base));
  expect_refused([&] { load_policy(wrong.path(), folder.path()); },
                 {folder.path(), "other weights than " + wrong.path(),
                  fmt::format("{:08x}", checksum(*base)), fmt::format("{:08x}", checksum(*other)),
                  "name the model it was trained over", right.path()});
  EXPECT_EQ(other_base_warning(folder.path(), wrong.path()), "");
  write_file_atomically(folder.at("leeway_base.json"), R"({"checksum": "12345"})");
  expect_refused([&] { load_policy(right.path(), folder.path()); },
                 {"leeway_base.json", "8 hexadecimal digits"});
  // An adapter of PEFT says no more than a folder.
  remove_tree(folder.at("leeway_base.json"));
  EXPECT_NE(load_policy(wrong.path(), folder.path()).lora(), nullptr);
  const std::string warning = other_base_warning(folder.path(), wrong.path());
  for (const std::string& word : {folder.path(), right.path(), wrong.path()}) {
    EXPECT_NE(warning.find(word), std::string::npos) << warning;
  }
  EXPECT_EQ(other_base_warning(folder.path(), right.path() + "/."), "");
}

TEST(AdapterIo, RefusesWhatItDoesNotComputeByKeyAndValue) {
  const TestFolder folder;
  const auto base = base_of(Family::qwen3);
  save_adapter(some_adapter(base), folder.path());
  const std::string file = folder.path() + "/adapter_config.json";
  const std::string good = read_file(file);
  const auto refused = [&](const std::string& key, const std::string& value,
                           std::vector<std::string> words = {}) {
    write_file_atomically(file, edited(good, key, value));
    words.insert(words.end(), {"adapter_config.json", key});
    expect_refused([&] { load_adapter(folder.path(), base); }, words);
  };
  refused("peft_type", R"("IA3")", {"LORA"});
  refused("peft_type", "");
  refused("r", "");
  refused("r", "0");
  refused("r", "2.5");
  refused("r", "1000000000");
  refused("lora_alpha", "0");
  refused("lora_alpha", R"("16")");
  refused("target_modules", R"("all-linear")", {"list"});
  refused("target_modules", "[]");
  refused("target_modules", R"(["q_proj", "lm_head"])", {"lm_head", "q_proj, k_proj"});
  refused("target_modules", R"(["c_attn"])", {"c_attn"});
  refused("target_modules", R"(["experts.q_proj"])", {"experts.q_proj"});
  refused("use_dora", "true", {"true"});
  refused("use_rslora", "true");
  refused("use_qalora", "true");
  refused("lora_bias", "true");
  refused("bias", R"("all")", {"none"});
  refused("fan_in_fan_out", "true");
  refused("modules_to_save", R"(["lm_head"])", {"lm_head"});
  refused("rank_pattern", R"({"q_proj": 8})");
  refused("alpha_pattern", R"({"q_proj": 8})");
  refused("layers_to_transform", "[0]");
  refused("layer_replication", "[[0, 1]]");
  refused("trainable_token_indices", "[3]");
  refused("exclude_modules", R"(["k_proj"])");
  refused("target_parameters", R"(["experts"])");
  refused("init_lora_weights", R"("pissa")", {"base"});
  refused("task_type", R"("SEQ_CLS")", {"CAUSAL_LM"});
  refused("something_new", "1");
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::string>>{
           {"lora_dropout", "0.1"},
           {"loftq_config", "{}"},
           {"something_new", "null"},
           {"megatron_core", R"("megatron.core")"},
           {"init_lora_weights", R"("gaussian")"},
           {"target_modules", R"(["mlp.up_proj", "self_attn.q_proj"])"},
           {"target_modules",
            R"(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "q_proj"])"}}) {
    write_file_atomically(file, edited(good, key, value));
    EXPECT_NO_THROW(load_adapter(folder.path(), base)) << key;
  }
  write_file_atomically(file, "[]");
  expect_refused([&] { load_adapter(folder.path(), base); }, {"adapter_config.json", "object"});
  write_file_atomically(file, "{\"r\": ");
  expect_refused([&] { load_adapter(folder.path(), base); }, {"adapter_config.json", "line 1"});
}

TEST(AdapterIo, RefusesAnAdapterOfAnotherBase) {
  const TestFolder folder;
  const auto base = base_of(Family::qwen3);
  save_adapter(some_adapter(base), folder.path());
  ModelConfig wider = small_config(Family::qwen3);
  wider.hidden_size = 32;
  const auto other = std::make_shared<const Parameters>(wider);
  expect_refused([&] { load_adapter(folder.path(), other); },
                 {"adapter_model.safetensors", "layers.0.self_attn.q_proj.lora_A.weight", "[3, 24]",
                  "[3, 32]", "another base", "the base here is a qwen3", "hidden_size = 32"});
  ModelConfig deeper = small_config(Family::qwen3), flatter = deeper;
  deeper.num_hidden_layers = 3;
  expect_refused([&] { load_adapter(folder.path(), std::make_shared<const Parameters>(deeper)); },
                 {"layers.2.self_attn.q_proj.lora_A.weight is missing", "num_hidden_layers = 3"});
  flatter.num_hidden_layers = 1;
  expect_refused([&] { load_adapter(folder.path(), std::make_shared<const Parameters>(flatter)); },
                 {"layers.1", "no matrix of this adapter"});
  const std::string file = folder.path() + "/adapter_config.json";
  write_file_atomically(file, edited(read_file(file), "r", "4"));
  expect_refused([&] { load_adapter(folder.path(), base); }, {"[3, 24]", "[4, 24]"});
}

TEST(AdapterIo, RefusesNumbersThatAreNotFiniteAndMissingFiles) {
  const TestFolder folder;
  const auto base = base_of(Family::qwen3);
  Parameters adapter = some_adapter(base);
  adapter.of(1)[4] = std::numeric_limits<float>::infinity();
  save_adapter(adapter, folder.path());
  expect_refused([&] { load_adapter(folder.path(), base); },
                 {"adapter_model.safetensors", "lora_B.weight holds inf at [1, 1]"});
  remove_tree(folder.path() + "/adapter_model.safetensors");
  expect_refused([&] { load_adapter(folder.path(), base); }, {"no adapter_model.safetensors"});
  write_file_atomically(folder.path() + "/adapter_model.bin", "x");
  expect_refused([&] { load_adapter(folder.path(), base); }, {"adapter_model.bin is not read"});
}

}  // namespace
}  // namespace leeway
