#include "trainer/saved_moments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/folders.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr const char* kStem = "optimizer";

const StoredPlace& place_of(const StoredModel& files, Moment which, const ParameterInfo& info) {
  const std::string name = moment_name(which, info);
  const auto found = files.tensors.find(name);
  if (found == files.tensors.end())
    throw Error(fmt::format("{}: has no tensor {}", files.where, name));
  return found->second;
}

}  // namespace

std::string moment_name(Moment which, const ParameterInfo& info) {
  return (which == Moment::first ? "m." : "v.") + info.name;
}

SavedMoments::SavedMoments(const std::string& folder, const std::vector<ParameterInfo>& table)
    : table_(table), files_(open_stored_tensors(folder, kStem)) {
  for (const ParameterInfo& info : table_) {
    for (const Moment which : kMoments) {
      const StoredPlace& place = place_of(files_, which, info);
      if (place.tensor->shape == info.shape) continue;
      throw Error(fmt::format("{}: {} does not have the policy's shape", *place.path,
                              moment_name(which, info)));
    }
  }
}

void SavedMoments::read(Moment which, const MomentPiece& piece, std::span<float> to) const {
  const ParameterInfo& info = table_[piece.parameter];
  const StoredPlace& place = place_of(files_, which, info);
  StoredTensor part = *place.tensor;
  part.begin += piece.first * size_of(part.dtype);
  part.end = part.begin + piece.count * size_of(part.dtype);
  part.shape = {static_cast<int64_t>(piece.count)};
  copy_as_float(part, *place.path, to);
  for (const float value : to) {
    if (!std::isfinite(value)) {
      throw Error(fmt::format("{}: {} contains a number that is not finite", *place.path,
                              moment_name(which, info)));
    }
    if (which == Moment::second && value < 0.0f) {
      throw Error(
          fmt::format("{}: {} contains a negative number", *place.path, moment_name(which, info)));
    }
  }
}

void SavedMoments::check() const {
  std::vector<float> numbers;
  for (size_t i = 0; i < table_.size(); ++i) {
    for (const Moment which : kMoments) {
      numbers.resize(static_cast<size_t>(table_[i].size()));
      read(which, {i, 0, numbers.size()}, numbers);
    }
  }
}

std::string SavedMoments::layout_text() const {
  std::string text;
  for (const auto& [name, place] : files_.tensors) {
    const std::string file = place.path->substr(place.path->rfind('/') + 1);
    text += fmt::format("{} {} {} {}\n", name, file, place.tensor->begin, place.tensor->end);
  }
  return text;
}

void refuse_not_finite(const std::vector<ParameterInfo>& table, const MomentsOfParameter& moments) {
  const ParameterInfo& info = table[moments.parameter];
  for (const Moment which : kMoments) {
    const std::string bad = not_finite_text(
        info.name, info.shape, which == Moment::first ? moments.first : moments.second);
    if (bad.empty()) continue;
    throw Error(
        fmt::format("the {} moment of {}", which == Moment::first ? "first" : "second", bad));
  }
}

void remove_other_moments(const std::string& folder, const FileSums& written) {
  const std::string single = fmt::format("{}.safetensors", kStem);
  std::vector<std::string> stale;
  for (const std::string& name : folder_names(folder)) {
    const bool moments =
        is_stored_part_name(kStem, name) || name == single || name == single + ".index.json";
    if (moments && !written.contains(name)) stale.push_back(name);
  }
  for (const std::string& name : stale) remove_tree(folder + "/" + name);
}

}  // namespace leeway
