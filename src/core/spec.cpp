#include <fmt/format.h>

#include <cmath>

#include "core/participation.h"
#include "core/spec_text.h"
#include "leeway/loss.h"

namespace leeway {

const char* name_of(Stream stream) {
  switch (stream) {
    case Stream::pi: return "pi";
    case Stream::prox: return "prox";
    case Stream::rollout: return "rollout";
    case Stream::ref: return "ref";
    case Stream::teacher: return "teacher";
  }
  return "?";
}

const char* name_of(ReductionKind kind) {
  switch (kind) {
    case ReductionKind::token_mean: return "token_mean";
    case ReductionKind::seq_mean_token_mean: return "seq_mean_token_mean";
    case ReductionKind::seq_mean_token_sum: return "seq_mean_token_sum";
    case ReductionKind::fixed_length: return "fixed_length";
    case ReductionKind::sum: return "sum";
    case ReductionKind::padded_length_mean: return "padded_length_mean";
  }
  return "?";
}

const char* name_of(Quantity quantity) {
  switch (quantity) {
    case Quantity::ratio: return "ratio";
    case Quantity::difference: return "probability difference";
    case Quantity::k1: return "k1";
    case Quantity::k2: return "k2";
    case Quantity::k3: return "k3";
    case Quantity::binary_kl: return "binary KL, the larger direction";
    case Quantity::signed_binary_kl: return "signed binary KL";
  }
  return "?";
}

const char* name_of(PenaltyKind kind) {
  switch (kind) {
    case PenaltyKind::k1: return "k1";
    case PenaltyKind::k2: return "k2";
    case PenaltyKind::k3: return "k3";
    case PenaltyKind::squared_log: return "squared log ratio";
    case PenaltyKind::absolute: return "absolute log ratio";
  }
  return "?";
}

std::string number_text(double value) {
  if (std::isinf(value)) return value > 0 ? "infinity" : "-infinity";
  return fmt::format("{}", value);
}

std::string ratio_text(const Pair& pair, Level level) {
  const std::string token =
      fmt::format("{}/{}", name_of(pair.numerator), name_of(pair.denominator));
  switch (level) {
    case Level::token: return token;
    case Level::geometric: return fmt::format("exp(mean log({}))", token);
    case Level::sequence: return fmt::format("exp(sum log({}))", token);
    case Level::max: return fmt::format("max({})", token);
    case Level::min: return fmt::format("min({})", token);
  }
  return token;
}

bool LossSpec::reads(Stream stream) const {
  auto in = [stream](const Pair& pair) {
    return pair.numerator == stream || pair.denominator == stream;
  };
  if (stream == Stream::pi) return true;
  if (uses_ratio_of(*this) && in(ratio.pair)) return true;
  for (const Gate& gate : gates) {
    if (in(gate.pair)) return true;
  }
  for (const Penalty& penalty : penalties) {
    if (in(penalty.pair)) return true;
  }
  for (const Correction& correction : corrections) {
    for (Stream read : correction.reads) {
      if (read == stream) return true;
    }
  }
  if (shaping.teacher_tau != 0.0 && shaping.teacher == stream) return true;
  return m2_threshold && (stream == Stream::rollout || stream == Stream::prox);
}

bool LossSpec::needs_sequence_statistics() const {
  if (uses_ratio_of(*this) && ratio.level != Level::token) return true;
  for (const Gate& gate : gates) {
    if (gate.level != Level::token) return true;
  }
  return shaping.sequence_mean;
}

bool LossSpec::denominator_depends_on_pi() const {
  if (reduction.denominator == Denominator::original) return false;
  for (const Gate& gate : gates) {
    if (gate.pair.numerator == Stream::pi || gate.pair.denominator == Stream::pi) return true;
  }
  for (const Correction& correction : corrections) {
    for (Stream read : correction.reads) {
      if (read == Stream::pi) return true;
    }
  }
  return false;
}

}  // namespace leeway
