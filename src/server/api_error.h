// What is answered instead of a result: a status, and the error object that OpenAI's clients read.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "base/json.h"

namespace leeway {

class ApiError : public std::runtime_error {
 public:
  // `param`: the key of the request that is wrong; empty: none.
  ApiError(int status, const std::string& message, std::string param = "")
      : std::runtime_error(message), status_(status), param_(std::move(param)) {}
  int status() const { return status_; }
  const std::string& param() const { return param_; }

 private:
  int status_;
  std::string param_;
};

inline const char* error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 429:
    case 503: return "overloaded_error";
    case 500: return "server_error";
    default: return "invalid_request_error";
  }
}

inline std::string error_json(int status, const std::string& message,
                              const std::string& param = "") {
  JsonWriter json;
  json.begin_object().key("error").begin_object();
  json.key("message").value(message).key("type").value(error_type(status)).key("param");
  param.empty() ? json.null() : json.value(param);
  json.key("code").null().end_object().end_object();
  return json.text();
}

}  // namespace leeway
