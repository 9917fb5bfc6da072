#include "runtime/checkpoint/raw_state.h"

#include <cstring>

#include "runtime/base/check.h"
#include "runtime/model/unit.h"
#include "runtime/optim/adamw.h"

namespace oom {
namespace {

constexpr int64_t kMomentBytes = kBlockElements * static_cast<int64_t>(sizeof(float));

int64_t RestBytesPerBlock(Precision precision) {
  return precision == Precision::kBfloat16 ? kSplitRestBytesPerBlock : kMasterRestBytesPerBlock;
}

void CheckRange(const StateBuffer& state, int64_t first_element, int64_t elements) {
  OOM_CHECK(first_element % kBlockElements == 0 && elements % kBlockElements == 0);
  OOM_CHECK(first_element >= 0 && elements <= state.elements - first_element);
}

}  // namespace

int64_t WeightBytesPerElement(Precision precision) {
  return precision == Precision::kBfloat16 ? 2 : 4;
}

StateBuffer PlaceState(Precision precision, int64_t elements, std::span<std::byte> bytes) {
  OOM_CHECK(elements * kStateBytesPerElement <= static_cast<int64_t>(bytes.size()));
  return {.weights = bytes.data(),
          .rest = bytes.data() + elements * WeightBytesPerElement(precision),
          .elements = elements};
}

void RawToFloat(Precision precision, const StateBuffer& state, int64_t first_element,
                std::span<float> masters, std::span<float> moment1, std::span<float> moment2) {
  const auto elements = static_cast<int64_t>(masters.size());
  CheckRange(state, first_element, elements);
  for (int64_t done = 0; done < elements; done += kBlockElements) {
    const std::byte* rest =
        state.rest + (first_element + done) / kBlockElements * RestBytesPerBlock(precision);
    const std::byte* weights =
        state.weights + (first_element + done) * WeightBytesPerElement(precision);
    std::memcpy(moment1.data() + done, rest, kMomentBytes);
    std::memcpy(moment2.data() + done, rest + kMomentBytes, kMomentBytes);
    if (precision == Precision::kFloat32) {
      std::memcpy(masters.data() + done, weights, kMomentBytes);
    } else {
      JoinMasters(reinterpret_cast<const uint16_t*>(weights),
                  reinterpret_cast<const int16_t*>(rest + 2 * kMomentBytes),
                  masters.subspan(static_cast<size_t>(done), kBlockElements));
    }
  }
}

void FloatToRaw(Precision precision, std::span<const float> masters, std::span<const float> moment1,
                std::span<const float> moment2, int64_t first_element, const StateBuffer& state) {
  const auto elements = static_cast<int64_t>(masters.size());
  CheckRange(state, first_element, elements);
  for (int64_t done = 0; done < elements; done += kBlockElements) {
    std::byte* rest =
        state.rest + (first_element + done) / kBlockElements * RestBytesPerBlock(precision);
    std::byte* weights = state.weights + (first_element + done) * WeightBytesPerElement(precision);
    std::memcpy(rest, moment1.data() + done, kMomentBytes);
    std::memcpy(rest + kMomentBytes, moment2.data() + done, kMomentBytes);
    if (precision == Precision::kFloat32) {
      std::memcpy(weights, masters.data() + done, kMomentBytes);
    } else {
      SplitMasters(masters.subspan(static_cast<size_t>(done), kBlockElements),
                   reinterpret_cast<uint16_t*>(weights),
                   reinterpret_cast<int16_t*>(rest + 2 * kMomentBytes));
    }
  }
}

}  // namespace oom
