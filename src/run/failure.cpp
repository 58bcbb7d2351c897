#include "run/failure.h"

#include <cxxabi.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <stdexcept>
#include <system_error>
#include <typeinfo>

#include "base/out_of_memory.h"
#include "leeway/error.h"
#include "ranks/ranks.h"

namespace leeway {
namespace {

std::string type_name(const std::exception& exception) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(typeid(exception).name(), nullptr, nullptr, &status), &std::free);
  return name ? name.get() : typeid(exception).name();
}

Failure out_of_memory() {
  return {3,
          "out of memory: the system refused to allocate more; use a smaller model, batch or "
          "input, or raise the limit (ulimit -v shows it)"};
}

}  // namespace

Failure failure_of(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const OutOfMemory& error) {
    return {3, error.what()};
  } catch (const Lost& error) {
    return {3, error.what()};
  } catch (const Error& error) {
    return {2, error.what()};
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  } catch (const std::length_error&) {  // more elements than any memory could hold
    return out_of_memory();
  } catch (const std::filesystem::filesystem_error& error) {
    const std::string second = error.path2().string();
    return {2, fmt::format("{}{}{}: {}", error.path1().string(), second.empty() ? "" : " and ",
                           second, error.code().message())};
  } catch (const std::system_error& error) {
    return {2, fmt::format("the system refused: {}", error.what())};
  } catch (const std::exception& error) {
    const std::string type = type_name(error);
    const std::string what = error.what();
    // PyTorch's headers are not included here. Usually the GPU is out of memory; a trace follows
    // the first line.
    if (type.starts_with("c10::")) return {3, "PyTorch failed: " + what.substr(0, what.find('\n'))};
    return {kOurBug,
            fmt::format("internal error (a bug in leeway): unexpected {}: {}", type, what)};
  } catch (...) {
    return {kOurBug, "internal error (a bug in leeway): unexpected exception of unknown type"};
  }
}

std::optional<std::string> failure_in(const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    const std::exception_ptr exception = std::current_exception();
    Failure failure = failure_of(exception);
    if (failure.exit_code == kOurBug) std::rethrow_exception(exception);
    return std::move(failure.message);
  }
  return std::nullopt;
}

}  // namespace leeway
