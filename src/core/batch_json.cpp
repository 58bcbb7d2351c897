#include "core/batch_json.h"

#include <fmt/format.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>

#include <cmath>
#include <map>
#include <unordered_map>

#include "base/json.h"
#include "leeway/error.h"
#include "leeway/presets.h"

namespace leeway {
namespace {

const std::vector<std::string> kSequenceKeys = {
    "pi",      "rollout",  "prox",       "ref",   "teacher",    "mask",
    "weights", "versions", "advantages", "group", "rollout_id", "prompt_len"};
const std::vector<std::string> kLogProbKeys = {"pi", "rollout", "prox", "ref", "teacher"};

// Receives RapidJSON's events. Returning false stops the parser at the offending position;
// `problem` then describes it.
class Handler {
 public:
  using Ch = char;
  std::string problem;

  bool Null() {
    // A whole stream may be null (absent); a value in a stream may be null (NaN).
    if (place_ == Place::value) return finish_value();
    if (place_ == Place::sequences_value) return fail("\"sequences\" must be a list");
    return number(std::nan(""));
  }
  bool Bool(bool flag) {
    if (place_ == Place::list && current_ == "mask") return number(flag ? 1.0 : 0.0);
    if (skipping()) return skipped();
    return fail("a true or false is not expected here");
  }
  bool Int(int v) { return number(v); }
  bool Uint(unsigned v) { return number(v); }
  bool Int64(int64_t v) { return number(static_cast<double>(v)); }
  bool Uint64(uint64_t v) { return number(static_cast<double>(v)); }
  bool Double(double v) { return number(v); }
  bool RawNumber(const char*, rapidjson::SizeType, bool) { return fail("unreachable"); }

  bool String(const char* text, rapidjson::SizeType length, bool) {
    if (skipping()) return skipped();
    if (place_ == Place::value && (current_ == "group" || current_ == "rollout_id")) {
      return label(std::string(text, length));
    }
    return fail(
        fmt::format("text where {} is expected", place_ == Place::value || place_ == Place::list
                                                     ? "a number of \"" + current_ + "\""
                                                     : "an object"));
  }

  bool StartObject() {
    if (skipping()) return ++skip_depth_, true;
    if (place_ == Place::start) return place_ = Place::top, true;
    if (place_ == Place::sequences) {
      place_ = Place::sequence;
      lists_.clear();
      scalar_advantage_.reset();
      prompt_len_.reset();
      group_.reset();
      rollout_id_.reset();
      return true;
    }
    return fail("an object is not expected here");
  }
  bool Key(const char* text, rapidjson::SizeType length, bool) {
    if (skip_depth_ > 0) return true;
    current_.assign(text, length);
    if (place_ == Place::top) {
      if (current_ == "sequences") {
        if (saw_sequences_) return fail("\"sequences\" occurs twice");
        saw_sequences_ = true;
        place_ = Place::sequences_value;
        return true;
      }
      return skip_unknown("the batch");
    }
    if (std::find(kSequenceKeys.begin(), kSequenceKeys.end(), current_) == kSequenceKeys.end()) {
      return skip_unknown("a sequence");
    }
    if (lists_.contains(current_) || (current_ == "advantages" && scalar_advantage_) ||
        (current_ == "prompt_len" && prompt_len_) || (current_ == "group" && group_) ||
        (current_ == "rollout_id" && rollout_id_)) {
      return fail(fmt::format("\"{}\" occurs twice", current_));
    }
    place_ = Place::value;
    return true;
  }
  bool EndObject(rapidjson::SizeType) {
    if (skip_depth_ > 0) return --skip_depth_, skip_depth_ == 0 ? skipped() : true;
    if (place_ == Place::sequence) return finish_sequence();
    if (!saw_sequences_) return fail("the batch has no \"sequences\"");
    place_ = Place::end;
    return true;
  }
  bool StartArray() {
    if (skipping()) return ++skip_depth_, true;
    if (place_ == Place::sequences_value) return place_ = Place::sequences, true;
    if (place_ == Place::value && current_ != "group" && current_ != "rollout_id" &&
        current_ != "prompt_len") {
      list_ = &lists_[current_];
      place_ = Place::list;
      return true;
    }
    return fail(place_ == Place::start ? "a batch is an object with \"sequences\""
                                       : "a list is not expected here");
  }
  bool EndArray(rapidjson::SizeType) {
    if (skip_depth_ > 0) return --skip_depth_, skip_depth_ == 0 ? skipped() : true;
    if (place_ == Place::list) return place_ = Place::sequence, true;
    place_ = Place::top;  // end of "sequences"
    return true;
  }

  LoadedBatch take() {
    if (batch_.offsets.size() == 1) throw Error("the batch is empty: it has no sequences");
    if (batch_.pi.empty()) throw Error("the batch is empty: its sequences have no tokens");
    for (auto& [name, count] : above_zero_) {
      warnings_.push_back(fmt::format(
          "logprobs of \"{}\" above 0, that is, probabilities above 1: {}; used as they are", name,
          count));
    }
    return {std::move(batch_), std::move(warnings_)};
  }

 private:
  enum class Place { start, top, sequences_value, sequences, sequence, value, list, end };

  bool fail(std::string what) {
    problem = std::move(what);
    if (place_ != Place::start && place_ != Place::top && place_ != Place::end) {
      problem = fmt::format("sequence {}: {}", batch_.offsets.size() - 1, problem);
    }
    return false;
  }
  bool skipping() const { return skip_value_ || skip_depth_ > 0; }
  bool skipped() {
    if (skip_depth_ == 0) skip_value_ = false;
    return true;
  }
  bool skip_unknown(const char* of) {
    skip_value_ = true;
    if (++unknown_[current_] == 1) {
      const std::string near = nearest_name(current_, kSequenceKeys);
      warnings_.push_back(fmt::format("\"{}\" is not a key of {} and is ignored{}", current_, of,
                                      near.empty() ? "" : "; did you mean " + near + "?"));
    }
    return true;
  }
  bool finish_value() {
    place_ = Place::sequence;
    return true;
  }
  bool number(double v) {
    if (skipping()) return skipped();
    if (place_ == Place::list) {
      list_->push_back(v);
      return true;
    }
    if (place_ == Place::value) {
      if (current_ == "advantages") return scalar_advantage_ = v, finish_value();
      if (current_ == "prompt_len") return prompt_len_ = v, finish_value();
      if (current_ == "group" || current_ == "rollout_id") return label(fmt::format("{}", v));
    }
    return fail(place_ == Place::value ? fmt::format("\"{}\" must be a list", current_)
                                       : "a number is not expected here");
  }
  bool label(std::string text) {
    (current_ == "group" ? group_ : rollout_id_) = std::move(text);
    return finish_value();
  }

  // Appends one stream of a finished sequence; all sequences or none must have it.
  template <class T>
  bool append(const std::string& key, std::vector<T>& to, size_t n, bool ones_if_absent) {
    const size_t before = static_cast<size_t>(batch_.offsets.back());
    const auto found = lists_.find(key);
    if (found == lists_.end()) {
      if (to.empty()) return true;
      if (ones_if_absent) return to.resize(before + n, T(1)), true;
      return fail(fmt::format("has no \"{}\", which earlier sequences have", key));
    }
    if (found->second.size() != n) {
      return fail(fmt::format("\"{}\" has {} values, \"pi\" has {}", key, found->second.size(), n));
    }
    if (to.empty() && before > 0) {
      if (!ones_if_absent) {
        return fail(fmt::format("has \"{}\", which earlier sequences do not have", key));
      }
      to.assign(before, T(1));
    }
    for (double v : found->second) {
      if constexpr (!std::is_same_v<T, double>) {
        if (!(std::abs(v) <= 2147483647.0) || v != std::floor(v)) {
          return fail(fmt::format("\"{}\" contains {}, not an integer", key, v));
        }
      }
      to.push_back(std::is_same_v<T, uint8_t> ? static_cast<T>(v != 0) : static_cast<T>(v));
    }
    return true;
  }

  // The prompt's positions get the weight 0, which takes them out of everything.
  bool take_prompt_out(size_t n) {
    const double length = *prompt_len_;
    if (!(length >= 0.0 && length <= static_cast<double>(n)) || length != std::floor(length)) {
      return fail(fmt::format(
          "\"prompt_len\" is {}: write how many of the {} positions are the prompt's", length, n));
    }
    const size_t prompt = static_cast<size_t>(length);
    const auto mask = lists_.find("mask");
    for (size_t t = 0; mask != lists_.end() && t < std::min(prompt, mask->second.size()); ++t) {
      if (mask->second[t] == 0.0) continue;
      return fail(
          fmt::format("\"mask\" trains position {}, which \"prompt_len\" {} says is the "
                      "prompt's",
                      t, prompt));
    }
    if (prompt == 0) return true;
    std::vector<double>& weights = lists_.try_emplace("weights", n, 1.0).first->second;
    std::fill_n(weights.begin(), std::min(prompt, weights.size()), 0.0);
    return true;
  }

  bool finish_sequence() {
    if (!lists_.contains("pi")) return fail("has no \"pi\"");
    const size_t n = lists_["pi"].size();
    if (scalar_advantage_) lists_["advantages"].assign(n, *scalar_advantage_);
    if (!lists_.contains("advantages")) return fail("has no \"advantages\"");
    if (prompt_len_ && !take_prompt_out(n)) return false;
    for (const std::string& key : kLogProbKeys) {
      const auto found = lists_.find(key);
      if (found == lists_.end()) continue;
      for (double v : found->second) {
        if (v > 0) ++above_zero_[key];
      }
    }
    const bool ok =
        append("pi", batch_.pi, n, false) && append("prox", batch_.prox, n, false) &&
        append("rollout", batch_.rollout, n, false) && append("ref", batch_.ref, n, false) &&
        append("teacher", batch_.teacher, n, false) &&
        append("advantages", batch_.advantages, n, false) &&
        append("weights", batch_.weights, n, true) && append("mask", batch_.mask, n, true) &&
        append("versions", batch_.versions, n, false);
    if (!ok) return false;
    const size_t sequence = batch_.offsets.size() - 1;
    if (group_.has_value() != (sequence == 0 ? group_.has_value() : !batch_.groups.empty()) ||
        rollout_id_.has_value() !=
            (sequence == 0 ? rollout_id_.has_value() : !batch_.rollout_ids.empty())) {
      return fail("\"group\" and \"rollout_id\" are given for every sequence or for none");
    }
    batch_.offsets.push_back(batch_.offsets.back() + static_cast<int64_t>(n));
    if (group_) batch_.groups.push_back(*group_);
    if (rollout_id_) {
      batch_.rollout_ids.push_back(
          rollout_numbers_.emplace(*rollout_id_, static_cast<int32_t>(rollout_numbers_.size()))
              .first->second);
    }
    place_ = Place::sequences;
    return true;
  }

  Place place_ = Place::start;
  std::string current_;
  bool saw_sequences_ = false, skip_value_ = false;
  size_t skip_depth_ = 0;
  std::map<std::string, std::vector<double>> lists_;
  std::vector<double>* list_ = nullptr;
  std::optional<double> scalar_advantage_, prompt_len_;
  std::optional<std::string> group_, rollout_id_;
  std::unordered_map<std::string, int32_t> rollout_numbers_;
  std::map<std::string, size_t> above_zero_, unknown_;
  Batch batch_;
  std::vector<std::string> warnings_;
};

}  // namespace

LoadedBatch parse_batch(const std::string& name, std::string_view text) {
  refuse_nul(name, text);
  const std::optional<std::string> plain = with_plain_zeros(text);
  if (plain) text = *plain;
  Handler handler;
  rapidjson::Reader reader;
  rapidjson::MemoryStream memory(text.data(), text.size());
  constexpr unsigned kFlags = rapidjson::kParseNanAndInfFlag | rapidjson::kParseFullPrecisionFlag |
                              rapidjson::kParseIterativeFlag;
  if (!reader.Parse<kFlags>(memory, handler)) {
    const bool ours = reader.GetParseErrorCode() == rapidjson::kParseErrorTermination;
    throw Error(fmt::format("{} {}: {}", name, place_in(text, reader.GetErrorOffset()),
                            ours ? handler.problem : json_error_text(reader.GetParseErrorCode())));
  }
  try {
    return handler.take();
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", name, error.what()));
  }
}

}  // namespace leeway
