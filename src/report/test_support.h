// Made-up run folders for tests, generated from a seed: curves like those of a run, evaluations
// with intervals, rollouts with tokens of every kind.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/rng.h"

namespace leeway {

// An empty folder below the build folder. It is left there after the test, so that a page can be
// inspected.
inline std::string fresh_folder(const std::string& name) {
  const std::filesystem::path path =
      std::filesystem::path(LEEWAY_BINARY_DIR) / "report_pages" / name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path.string();
}

inline void put_file(const std::string& path, std::string_view text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

struct SyntheticRun {
  uint64_t seed = 1;
  int steps = 200;
  int max_steps = 200;
  std::string preset = "icepop";
  double speed = 1.0;   // how fast the reward rises
  double drift = 1.0;   // how far the policies are apart
  int eval_every = 20;  // 0: never
  int rollouts_every = 10;
  int groups = 2, group_size = 8;
  bool has_warm_start = true;
  bool has_ranks = false;
};

namespace synthetic {

inline double reward_at(const SyntheticRun& run, double step) {
  return 0.12 + 0.8 / (1.0 + std::exp(-(run.speed * step - 80.0) / 22.0));
}

inline std::string metrics_line(const SyntheticRun& run, int step, Rng& rng) {
  JsonWriter json;
  json.begin_object();
  auto put = [&](std::string_view name, double value) { json.key(name).value(value); };
  const double at = 200.0 * step / run.max_steps;
  const double reward = reward_at(run, at) + 0.035 * rng.normal();
  const double kl = run.drift * 8e-4 * std::exp(0.006 * at + 0.35 * rng.normal());
  put("step", step);
  put("reward/all/mean", reward);
  put("reward/all/max", 1.0);
  put("reward/all/min", 0.0);
  put("reward/sort/mean", std::min(1.0, reward + 0.08));
  put("reward/arithmetic/mean", reward - 0.08);
  put("loss", -0.02 * rng.normal());
  put("entropy", 1.6 * std::exp(-at / 120.0) + 0.15 + 0.02 * rng.normal());
  put("grad_norm", 0.4 + 0.25 * std::exp(0.5 * rng.normal()));
  put("learning_rate", 1e-3 * std::min(1.0, at / 10.0) * (1.0 - 0.9 * at / 200.0));
  put("mismatch_kl/all/mean", kl);
  put("mismatch_kl/all/max", kl * 300.0 * std::exp(0.6 * rng.normal()));
  const double low = run.drift * 0.002 * std::exp(0.3 * rng.normal());
  const double high = run.drift * 0.0012 * std::exp(0.4 * rng.normal());
  put("is_masked", low + high);
  put("is_masked_low", low);
  put("is_masked_high", high);
  json.key("masked_mismatch_kl");
  rng.uniform() < 0.3 ? json.null() : json.value(kl * 20);
  put("effective_sample_size", 1.0 - run.drift * 0.02 * (1.0 + rng.uniform()));
  put("off_policy_level/all/mean", 1.0 + 0.6 * rng.uniform());
  put("off_policy_level/all/max", 2.0 + static_cast<double>(rng.below(3)));
  put("decode_len/all/mean", 18.0 + 14.0 * reward + rng.normal());
  put("decode_len/all/max", 58.0 + static_cast<double>(rng.below(7)));
  put("is_truncated/all", 0.05 * rng.uniform());
  put("errored_rollouts/all", rng.uniform() < 0.06 ? 1.0 : 0.0);
  put("errored_rollouts/all/rate", 0.01 * rng.uniform());
  put("empty_rollouts/all", rng.uniform() < 0.03 ? 1.0 : 0.0);
  put("dropped_groups/all", rng.uniform() < 0.02 ? 1.0 : 0.0);
  put("cancelled_rollouts/all", std::floor(4.0 * rng.uniform() * rng.uniform()));
  put("perf/sampled_tokens_per_second", 21000.0 + 900.0 * rng.normal());
  put("perf/trained_tokens_per_second", 26500.0 + 700.0 * rng.normal());
  put("perf/sampler_busy", 0.93 + 0.02 * rng.normal());
  put("perf/trainer_busy", 0.71 + 0.03 * rng.normal());
  if (run.has_ranks) {
    put("ranks/train_imbalance", 1.0 + 0.1 * rng.uniform());
    put("ranks/sampling_imbalance", 1.0 + 0.2 * rng.uniform());
    put("time/ranks_collectives", 0.02 + 0.01 * rng.uniform());
    put("time/ranks_wait", 0.03 * rng.uniform());
  }
  put("account/admitted", 256.0 * run.steps);
  put("account/trained", 255.0 * run.steps);
  put("account/cancelled", 1.0 * run.steps);
  put("env_metrics/sort/attempts", 1.0 + rng.uniform());
  put("time/step", 1.4 + 0.1 * rng.uniform());
  put("time/elapsed", 1.45 * step);
  json.end_object();
  return json.text() + "\n";
}

inline std::string eval_line(const SyntheticRun& run, int step, Rng& rng) {
  JsonWriter json;
  const double mean = reward_at(run, 200.0 * step / run.max_steps) + 0.01 * rng.normal();
  json.begin_object().key("step").value(static_cast<double>(step));
  for (const char* name : {"eval/all/reward", "eval/sort/reward", "eval/arithmetic/reward"}) {
    json.key(std::string(name) + "/mean").value(mean);
    json.key(std::string(name) + "/low").value(mean - 0.035);
    json.key(std::string(name) + "/high").value(mean + 0.03);
  }
  json.key("eval/all/pass@1").value(mean).key("eval/all/pass@1/low").value(mean - 0.03);
  json.key("eval/all/pass@1/high").value(mean + 0.03);
  json.key("eval/all/greedy/mean").value(mean + 0.02).end_object();
  return json.text() + "\n";
}

inline std::string rollout_line(const SyntheticRun& run, int step, int group, int index, Rng& rng) {
  static const std::vector<std::string> kPrompt = {"Sort", " the", " letters", ":", " q",
                                                   "b",    "z",    "a",        "m", "\n"};
  static const std::vector<std::string> kAnswer = {
      "First", " I",   " look", " for", " the",      " smallest", " letter", ",",
      " then", " the", " next", ".",    "\n",        "a",         " <",      " b",
      " <",    " m",   " <",    " q",   " <",        " z",        "\n\n",    "<answer>",
      "ab",    "m",    "q",     "z",    "</answer>", "\t",        ""};
  JsonWriter json;
  const bool is_right = rng.uniform() < reward_at(run, 200.0 * step / run.max_steps);
  json.begin_object().key("step").value(static_cast<double>(step));
  json.key("group").value(static_cast<double>(group));
  json.key("rollout").value(static_cast<double>(index));
  json.key("environment").value(group % 2 == 0 ? "sort" : "arithmetic");
  json.key("example").value(static_cast<double>(group));
  json.key("reward").value(is_right ? 1.0 : 0.0);
  json.key("rewards").begin_object().key("exact").value(is_right ? 1.0 : 0.0);
  json.key("format").value(1.0).end_object();
  json.key("advantage").value(is_right ? 0.375 : -0.625);
  json.key("finish").value(rng.uniform() < 0.9 ? "stop" : "length");
  json.key("turns").value(1.0).key("samples").begin_array().begin_object();
  const size_t length = kPrompt.size() + kAnswer.size();
  auto list = [&](const char* key, auto entry) {
    json.key(key).begin_array();
    for (size_t k = 0; k < length; ++k) entry(k, k >= kPrompt.size());
    json.end_array();
  };
  std::vector<double> rollout(length), pi(length);
  for (size_t k = kPrompt.size(); k < length; ++k) {
    rollout[k] = -0.05 - 1.5 * rng.uniform() * rng.uniform();
    pi[k] = std::min(
        0.0, rollout[k] + run.drift * 0.12 * rng.normal() + (rng.uniform() < 0.04 ? -1.9 : 0.0));
  }
  list("tokens", [&](size_t k, bool sampled) {
    json.value(sampled ? kAnswer[k - kPrompt.size()] : kPrompt[k]);
  });
  list("ids", [&](size_t k, bool) { json.value(100.0 + 7.0 * static_cast<double>(k)); });
  list("loss_mask", [&](size_t, bool sampled) { json.value(sampled ? 1.0 : 0.0); });
  list("rollout", [&](size_t k, bool) { json.value(rollout[k]); });
  list("pi", [&](size_t k, bool) { json.value(pi[k]); });
  list("kept", [&](size_t k, bool sampled) {
    json.value(sampled && pi[k] - rollout[k] > std::log(0.2) ? 1.0 : 0.0);
  });
  list("versions", [&](size_t, bool sampled) { json.value(sampled ? step - 1.0 : -1.0); });
  json.end_object().end_array().end_object();
  return json.text() + "\n";
}

}  // namespace synthetic

inline void make_run(const std::string& folder, const SyntheticRun& run) {
  Rng rng(run.seed);
  std::string metrics, evals, sft;
  for (int step = 1; step <= run.steps; ++step) metrics += synthetic::metrics_line(run, step, rng);
  if (run.eval_every > 0) {
    for (int step = 0; step <= run.steps; step += run.eval_every) {
      evals += synthetic::eval_line(run, step, rng);
    }
    put_file(folder + "/eval.jsonl", evals);
  }
  put_file(folder + "/metrics.jsonl", metrics);
  if (run.has_warm_start) {
    for (int step = 1; step <= 60; ++step) {
      sft += fmt::format(R"({{"step": {}, "loss": {:.4f}, "grad_norm": 1.0, "learning_rate": 1e-3)",
                         step, 3.2 * std::exp(-step / 18.0) + 0.3 + 0.05 * rng.uniform());
      if (step >= 25 && step % 5 == 0) sft += fmt::format(", \"reward\": {:.3f}", 0.003 * step);
      sft += "}\n";
    }
    put_file(folder + "/sft.jsonl", sft);
  }
  for (int step = run.rollouts_every; run.rollouts_every > 0 && step <= run.steps;
       step += run.rollouts_every) {
    std::string lines;
    for (int group = 0; group < run.groups; ++group) {
      for (int index = 0; index < run.group_size; ++index) {
        lines += synthetic::rollout_line(run, step, 40 * step + group, index, rng);
      }
    }
    put_file(fmt::format("{}/rollouts/step_{}.jsonl", folder, step), lines);
  }
  put_file(folder + "/objective.txt",
           run.preset +
               "\n\nobjective, minimised (stop = no gradient)\n"
               "  L = 1/N sum_t [ keep_t (-A_t r_t) ]\n  r_t = pi/rollout\n"
               "  keep_t = 1 where 0.2 <= pi/rollout <= 5\n");
  put_file(folder + "/config.toml",
           fmt::format("output_dir = \"{}\"  # default\nseed = {}  # --set\n\n[trainer]\n"
                       "max_steps = {}  # run.toml line 4\nlearning_rate = 0.001  # default\n\n"
                       "[trainer.loss]\npreset = \"{}\"  # run.toml line 7\n\n[orchestrator]\n"
                       "max_off_policy_steps = 4  # default\n\n[rollout]\n"
                       "precision = \"bf16\"  # default\n\n[[environment]]\nname = \"sort\"\n\n"
                       "[[environment]]\nname = \"arithmetic\"\n",
                       folder, run.seed, run.max_steps, run.preset));
}

}  // namespace leeway
