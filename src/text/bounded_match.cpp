#include "text/bounded_match.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "leeway/error.h"

namespace leeway {
namespace {

// Uncounted steps at each possible start of a match.
constexpr size_t kFreeSteps = 1024;

}  // namespace

struct BoundedMatch::Parts {
  Parts()
      : data(pcre2_match_data_create(1, nullptr)), context(pcre2_match_context_create(nullptr)) {
    if (data == nullptr || context == nullptr) throw std::bad_alloc();
  }
  ~Parts() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  pcre2_match_data* data;
  pcre2_match_context* context;
};

BoundedMatch::BoundedMatch(size_t steps, unsigned heap_kib)
    : parts_(std::make_unique<Parts>()), steps_(steps) {
  pcre2_set_heap_limit(parts_->context, heap_kib);
}
BoundedMatch::~BoundedMatch() = default;

size_t BoundedMatch::begin() const {
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(parts_->data);
  return std::min(ends[0], ends[1]);  // \K in a lookahead puts the start behind the end
}
size_t BoundedMatch::end() const { return pcre2_get_ovector_pointer(parts_->data)[1]; }

int BoundedMatch::match(const pcre2_real_code_8* code, std::string_view text, size_t from,
                        unsigned options, size_t limit) {
  pcre2_set_match_limit(parts_->context,
                        static_cast<uint32_t>(std::min<size_t>(limit, UINT32_MAX)));
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const int result =
      pcre2_match(code, subject, text.size(), from, options, parts_->data, parts_->context);
  if (result != PCRE2_ERROR_JIT_STACKLIMIT) return result;
  // The interpreter backtracks on the heap.
  return pcre2_match(code, subject, text.size(), from, options | PCRE2_NO_JIT, parts_->data,
                     parts_->context);
}

int BoundedMatch::find(const pcre2_real_code_8* code, std::string_view text, size_t from,
                       unsigned options) {
  const int all = match(code, text, from, options, kFreeSteps);
  if (all != PCRE2_ERROR_MATCHLIMIT) return all;
  // Some starting position needs more steps: try the positions one by one.
  for (size_t at = from; at <= text.size();) {
    int result = match(code, text, at, options | PCRE2_ANCHORED, kFreeSteps);
    for (size_t limit = kFreeSteps; result == PCRE2_ERROR_MATCHLIMIT && steps_ > 0;) {
      limit = std::min(8 * limit, std::max(steps_, kFreeSteps));
      steps_ -= std::min(steps_, limit);
      result = match(code, text, at, options | PCRE2_ANCHORED, limit);
    }
    if (result != PCRE2_ERROR_NOMATCH) return result;
    do ++at;
    while (at < text.size() && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80);
  }
  return PCRE2_ERROR_NOMATCH;
}

}  // namespace leeway
