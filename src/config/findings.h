// What reading a configuration finds: problems, all of them, and keys of the file that the command
// line leaves without effect.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "config/given.h"
#include "leeway/error.h"

namespace leeway {

// Problems in the order of the file, those of the command line after them.
class Problems {
 public:
  void add(uint64_t order, std::string text);
  void add(const Given& given, const std::string& problem);
  void add(const Problems& others);

  // Runs `step`; what it throws is a problem at `order`.
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

  // Says of a value that is not there or no value that it cannot be judged.
  void blame(const std::string& name) { blamed_.insert(name); }
  // Whether a value was refused: what depends on it cannot be judged.
  bool blames(const std::string& name) const { return blamed_.contains(name); }
  // Whether there are more than are shown: further ones need no remedy, which takes its time.
  bool full() const;
  size_t count() const { return problems_.size(); }
  // Throws ConfigError unless there are none.
  void throw_if_any() const;

 private:
  struct Problem {
    uint64_t order;
    std::string text;
  };
  std::vector<Problem> problems_;
  std::set<std::string> blamed_;
};

// A key of the file that has no effect beside what the command line says.
struct TakenAlong {
  std::string name;   // of the key
  std::string cause;  // "--set trainer.schedule = \"constant\"", "--unset trainer.schedule"
};

struct Findings {
  Problems problems;
  std::vector<TakenAlong> taken_along;

  // `given`, the last value of a key, has no effect because of the keys `causes`; a cause that ends
  // with a dot is all keys of that table. It is taken along where it stands in the file and a cause
  // comes from the command line, and else a problem.
  void inert(const Document& document, const Given& given, const std::vector<std::string>& causes,
             const std::string& problem);
};

}  // namespace leeway
