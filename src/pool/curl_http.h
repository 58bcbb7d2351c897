// Calls by libcurl, on the thread that polls. Proxies of the environment are not used, redirections
// are not followed.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "pool/http.h"

namespace leeway {

class CurlHttp : public Http {
 public:
  // Answers of more bytes are failures.
  explicit CurlHttp(size_t most_bytes = size_t{256} << 20);
  ~CurlHttp() override;

  int64_t start(HttpCall call) override;
  void cancel(int64_t call) override;
  std::vector<HttpResult> poll(double seconds) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace leeway
