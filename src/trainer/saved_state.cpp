#include "trainer/saved_state.h"

#include <fmt/format.h>

#include <cmath>

#include "leeway/error.h"
#include "model/weight_files.h"

namespace leeway {

std::string stored_name(const LoraSettings* lora, StateKind kind, const std::string& parameter) {
  if (kind == StateKind::weight) return weight_name(lora, parameter);
  return (kind == StateKind::first_moment ? "m." : "v.") + parameter;
}

SavedState::SavedState(const std::string& folder, const StateModel& model)
    : model_(model),
      weights_(open_weights(folder, model.config, model.lora)),
      moments_(open_stored_tensors(folder, kMomentsStem)) {
  for (const ParameterInfo& info : model_.table) {
    for (const StateKind kind : kMoments) {
      const StoredPlace& place = place_of(kind, info);
      if (place.tensor->shape == info.shape) continue;
      throw Error(
          fmt::format("{}: {} does not have the policy's shape", *place.path, place.tensor->name));
    }
  }
  if (model_.lora == nullptr && model_.config.tie_word_embeddings) check_stored_head();
}

// A tied model may store its head too.
void SavedState::check_stored_head() const {
  if (!weights_.tensors.contains("lm_head.weight")) return;
  std::vector<float> embedding(static_cast<size_t>(model_.table[0].size()));
  read(StateKind::weight, {0, 0, embedding.size()}, embedding);
  check_tied_head(weights_, embedding);
}

const StoredPlace& SavedState::place_of(StateKind kind, const ParameterInfo& info) const {
  const StoredModel& files = kind == StateKind::weight ? weights_ : moments_;
  const std::string name = stored_name(model_.lora, kind, info.name);
  const auto found = files.tensors.find(name);
  if (found == files.tensors.end())
    throw Error(fmt::format("{}: has no tensor {}", files.where, name));
  return found->second;
}

void SavedState::read(StateKind kind, const StatePiece& piece, std::span<float> to) const {
  const StoredPlace& place = place_of(kind, model_.table[piece.parameter]);
  StoredTensor part = *place.tensor;
  part.begin += piece.first * size_of(part.dtype);
  part.end = part.begin + piece.count * size_of(part.dtype);
  part.shape = {static_cast<int64_t>(piece.count)};
  copy_as_float(part, *place.path, to);
  for (const float value : to) {
    const bool is_negative = kind == StateKind::second_moment && value < 0.0f;
    if (std::isfinite(value) && !is_negative) continue;
    throw Error(fmt::format("{}: {} contains {}", *place.path, place.tensor->name,
                            is_negative ? "a negative number" : "a number that is not finite"));
  }
}

void SavedState::check_moments() const {
  std::vector<float> numbers;
  for (size_t i = 0; i < model_.table.size(); ++i) {
    for (const StateKind kind : kMoments) {
      numbers.resize(static_cast<size_t>(model_.table[i].size()));
      read(kind, {i, 0, numbers.size()}, numbers);
    }
  }
}

std::string SavedState::layout_text() const {
  std::string text;
  for (const StoredModel* files : {&weights_, &moments_}) {
    for (const auto& [name, place] : files->tensors) {
      const std::string file = place.path->substr(place.path->rfind('/') + 1);
      text += fmt::format("{} {} {} {}\n", name, file, place.tensor->begin, place.tensor->end);
    }
  }
  return text;
}

}  // namespace leeway
