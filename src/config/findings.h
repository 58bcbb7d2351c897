// What reading a configuration finds: all of its problems, and keys of the file that are dropped
// because of the command line.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "config/given.h"
#include "leeway/error.h"

namespace leeway {

// Problems in the order of the file, followed by those of the command line.
class Problems {
 public:
  void add(uint64_t order, std::string text);
  void add(const Given& given, const std::string& problem);
  void add(const Problems& others);

  // Runs `step`; an Error that it throws becomes a problem at `order`.
  template <class Step>
  void attempt(uint64_t order, Step&& step) {
    try {
      step();
    } catch (const Error& error) {
      add(order, error.what());
    }
  }
  template <class Step>
  void attempt(const Given& given, Step&& step) {
    const size_t before = problems_.size();
    attempt(given.order, step);
    if (problems_.size() > before) blamed_.insert(given.name());
  }

  // Marks a value as missing or invalid, so that checks which depend on it are skipped.
  void blame(const std::string& name) { blamed_.insert(name); }
  // Whether a value was refused, so that what depends on it cannot be checked.
  bool blames(const std::string& name) const { return blamed_.contains(name); }
  // Whether there are more problems than are shown. Further ones need no suggestion, which is slow
  // to compute.
  bool full() const;
  size_t count() const { return problems_.size(); }
  // Throws ConfigError if there are any problems.
  void throw_if_any() const;

 private:
  struct Problem {
    uint64_t order;
    std::string text;
  };
  std::vector<Problem> problems_;
  std::set<std::string> blamed_;
};

// A key of the file that is dropped because of the command line.
struct TakenAlong {
  enum class Reason {
    without_effect,
    other_default,  // the file's preset has this default, and the one on the command line another
  };
  std::string name;   // full name of the key
  std::string cause;  // "--set trainer.schedule = \"constant\"", "--unset trainer.schedule"
  Reason reason = Reason::without_effect;
};

struct Findings {
  Problems problems;
  std::vector<TakenAlong> taken_along;

  // Records that `given`, the last value of a key, has no effect because of the keys `causes`; a
  // cause that ends with a dot means all keys of that table. If `given` is in the file and a cause
  // comes from the command line, the key is dropped with a note; otherwise it is a problem.
  void inert(const Document& document, const Given& given, const std::vector<std::string>& causes,
             const std::string& problem);
};

}  // namespace leeway
