// Loading of plugins. What a library says about itself is read as bytes before any of its code that
// knows our types is called.

#include "leeway/plugin.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstring>

#include "leeway/error.h"

namespace leeway {
namespace {

template <size_t size>
std::string text_of(const char (&field)[size]) {
  return std::string(field, strnlen(field, size));
}

void check_abi(const std::string& file, const PluginAbi& theirs) {
  const PluginAbi ours = plugin_abi();
  if (std::memcmp(theirs.mark, ours.mark, sizeof ours.mark) != 0) {
    throw Error(fmt::format("plugin {}: its entry is of another kind than \"{}\"; build it again",
                            file, text_of(ours.mark)));
  }
  if (std::memcmp(theirs.version, ours.version, sizeof ours.version) != 0) {
    throw Error(fmt::format(
        "plugin {}: was built for leeway {}, this is leeway {}: build it again with its headers",
        file, text_of(theirs.version), text_of(ours.version)));
  }
  if (theirs.cxx11_strings != ours.cxx11_strings || theirs.catalog_size != ours.catalog_size ||
      theirs.spec_size != ours.spec_size || theirs.correction_size != ours.correction_size ||
      theirs.preset_size != ours.preset_size) {
    throw Error(fmt::format(
        "plugin {}: its types are laid out differently: it was compiled by \"{}\", leeway by "
        "\"{}\"; use the same compiler and standard library",
        file, text_of(theirs.compiler), text_of(ours.compiler)));
  }
}

}  // namespace

void load_plugin(const std::string& file, Catalog& catalog) {
  // A name without a slash would be looked for in the system's folders.
  const std::string path = file.find('/') == std::string::npos ? "./" + file : file;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(fmt::format("plugin {}: cannot be loaded: {}", file, dlerror()));
  }
  const auto* abi = static_cast<const PluginAbi*>(dlsym(library, "leeway_plugin_abi"));
  auto* entry = reinterpret_cast<void (*)(Catalog&)>(dlsym(library, "leeway_plugin_register"));
  if (abi == nullptr || entry == nullptr) {
    throw Error(fmt::format(
        "plugin {}: is not a plugin of leeway: it lacks LEEWAY_PLUGIN of leeway/plugin.h", file));
  }
  check_abi(file, *abi);
  try {
    entry(catalog);
  } catch (const Error& error) {
    throw Error(fmt::format("plugin {}: {}", file, error.what()));
  } catch (const std::exception& error) {
    throw Error(fmt::format("plugin {}: its registration failed: {}", file, error.what()));
  }
}

}  // namespace leeway
