// The keys of what is sampled and how.

#include <fmt/format.h>

#include "config/field_makers.h"
#include "config/run_fields.h"

namespace leeway {

std::vector<Field> orchestrator_fields(OrchestratorTable& t) {
  return {
      integer("prompts_per_batch", t.prompts_per_batch, 1, kMostPrompts, "Groups per batch."),
      integer("group_size", t.group_size, 1, kMostRollouts, "Rollouts per prompt."),
      integer("max_off_policy_steps", t.max_off_policy_steps, 0, kMostSteps,
              "Maximum staleness of a trained token, in policy updates; 0 is strictly on-policy."),
      choice("schedule", t.schedule,
             "lockstep makes runs repeatable bit for bit; free lets sampling run ahead as fast "
             "as it can."),
      integer("max_inflight", t.max_inflight, 0, kMostPrompts,
              "Maximum rollouts in flight; 0 means as many as staleness allows."),
      integer("max_turns", t.max_turns, 1, 10000, "Maximum turns per rollout."),
      {.key = "max_error_reschedule_attempts",
       .target = &t.max_error_reschedule_attempts,
       .meaning = "Rounds with a failure after which a group is given up.",
       .range = {.low = 1, .high = 1e6}},
      integer("min_group_size", t.min_group_size, 0, kMostRollouts,
              "A group that is given up is still trained if at least this many of its rollouts "
              "finished; 0 means all of them."),
      integer("max_prompt_failures", t.max_prompt_failures, 1, 1e6,
              "Groups of a prompt that may be given up before the prompt is excluded for good."),
      number("zero_progress_batches", t.zero_progress_batches, kPositive,
             "The run gives up after this many batches' worth of consecutive failed rollouts."),
      number("retry_backoff", t.retry_backoff, kNotNegative,
             "Seconds before a group's first retry; doubles with every retry, up to a minute."),
      number("rollout_timeout", t.rollout_timeout, kNotNegative,
             "Seconds that a rollout may take; 0 means no limit."),
      choice("advantage", t.advantage, "How advantages are computed from rewards."),
      number("length_penalty", t.length_penalty, kWeightOrNone,
             "Length penalty: subtracted from the longest of a group's best rollouts, less from "
             "shorter ones; 0 disables it."),
      text("advantage_command", t.advantage_command,
           "Program that computes the advantages of each group, or drops it, instead of "
           "`advantage` and `length_penalty`; run by /bin/sh. Empty: none."),
      number("advantage_timeout", t.advantage_timeout, kPositive,
             "Maximum seconds per answer of `advantage_command`."),
      flag("filter_zero_advantages", t.filter_zero_advantages,
           "Whether to drop groups whose advantages are all 0 from the batch."),
  };
}

std::vector<Field> renderer_fields(RendererConfig& t) {
  const std::string reason = "inert without orchestrator.renderer.name; set the renderer's name";
  const std::string by = "orchestrator.renderer.name";
  const bool nameless = t.name.empty();
  Field retention = choice(
      "thinking_retention", t.thinking_retention,
      "Which past thinking is kept in training: `last` is what the template keeps; "
      "`between_tool_calls` and `all` are the two flags below. Evaluation keeps what the template "
      "keeps.");
  retention.in_dump = false;
  const auto said_by_retention = [](Field field) {
    field.synonym = "orchestrator.renderer.thinking_retention";
    return field;
  };
  return {
      text("name", t.name,
           "The chat renderer, such as `qwen3`; `auto` takes that of the chat template in "
           "`model.path`; empty for plain text."),
      inert_if(nameless && t.thinking_retention != KeptThinking::last, by, reason, retention),
      inert_if(nameless && t.preserve_all_thinking, by, reason,
               said_by_retention(flag("preserve_all_thinking", t.preserve_all_thinking,
                                      "Whether to keep all past thinking."))),
      inert_if(nameless && t.preserve_thinking_between_tool_calls, by, reason,
               said_by_retention(flag("preserve_thinking_between_tool_calls",
                                      t.preserve_thinking_between_tool_calls,
                                      "Whether to keep thinking after the last user message if a "
                                      "tool message follows."))),
  };
}

std::vector<Field> rollout_fields(RolloutTable& t, InferencePool pool) {
  const auto of_engine = [&](Field field) {
    return inert_if(pool != InferencePool::in_process, "inference.pool",
                    "is decided by the servers of inference.pool; leave it out", std::move(field));
  };
  return {
      integer("max_new_tokens", t.max_new_tokens, 1, kMostTokens,
              "Maximum sampled tokens per turn."),
      number("temperature", t.temperature, kNotNegative,
             "Sampling temperature; 0 is greedy, otherwise at least 1e-4."),
      integer("top_k", t.top_k, 0, kMostTokens,
              "Sample from this many most likely tokens; 0 means all, which training requires."),
      number("top_p", t.top_p, {.low = 0, .high = 1, .open_low = true},
             "Sample from the most likely tokens with this total probability (nucleus); training "
             "requires 1."),
      number("min_p", t.min_p, kShare,
             "Sample from tokens with at least this fraction of the largest probability; "
             "training requires 0."),
      of_engine(choice("precision", t.precision,
                       "Dtype of the sampler's weights. auto is the trainer's: bf16 on cuda, "
                       "float32 on cpu. int8 is for cpu; fp8 is for cuda: matrices of the layers "
                       "and the rows they are multiplied with in e4m3.")),
      of_engine(
          choice("kv_after_swap", t.kv_after_swap,
                 "What happens to the KV cache of unfinished rollouts when the weights change.")),
      text("stop", t.stop,
           "Stop text: its last token ends a completion; if empty, the renderer and model decide."),
      integer("kv_bytes", t.kv_bytes, 1, kMostBytes, "Memory for the KV cache, in bytes."),
      integer("max_sequences", t.max_sequences, 1, 65536,
              "Maximum sequences sampled "
              "concurrently."),
      of_engine(integer("threads", t.threads, 0, kMostThreads,
                        "Number of sampler threads; 0 chooses automatically.")),
  };
}

std::vector<Field> inference_fields(InferenceTable& t) {
  const auto of = [&](bool condition, const char* reason, Field field) {
    const bool local = t.pool == InferencePool::in_process;
    return inert_if(local || !condition, "inference.pool",
                    local ? "inert with inference.pool = \"in_process\"; set pool to \"static\" or "
                            "\"elastic\", or leave it out"
                          : reason,
                    std::move(field));
  };
  const bool listed = t.pool == InferencePool::static_;
  const char* of_static = "is a key of inference.pool = \"static\"; leave it out";
  const char* of_elastic = "is a key of inference.pool = \"elastic\"; leave it out";
  return {
      choice("pool", t.pool,
             "What samples, for training and its evaluations: this process, the servers of a list, "
             "or those behind a "
             "host name, which may come and go."),
      of(listed, of_static,
         texts("base_url", t.base_url, "Static: the servers, as in `http://10.0.0.7:8000`.")),
      of(listed, of_static,
         texts("admin_base_url", t.admin_base_url,
               "Static: where the same servers take weights, pauses and questions of their health; "
               "empty: where they take requests.")),
      of(!listed, of_elastic,
         text("hostname", t.hostname, "Elastic: the name whose addresses are the servers.")),
      of(!listed, of_elastic, integer("port", t.port, 1, 65535, "Elastic: the servers' port.")),
      of(true, "",
         choice("dialect", t.dialect, "How the servers are spoken to; auto asks each of them.")),
      of(true, "",
         text("api_key_var", t.api_key_var,
              "Environment variable with the key that the servers want; empty: they want none.")),
      of(true, "", texts("headers", t.headers, "More headers of every call, as in `X-Team: rl`.")),
      of(t.dialect == InferenceDialect::automatic || t.dialect == InferenceDialect::vllm,
         "is vLLM's; leave it out",
         integer("dp_rank_count", t.dp_rank_count, 1, 1024,
                 "vLLM: data-parallel ranks behind each URL, which are chosen by a header.")),
      of(true, "",
         number("sync_interval", t.sync_interval, kPositive,
                "Seconds between two questions of a server's health, and between two resolutions "
                "of `hostname`.")),
      of(true, "",
         number("connect_timeout", t.connect_timeout, kPositive,
                "Maximum seconds for a connection, and for an answer about health.")),
      of(true, "",
         number("request_timeout", t.request_timeout, kPositive,
                "Maximum seconds for the answer to a request.")),
      of(true, "",
         integer("request_attempts", t.request_attempts, 1, 100,
                 "Calls for a request, each to another server if there is one, before its rollouts "
                 "fail.")),
      of(true, "",
         number("stall_timeout", t.stall_timeout, kPositive,
                "Maximum seconds between two pieces of an answer.")),
      of(true, "",
         number("update_timeout", t.update_timeout, kPositive,
                "Maximum seconds in which a server loads new weights.")),
      of(true, "",
         integer("update_attempts", t.update_attempts, 1, 100,
                 "Attempts to give a server new weights before it leaves the pool.")),
      of(true, "",
         number("ready_timeout", t.ready_timeout, kPositive,
                "Seconds without any server after which requests fail, and a run does not start.")),
      of(true, "",
         number("outage_timeout", t.outage_timeout, kPositive,
                "Seconds without one good answer, while there are requests and some have failed, "
                "after which the run ends; calls in flight are waited for.")),
  };
}

std::vector<Field> eval_fields(EvalTable& t) {
  return {
      integer("every", t.every, 0, kMostSteps,
              "Steps between evaluations; 0 evaluates only before the first and after the last."),
      integer("prompts", t.prompts, 1, kMostPrompts, "Held-out prompts per evaluation."),
      integer("samples", t.samples, 1, kMostRollouts,
              "Samples per prompt at `rollout.temperature`."),
      flag("greedy", t.greedy, "Whether to also take one greedy sample per prompt."),
  };
}

}  // namespace leeway
