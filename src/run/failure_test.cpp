// What exceptions mean to the user.

#include "run/failure.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/out_of_memory.h"
#include "leeway/error.h"

namespace c10 {
struct OutOfMemoryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
}  // namespace c10

namespace leeway {
namespace {

template <class Exception>
Failure failure_of(const Exception& exception) {
  return leeway::failure_of(std::make_exception_ptr(exception));
}

void expect_failure(const Failure& failure, int code, const std::string& part) {
  EXPECT_EQ(failure.exit_code, code);
  EXPECT_NE(failure.message.find(part), std::string::npos) << failure.message;
}

TEST(Failure, OfTheUserKeepsItsWords) {
  expect_failure(failure_of(Error("a.toml: no")), 2, "a.toml: no");
}

TEST(Failure, OfMemoryIsNotTheUsersMistake) {
  expect_failure(failure_of(std::bad_alloc()), 3, "out of memory");
  expect_failure(failure_of(OutOfMemory("no memory for 7 weights")), 3, "no memory for 7 weights");
  expect_failure(failure_of(std::length_error("vector::reserve")), 3, "out of memory");
}

TEST(Failure, OfAFileNamesThePathsAndTheReason) {
  const std::error_code denied = std::make_error_code(std::errc::permission_denied);
  expect_failure(failure_of(std::filesystem::filesystem_error("cannot rename", "a", "b", denied)),
                 2, "a and b: Permission denied");
  expect_failure(failure_of(std::filesystem::filesystem_error("status", "/x/y", denied)), 2,
                 "/x/y: Permission denied");
}

TEST(Failure, OfTheSystemSaysWhat) {
  const std::error_code again = std::make_error_code(std::errc::resource_unavailable_try_again);
  expect_failure(failure_of(std::system_error(again)), 2, "Resource temporarily unavailable");
}

TEST(Failure, OfPyTorchIsItsFirstLine) {
  const Failure failure = failure_of(c10::OutOfMemoryError("CUDA out of memory.\n#0 trace"));
  expect_failure(failure, 3, "CUDA out of memory.");
  EXPECT_EQ(failure.message.find("trace"), std::string::npos) << failure.message;
}

TEST(Failure, UnexpectedIsOurBug) {
  expect_failure(failure_of(std::logic_error("x")), kOurBug, "std::logic_error: x");
  expect_failure(failure_of(1), kOurBug, "a bug in leeway");
}

TEST(Failure, InWorkIsReturnedUnlessItIsOurs) {
  EXPECT_EQ(failure_in([] {}), std::nullopt);
  EXPECT_EQ(failure_in([] { throw Error("full"); }), "full");
  EXPECT_TRUE(failure_in([] { throw std::bad_alloc(); }).has_value());
  EXPECT_THROW(failure_in([] { throw std::logic_error("x"); }), std::logic_error);
}

}  // namespace
}  // namespace leeway
