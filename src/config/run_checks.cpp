// Constraints between two or more keys.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <unordered_map>

#include "config/run_reader.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr double kLeastTemperature = 1e-4;

class Checks {
 public:
  Checks(const Document& document, const RunConfig& run, const LossSpec* loss, Findings& findings)
      : document_(document), run_(run), loss_(loss), findings_(findings) {}

  void model() {
    const ModelTable& m = run_.model;
    if (!m.path.empty()) return;
    require(m.num_attention_heads % m.num_key_value_heads == 0,
            {"model.num_attention_heads", "model.num_key_value_heads"},
            fmt::format("model.num_attention_heads ({}) must be a multiple of "
                        "model.num_key_value_heads ({})",
                        m.num_attention_heads, m.num_key_value_heads));
    require(m.model_type != ModelType::llama || m.hidden_size % m.num_attention_heads == 0,
            {"model.num_attention_heads", "model.hidden_size", "model.model_type"},
            fmt::format("with model.model_type = \"llama\", model.hidden_size ({}) must be a "
                        "multiple of model.num_attention_heads ({})",
                        m.hidden_size, m.num_attention_heads));
    require(m.head_dim % 2 == 0, {"model.head_dim"},
            "must be even: RoPE rotates pairs of "
            "dimensions");
  }

  void lora() {
    const LoraTable& t = run_.model.lora;
    if (!t.enabled) {
      require(run_.trainer.reference != "base", {"trainer.reference"},
              "is the model below an adapter, and there is no [model.lora]; use \"initial\"");
      return;
    }
    if (run_.model.path.empty() && !findings_.problems.blames("model.path")) {
      findings_.problems.add(
          0, "[model.lora] needs model.path: an adapter is trained over a given model");
    }
    const bool on_gpu = run_.model.device == Device::cuda;
    require(!on_gpu || !t.path.empty() || t.rank % 8 == 0, {"model.lora.rank", "model.device"},
            fmt::format("model.lora.rank ({}) must be a multiple of 8 with model.device = "
                        "\"cuda\", as {}: there sampling and training give the same bits",
                        t.rank, (t.rank + 7) / 8 * 8));
    require(!on_gpu || run_.trainer.precision != TrainingPrecision::float32,
            {"trainer.precision", "model.device"},
            "[model.lora] with model.device = \"cuda\" computes in bf16; leave trainer.precision "
            "out");
    const std::vector<std::string> modules = LoraTable{}.targets;
    require(t.dropout == 0.0, {"model.lora.dropout"},
            "must be 0: with dropout the trainer would compute other log-probabilities than the "
            "sampler");
    require(!t.targets.empty(), {"model.lora.targets"}, "must name at least one module");
    for (const std::string& target : t.targets) {
      const bool known = std::find(modules.begin(), modules.end(), target) != modules.end();
      require(known, {"model.lora.targets"},
              fmt::format("{} is no module; use any of {}", toml_string(target),
                          fmt::join(modules, ", ")));
      require(std::count(t.targets.begin(), t.targets.end(), target) == 1, {"model.lora.targets"},
              fmt::format("{} is there twice", toml_string(target)));
    }
  }

  void trainer() {
    const TrainerTable& t = run_.trainer;
    effective(
        t.optimizer_steps != OptimizerSteps::minibatch || t.minibatches > 1,
        "trainer.optimizer_steps", {"trainer.minibatches"},
        "trainer.optimizer_steps = \"minibatch\" is inert with trainer.minibatches = 1; raise "
        "minibatches or leave optimizer_steps out");
    const auto slots = static_cast<uint64_t>(t.gradient_slots);
    require(slots == 0 || std::has_single_bit(slots), {"trainer.gradient_slots"},
            fmt::format("must be a power of two, as {} or {}: slots are joined in pairs",
                        std::bit_floor(slots), 2 * std::bit_floor(slots)));
    const bool on_gpu = run_.model.device == Device::cuda;
    require(on_gpu || t.precision != TrainingPrecision::bf16, {"trainer.precision", "model.device"},
            "the CPU trains in float32 only; leave trainer.precision out, or set model.device = "
            "\"cuda\"");
    require(!on_gpu || t.numerics == Numerics::exact, {"trainer.numerics", "model.device"},
            "fast works on the CPU only; with model.device = \"cuda\" leave trainer.numerics out");
    if (t.sharding == Sharding::weights) {
      require(!run_.model.lora.enabled, {"trainer.sharding", "model.lora"},
              "weights in parts are not for adapters, which several GPUs train without it; leave "
              "trainer.sharding out, or [model.lora]");
      require(t.precision != TrainingPrecision::float32, {"trainer.sharding", "trainer.precision"},
              "weights in parts are for passes in bf16; leave trainer.precision out, or "
              "trainer.sharding");
    }
    require(!on_gpu || run_.rollout.precision != RolloutPrecision::int8,
            {"rollout.precision", "model.device"},
            "int8 works on the CPU only; with model.device = \"cuda\" use fp8, bf16 or float32");
    require(on_gpu || run_.rollout.precision != RolloutPrecision::fp8,
            {"rollout.precision", "model.device"},
            "fp8 works on a GPU only; set model.device = \"cuda\", or use int8");
    require(
        run_.rollout.precision != RolloutPrecision::fp8 ||
            t.precision != TrainingPrecision::float32,
        {"rollout.precision", "trainer.precision"},
        "fp8 is beside bf16: with trainer.precision = \"float32\" use float32 or bf16, or leave "
        "trainer.precision out");
  }

  void loss() {
    if (loss_ == nullptr) return;
    const TrainerTable& t = run_.trainer;
    const std::vector<std::string> keys = {"trainer.loss."};
    if (loss_->reads(Stream::teacher)) {
      require(!t.teacher.empty(), {"trainer.loss.teacher_tau", "trainer.loss.preset"},
              "the loss reads a teacher's logprobs (teacher_tau); set trainer.teacher to a "
              "Hugging Face folder");
    } else {
      effective(t.teacher.empty(), "trainer.teacher", keys,
                "inert: the loss does not read a teacher; set trainer.loss.teacher_tau, or leave "
                "it out");
    }
    effective(t.reference == "initial" || loss_->reads(Stream::ref), "trainer.reference", keys,
              fmt::format("inert: trainer.loss.preset = \"{}\" does not read ref with these "
                          "keys; use a loss that does (grpo with ref_kl), or leave it out",
                          loss_->preset));
    effective(t.prox_forward == ProxForward::automatic || loss_->reads(Stream::prox),
              "trainer.prox_forward", keys,
              fmt::format("inert: trainer.loss.preset = \"{}\" does not read prox with these "
                          "keys; use a loss that does (ppo), or leave it out",
                          loss_->preset));
  }

  void orchestrator() {
    const OrchestratorTable& o = run_.orchestrator;
    require(o.max_inflight == 0 || o.max_inflight >= o.group_size,
            {"orchestrator.max_inflight", "orchestrator.group_size"},
            fmt::format("orchestrator.max_inflight ({}) must be 0 or at least "
                        "orchestrator.group_size ({}): a group starts as a whole",
                        o.max_inflight, o.group_size));
    require(o.min_group_size <= o.group_size,
            {"orchestrator.min_group_size", "orchestrator.group_size"},
            fmt::format("orchestrator.min_group_size ({}) must not exceed "
                        "orchestrator.group_size ({})",
                        o.min_group_size, o.group_size));
    require(run_.rollout.max_sequences >= o.group_size,
            {"rollout.max_sequences", "orchestrator.group_size"},
            fmt::format("rollout.max_sequences ({}) must be at least orchestrator.group_size "
                        "({}): the rollouts of a group share one prefill of their prompt",
                        run_.rollout.max_sequences, o.group_size));
    const bool program = !o.advantage_command.empty();
    const OrchestratorTable defaults;
    const std::string instead =
        "inert: orchestrator.advantage_command computes the advantages; leave one of them out";
    const std::vector<std::string> command = {"orchestrator.advantage_command"};
    effective(!program || o.advantage == defaults.advantage, "orchestrator.advantage", command,
              instead);
    effective(!program || o.length_penalty == 0.0, "orchestrator.length_penalty", command, instead);
    effective(program || o.advantage_timeout == defaults.advantage_timeout,
              "orchestrator.advantage_timeout", command,
              "inert without orchestrator.advantage_command; set the program, or leave it out");
    groups_of_one();
    const double temperature = run_.rollout.temperature;
    require(temperature == 0 || temperature >= kLeastTemperature, {"rollout.temperature"},
            fmt::format("must be 0 (greedy) or at least {}", kLeastTemperature));
  }

  void inference() {
    const InferenceTable& t = run_.inference;
    if (t.pool == InferencePool::in_process) return;
    const bool listed = t.pool == InferencePool::static_;
    require(!listed || !t.base_url.empty(), {"inference.base_url", "inference.pool"},
            "a static pool needs inference.base_url, a list of servers");
    require(listed || !t.hostname.empty(), {"inference.hostname", "inference.pool"},
            "an elastic pool needs inference.hostname, whose addresses are the servers");
    require(t.admin_base_url.empty() || t.admin_base_url.size() == t.base_url.size(),
            {"inference.admin_base_url"},
            fmt::format("has {} entries, inference.base_url {}: each server needs one",
                        t.admin_base_url.size(), t.base_url.size()));
    for (const std::string& url : t.base_url) url_of("inference.base_url", url, t.base_url);
    for (const std::string& url : t.admin_base_url) {
      url_of("inference.admin_base_url", url, t.admin_base_url);
    }
    for (const std::string& header : t.headers) {
      const size_t colon = header.find(": ");
      const bool plain = std::none_of(header.begin(), header.end(),
                                      [](unsigned char c) { return c < 32 || c == 127; });
      require(plain && colon != std::string::npos && colon > 0, {"inference.headers"},
              "each header must be one line, \"Name: value\"");
      require(t.api_key_var.empty() || !header.starts_with("Authorization:"),
              {"inference.headers", "inference.api_key_var"},
              "inference.api_key_var makes the header Authorization; leave one of them out");
    }
    const bool foreign =
        t.dialect == InferenceDialect::vllm || t.dialect == InferenceDialect::sglang;
    require(!foreign || run_.rollout.temperature == 1.0,
            {"rollout.temperature", "inference.dialect"},
            "vLLM and SGLang give log-probabilities before temperature, which are those of the "
            "sampled distribution at rollout.temperature = 1 only");
  }

  void environment(size_t index) {
    const EnvironmentTable& e = run_.environments[index];
    if (e.name.empty()) return;
    auto key = [&](const char* name) { return fmt::format("environment.{}.{}", index, name); };
    identity(index, key("id"), key("name"));
    if (e.name == "sort") {
      require(e.min_length <= e.max_length, {key("min_length"), key("max_length")},
              fmt::format("{} ({}) must not exceed {} ({})", key("min_length"), e.min_length,
                          key("max_length"), e.max_length));
    } else if (e.name == "process") {
      require(e.eval_data.empty() || !e.data.empty(), {key("eval_data"), key("data")},
              fmt::format("{} without {}: give both, or neither where the program has examples of "
                          "its own",
                          key("eval_data"), key("data")));
      require(!e.command.empty(), {key("command"), key("name")},
              fmt::format("a process environment needs {}, a program", key("command")));
    } else if (e.name == "jsonl") {
      require(!e.data.empty(), {key("data"), key("name")},
              fmt::format("a jsonl environment needs {}, a file", key("data")));
      require(e.prompt_key != e.answer_key, {key("prompt_key"), key("answer_key")},
              fmt::format("{} and {} must differ", key("prompt_key"), key("answer_key")));
    } else {
      sums(e, key("operators"), key("max_operand"), key("terms"));
    }
  }

 private:
  // An advantage that compares the rollouts of a prompt is 0 where there is one of them. What else
  // can give a signal: the user's program, an environment's own advantages, a teacher.
  void groups_of_one() {
    const OrchestratorTable& o = run_.orchestrator;
    const bool compares =
        o.advantage != AdvantageKind::batch_mean && o.advantage != AdvantageKind::none;
    const bool own = std::any_of(run_.environments.begin(), run_.environments.end(),
                                 [](const EnvironmentTable& e) { return e.name == "process"; });
    const bool taught = loss_ != nullptr && loss_->reads(Stream::teacher);
    if (!compares || !o.advantage_command.empty() || own || taught) return;
    require(o.group_size > 1, {"orchestrator.group_size", "orchestrator.advantage"},
            fmt::format("with orchestrator.advantage = \"{}\" every advantage is 0 in a group of "
                        "one, and nothing is learned; set orchestrator.group_size to at least 2, "
                        "or orchestrator.advantage to \"batch_mean\" or \"none\"",
                        name_of(o.advantage)));
  }

  // Blames the first of `names` that was given. The defaults satisfy every rule, so at least one
  // was.
  void require(bool condition, const std::vector<std::string>& names, const std::string& problem) {
    if (condition) return;
    // Skip rules about values that were themselves refused.
    for (const std::string& name : names) {
      if (findings_.problems.blames(name)) return;
    }
    for (const std::string& name : names) {
      const Given* given = document_.find(name);
      if (given != nullptr) return findings_.problems.add(*given, problem);
    }
    LEEWAY_CHECK(false, fmt::format("a default breaks a rule: {}", problem));
  }

  // The key `name` must have an effect given the keys `causes`. Its default always has one.
  void effective(bool condition, const std::string& name, const std::vector<std::string>& causes,
                 const std::string& problem) {
    if (condition) return;
    const Given* given = document_.find(name);
    LEEWAY_CHECK(given != nullptr, fmt::format("a default has no effect: {}", problem));
    findings_.inert(document_, *given, causes, problem);
  }

  void url_of(const std::string& key, const std::string& url, const std::vector<std::string>& all) {
    const size_t scheme = url.starts_with("http://") ? 7 : url.starts_with("https://") ? 8 : 0;
    const std::string rest = url.substr(scheme);
    const bool plain = std::none_of(rest.begin(), rest.end(), [](unsigned char c) {
      return c <= 32 || c >= 127 || c == '@' || c == '?' || c == '#';
    });
    require(
        scheme > 0 && plain && !rest.empty() && rest.front() != '/', {key},
        fmt::format("{} is no URL of a server; write it as http://HOST:PORT", toml_string(url)));
    require(std::count(all.begin(), all.end(), url) == 1, {key},
            fmt::format("{} is there twice", toml_string(url)));
  }

  void identity(size_t index, const std::string& id_key, const std::string& name_key) {
    const std::string& id = run_.environments[index].id;
    const bool plain = std::all_of(id.begin(), id.end(), [](unsigned char c) {
      return c == '_' || c == '-' || c == '.' || (c < 128 && std::isalnum(c) != 0);
    });
    require(plain && id != "all", {id_key},
            "must consist of letters, digits, '_', '-' and '.', and not be \"all\": it is part "
            "of metric names");
    const auto [other, is_new] = ids_.emplace(id, index);
    if (is_new) return;
    require(false, {id_key, name_key},
            fmt::format("environment.{}.id and {} are both \"{}\"; give them different ids",
                        other->second, id_key, id));
  }

  void sums(const EnvironmentTable& e, const std::string& operators, const std::string& operand,
            const std::string& terms) {
    std::string left = "+-*";
    const bool known = std::all_of(e.operators.begin(), e.operators.end(), [&](char c) {
      const size_t at = left.find(c);
      if (at == std::string::npos) return false;
      left.erase(at, 1);
      return true;
    });
    require(known, {operators}, "must consist of '+', '-' and '*', each at most once");
    const bool product = e.operators.find('*') != std::string::npos;
    const double bits =
        static_cast<double>(e.terms) * std::log2(static_cast<double>(e.max_operand));
    require(!product || bits < 62, {operand, terms, operators},
            fmt::format("with '*' in {}, {} to the power of {} must stay below 2^62", operators,
                        operand, terms));
  }

  const Document& document_;
  const RunConfig& run_;
  const LossSpec* loss_;
  Findings& findings_;
  std::unordered_map<std::string, size_t> ids_;  // number of environments with each id
};

}  // namespace

void check_run(const Document& document, const RunConfig& run, const LossSpec* loss,
               Findings& findings) {
  Checks checks(document, run, loss, findings);
  checks.model();
  checks.lora();
  checks.trainer();
  checks.loss();
  checks.orchestrator();
  checks.inference();
  for (size_t i = 0; i < run.environments.size(); ++i) checks.environment(i);
}

}  // namespace leeway
