#include "pool/curl_http.h"

#include <curl/curl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

// The longest time between two polls that counts for a call's deadlines.
constexpr double kLongestGap = 0.5;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void init_curl() {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
}

struct Transfer {
  HttpCall call;
  CURL* easy = nullptr;
  curl_slist* headers = nullptr;
  std::string body;
  size_t most_bytes = 0;
  bool too_large = false;
  double elapsed = 0.0;  // since the start
  double quiet = 0.0;    // since the answer's last byte

  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer() {
    curl_easy_cleanup(easy);
    curl_slist_free_all(headers);
  }
};

size_t take_bytes(char* data, size_t size, size_t count, void* to) {
  auto& transfer = *static_cast<Transfer*>(to);
  const size_t bytes = size * count;
  if (transfer.body.size() + bytes > transfer.most_bytes) {
    transfer.too_large = true;
    return 0;
  }
  transfer.body.append(data, bytes);
  transfer.quiet = 0.0;
  return bytes;
}

bool connected(const Transfer& transfer) {
  curl_off_t time = 0;
  curl_easy_getinfo(transfer.easy, CURLINFO_PRETRANSFER_TIME_T, &time);
  return time > 0;
}

// Why the call ends now without an answer; empty: it goes on.
std::string late(const Transfer& transfer) {
  const HttpCall& call = transfer.call;
  if (transfer.elapsed > call.timeout) {
    return fmt::format("no answer within {:g} s", call.timeout);
  }
  if (transfer.elapsed > call.connect_timeout && !connected(transfer)) {
    return fmt::format("no connection within {:g} s", call.connect_timeout);
  }
  if (!transfer.body.empty() && transfer.quiet > call.stall_timeout) {
    return fmt::format("the answer stalled for {:g} s after {} bytes", call.stall_timeout,
                       transfer.body.size());
  }
  return "";
}

}  // namespace

struct CurlHttp::Impl {
  CURLM* multi = nullptr;
  size_t most_bytes = 0;
  int64_t next = 1;
  double last_poll = now_seconds();
  std::map<int64_t, std::unique_ptr<Transfer>> open;
  std::map<CURL*, int64_t> numbers;

  void end(int64_t number) {
    const auto found = open.find(number);
    curl_multi_remove_handle(multi, found->second->easy);
    numbers.erase(found->second->easy);
    open.erase(found);
  }

  HttpResult result_of(int64_t number, CURLcode code) {
    Transfer& transfer = *open.at(number);
    HttpResult result{.call = number};
    if (transfer.too_large) {
      result.failure = fmt::format("the answer has more than {} bytes", transfer.most_bytes);
    } else if (code != CURLE_OK) {
      result.failure = curl_easy_strerror(code);
    } else {
      long status = 0;
      curl_easy_getinfo(transfer.easy, CURLINFO_RESPONSE_CODE, &status);
      result.status = static_cast<int>(status);
      result.body = std::move(transfer.body);
    }
    return result;
  }

  void collect(std::vector<HttpResult>& results) {
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const auto found = numbers.find(message->easy_handle);
      if (found == numbers.end()) continue;
      const int64_t number = found->second;
      results.push_back(result_of(number, message->data.result));
      end(number);
    }
  }

  void end_late(std::vector<HttpResult>& results) {
    const double now = now_seconds();
    const double gap = std::min(now - last_poll, kLongestGap);
    last_poll = now;
    std::vector<int64_t> ended;
    for (auto& [number, transfer] : open) {
      transfer->elapsed += gap;
      transfer->quiet += gap;
      std::string reason = late(*transfer);
      if (reason.empty()) continue;
      results.push_back({.call = number, .failure = std::move(reason)});
      ended.push_back(number);
    }
    for (int64_t number : ended) end(number);
  }
};

CurlHttp::CurlHttp(size_t most_bytes) : impl_(std::make_unique<Impl>()) {
  init_curl();
  impl_->multi = curl_multi_init();
  LEEWAY_CHECK(impl_->multi != nullptr, "curl_multi_init");
  impl_->most_bytes = most_bytes;
}

CurlHttp::~CurlHttp() {
  while (!impl_->open.empty()) impl_->end(impl_->open.begin()->first);
  curl_multi_cleanup(impl_->multi);
}

int64_t CurlHttp::start(HttpCall call) {
  auto transfer = std::make_unique<Transfer>();
  transfer->call = std::move(call);
  transfer->most_bytes = impl_->most_bytes;
  transfer->easy = curl_easy_init();
  CURL* easy = transfer->easy;
  LEEWAY_CHECK(easy != nullptr, "curl_easy_init");
  const auto header = [&](const char* line) {
    transfer->headers = curl_slist_append(transfer->headers, line);
  };
  for (const std::string& line : transfer->call.headers) header(line.c_str());
  header("Expect:");
  curl_easy_setopt(easy, CURLOPT_URL, transfer->call.url.c_str());
  curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, CURL_HTTP_VERSION_1_1);
  curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(easy, CURLOPT_PROXY, "");
  curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
  curl_easy_setopt(easy, CURLOPT_TCP_NODELAY, 1L);
  curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, take_bytes);
  curl_easy_setopt(easy, CURLOPT_WRITEDATA, transfer.get());
  // Far away: our own time-outs end calls, and curl would also count the time between polls.
  curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, 3600000L);
  if (transfer->call.post) {
    header("Content-Type: application/json");
    curl_easy_setopt(easy, CURLOPT_POST, 1L);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDS, transfer->call.body.data());
    curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE,
                     static_cast<curl_off_t>(transfer->call.body.size()));
  }
  curl_easy_setopt(easy, CURLOPT_HTTPHEADER, transfer->headers);
  const int64_t number = impl_->next++;
  impl_->numbers[easy] = number;
  impl_->open.emplace(number, std::move(transfer));
  const CURLMcode code = curl_multi_add_handle(impl_->multi, easy);
  LEEWAY_CHECK(code == CURLM_OK, curl_multi_strerror(code));
  return number;
}

void CurlHttp::cancel(int64_t call) {
  if (impl_->open.contains(call)) impl_->end(call);
}

std::vector<HttpResult> CurlHttp::poll(double seconds) {
  const double end = now_seconds() + seconds;
  std::vector<HttpResult> results;
  while (true) {
    int running = 0;
    curl_multi_perform(impl_->multi, &running);
    impl_->collect(results);
    impl_->end_late(results);
    const double left = end - now_seconds();
    if (!results.empty() || impl_->open.empty() || left <= 0.0) return results;
    const int milliseconds = std::max(1, static_cast<int>(std::min(left, 0.1) * 1000.0));
    curl_multi_poll(impl_->multi, nullptr, 0, milliseconds, nullptr);
  }
}

}  // namespace leeway
