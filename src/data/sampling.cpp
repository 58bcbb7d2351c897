#include "data/sampling.h"

namespace leeway {

const char* name_of(Finish finish) {
  switch (finish) {
    case Finish::stop: return "stop";
    case Finish::length: return "length";
    case Finish::cancelled: return "cancelled";
    case Finish::failed: return "failed";
  }
  return "";
}

}  // namespace leeway
