// WindowSet decides which unit sits in which parameter window (or gradient buffer) while a graph is built: a
// window for each class of unit (ordinary, experts, head, tied embedding) and slot, the least recently used slot
// is given up. A unit that is still in a window at the turn from forward to backward is not loaded again (engine
// rules, section 4). Value type; used by one builder.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/model/unit.h"

namespace oom {

class WindowSet {
 public:
  struct Slot {
    std::string name;         // "window.experts.1"
    bool holds_unit = false;  // Nothing to load.
  };

  // REQUIRES: count >= 1. The head, and an embedding that it shares, have one slot: they are used once a micro-batch
  // and loaded once a step.
  explicit WindowSet(int count) : count_(count) {}

  // What the windows hold is of the step before: another version.
  void BeginStep() { classes_.clear(); }

  Slot Take(UnitKind kind, int64_t unit) {
    Class& of_kind = classes_[kind];
    if (of_kind.units.empty()) {
      const bool once = kind == UnitKind::kHead || kind == UnitKind::kEmbedding;
      const int slots = once ? 1 : count_;
      of_kind.units.assign(static_cast<size_t>(slots), -1);
      of_kind.last_use.assign(static_cast<size_t>(slots), 0);
    }
    size_t chosen = 0;
    bool found = false;
    for (size_t slot = 0; slot < of_kind.units.size(); ++slot) {
      if (of_kind.units[slot] == unit) {
        chosen = slot;
        found = true;
        break;
      }
      if (of_kind.last_use[slot] < of_kind.last_use[chosen]) chosen = slot;
    }
    of_kind.units[chosen] = unit;
    of_kind.last_use[chosen] = ++clock_;
    const char* name = kind == UnitKind::kHead        ? "head"
                       : kind == UnitKind::kExperts   ? "experts"
                       : kind == UnitKind::kEmbedding ? "embedding"
                                                      : "layer";
    return {.name = "window." + std::string(name) + "." + std::to_string(chosen),
            .holds_unit = found};
  }

 private:
  struct Class {
    std::vector<int64_t> units;
    std::vector<int64_t> last_use;
  };

  int count_;
  int64_t clock_ = 0;
  std::map<UnitKind, Class> classes_;
};

}  // namespace oom
