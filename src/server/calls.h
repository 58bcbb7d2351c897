// HTTP requests while the engine samples for them. All of it on the server's thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/engine_thread.h"
#include "server/http_server.h"

namespace leeway {

// Writes what was sampled for one HTTP request, in one dialect. Choices are numbered over all
// prompts: prompt * n + sample.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  // The body once all choices have ended, in their order.
  virtual std::string whole(const std::vector<SampledSequence>& choices) = 0;

  // Of a stream: what is sent first; for tokens that are new; when a choice has ended, with all of
  // its tokens; and at the end. Any of them may be empty.
  virtual std::string opening() { return ""; }
  virtual std::string piece(size_t choice, const SampledSequence& fresh) = 0;
  virtual std::string ending(size_t choice, const SampledSequence& all) = 0;
  virtual std::string closing(const std::vector<SampledSequence>& choices) = 0;
};

struct Call {
  std::shared_ptr<HttpExchange> exchange;
  std::string request_id;         // by which it can be aborted
  std::vector<Request> requests;  // one per prompt, with the same number of samples
  std::vector<std::string> stop_texts;
  bool streams = false;
  std::unique_ptr<AnswerWriter> writer;
};

class Calls {
 public:
  // `most`: calls at a time, those that wait included.
  Calls(EngineThread& engine, int64_t most) : engine_(engine), most_(most) {}

  // Throws ApiError 400 for what the engine refuses and 429 beyond `most`; nothing is sampled then.
  void start(Call call);
  void take(std::vector<EngineUpdate> updates);
  // Ends the calls of this id with what they have, and returns how many there are.
  size_t abort(const std::string& request_id);

  bool empty() const { return open_.empty(); }
  size_t size() const { return open_.size(); }
  uint64_t finished(Finish how) const { return finished_[static_cast<size_t>(how)]; }
  uint64_t prompt_tokens() const { return prompt_tokens_; }
  uint64_t sampled_tokens() const { return sampled_tokens_; }

 private:
  struct Open {
    Call call;
    int64_t first_job = 0;
    std::vector<SampledSequence> choices;
    size_t ended = 0;
    bool broken = false;  // the stream could not be sent
  };

  void take(EngineUpdate& update);
  void send(Open& open, const std::string& bytes);
  void finish(int64_t number, Open& open);
  void cancel(const Open& open);

  EngineThread& engine_;
  int64_t most_;
  std::map<int64_t, Open> open_;
  std::map<int64_t, int64_t> call_of_;  // job: call
  int64_t next_job_ = 1, next_call_ = 1;
  uint64_t finished_[4] = {};  // choices, by Finish
  uint64_t prompt_tokens_ = 0, sampled_tokens_ = 0;
};

// "data: JSON\n\n", as streams of server-sent events have it.
std::string event_text(std::string_view json);

}  // namespace leeway
