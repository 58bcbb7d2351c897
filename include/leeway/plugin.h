// Presets, corrections and metrics of one's own in a shared library, which the program loads:
//
//   #include "leeway/plugin.h"
//
//   LEEWAY_PLUGIN(catalog) {
//     catalog.add(leeway::CorrectionInfo{"mine", ..});
//   }
//
// Linked with leeway::core and named by `[trainer.loss] plugin = "libmine.so"` or --plugin. The
// program reads `leeway_plugin_abi` before it calls anything, and refuses a library that was built
// for another version of Leeway, or whose C++ library lays its types out differently.
#pragma once

#include <cstdint>
#include <string>

#include "leeway/presets.h"

namespace leeway {

inline constexpr char kPluginVersion[] = "0.1.0";  // Leeway's

// Plain bytes, so that a library of another compiler can be read as well.
struct PluginAbi {
  char mark[24];
  char version[16];       // of Leeway's headers
  char compiler[40];      // what built it, for messages
  int32_t cxx11_strings;  // layout of std::string
  int32_t catalog_size, spec_size, correction_size, preset_size;
};

constexpr PluginAbi plugin_abi() {
  PluginAbi abi{};
  const auto copy = [](char* to, const char* from, int most) {
    for (int i = 0; i + 1 < most && from[i] != 0; ++i) to[i] = from[i];
  };
  copy(abi.mark, "leeway plugin abi 1", sizeof abi.mark);
  copy(abi.version, kPluginVersion, sizeof abi.version);
#ifdef __VERSION__
  copy(abi.compiler, __VERSION__, sizeof abi.compiler);
#endif
#ifdef _GLIBCXX_USE_CXX11_ABI
  abi.cxx11_strings = _GLIBCXX_USE_CXX11_ABI;
#endif
  abi.catalog_size = sizeof(Catalog);
  abi.spec_size = sizeof(LossSpec);
  abi.correction_size = sizeof(CorrectionInfo);
  abi.preset_size = sizeof(PresetInfo);
  return abi;
}

// Loads the library and lets it add to the catalog. It stays loaded: specs hold its functions.
// Throws Error naming the file for one that cannot be loaded, is no plugin, was built for another
// version or compiler, or adds a name that is taken.
void load_plugin(const std::string& file, Catalog& catalog);

}  // namespace leeway

#define LEEWAY_PLUGIN(catalog)                                                                  \
  extern "C" __attribute__((visibility("default"))) const leeway::PluginAbi leeway_plugin_abi = \
      leeway::plugin_abi();                                                                     \
  extern "C" __attribute__((visibility("default"))) void leeway_plugin_register(                \
      leeway::Catalog& catalog)
