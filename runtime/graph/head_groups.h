// Into how many groups of query heads a plan divides an attention: the operators, their memory and
// the step graph agree on it here.

#pragma once

#include <algorithm>
#include <cstdint>

#include "oom/v1/plan.pb.h"
#include "runtime/model/description.h"

namespace oom {

// Groups are whole sets of query heads that share a key/value head. 1: not divided.
inline int64_t HeadGroupCount(const v1::OperatorPartitions& partitions,
                              const AttentionDescription& attention) {
  return std::clamp<int64_t>(partitions.attention_head_group_count(), 1, attention.kv_head_count);
}

// False for mixers that are no attention.
inline bool RunsInHeadGroups(const v1::OperatorPartitions& partitions,
                             const LayerDescription& layer) {
  return layer.mixer == MixerKind::kAttention && HeadGroupCount(partitions, layer.attention) > 1;
}

}  // namespace oom
