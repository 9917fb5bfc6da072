// YaRN: rotary frequencies for contexts longer than the one that a model was made for (models
// reference, 1.2). Slow frequencies are divided by `factor`, fast ones stay, a ramp over the pairs
// of a head lies between. Pure functions.

#pragma once

#include <cstdint>

namespace oom {

inline constexpr int64_t kMostYarnPositions = int64_t{1} << 30;

struct YarnScaling {
  double factor = 1.0;             // Longest context over the original one; at least 1.
  int64_t original_positions = 1;  // Longest context that the model was made for.
  double beta_fast = 32.0;         // Turns over the original context from which a pair is fast,
  double beta_slow = 1.0;          // and up to which it is slow.
  double attention_factor = 1.0;   // Cosine and sine are multiplied by it.
  bool truncate = true;            // The ramp's ends are whole pairs.

  bool operator==(const YarnScaling&) const = default;
};

// The attention factor that goes with `factor` where nothing else is said.
double YarnAttentionFactor(double factor, double mscale = 1.0);

// With defaults for everything else.
YarnScaling MakeYarn(double factor, int64_t original_positions);

// Pair i of a head is slow to the share clamp((i - low) / (high - low), 0, 1).
struct YarnRamp {
  double low = 0.0;
  double high = 1.0;
};

// REQUIRES: theta > 1.
YarnRamp YarnRampOf(const YarnScaling& yarn, int64_t head_size, double theta);

}  // namespace oom
