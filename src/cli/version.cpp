// The only file that is compiled anew when the commit changes.

#include "cli/version.h"

#include "leeway_commit.h"

namespace leeway {

std::string version_number() { return LEEWAY_VERSION; }

std::string version_text() {
  return "leeway " LEEWAY_VERSION " (" LEEWAY_COMMIT ")\nbuilt with " LEEWAY_BUILT_WITH;
}

}  // namespace leeway
