// Calls over HTTP as the pool makes them, and what runs them: curl in the program, simulated
// servers in tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace leeway {

// A GET, or a POST of JSON. Time-outs count only the time spent in `poll`: while the caller does
// something else, answers lie unread, and a call must not fail for that.
struct HttpCall {
  bool post = false;
  std::string url;
  std::string body;
  std::vector<std::string> headers;  // "Name: value"
  double connect_timeout = 5.0;
  double timeout = 60.0;        // of the whole call
  double stall_timeout = 30.0;  // between two pieces of an answer that has begun
};

struct HttpResult {
  int64_t call = 0;
  int status = 0;       // 0: there was no answer
  std::string body;     // of the answer
  std::string failure;  // why there was none; never has a header or a key in it
  bool ok() const { return failure.empty() && status == 200; }
};

// Used by one thread.
class Http {
 public:
  virtual ~Http() = default;
  // Begins a call and returns its number. Each call gives one result, unless it is cancelled.
  virtual int64_t start(HttpCall call) = 0;
  // Closes its connection. Unknown or ended calls are left alone.
  virtual void cancel(int64_t call) = 0;
  // Results since the last call; waits for the first of them for up to `seconds` if calls are open.
  virtual std::vector<HttpResult> poll(double seconds) = 0;
};

}  // namespace leeway
