#include "tests/graph/reference_job.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "runtime/base/check.h"

namespace oom::testing {
namespace {

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

// The nearest BF16, ties to even: a gradient partial.
float RoundPartial(float value) {
  const uint32_t bits = Bits(value);
  return std::bit_cast<float>((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

bool Below(float value, int exponent) {
  return (Bits(value) & 0x7FFFFFFFu) < static_cast<uint32_t>(127 + exponent) << 23;
}

// A value of about `scale` from a hash.
float Draw(uint64_t hash, float scale) {
  return scale * (static_cast<float>(hash >> 40) * 0x1p-23f - 1.0f);
}

}  // namespace

void Repeat(const Lanes& lanes, int64_t count, float* out) {
  std::memcpy(out, lanes.data(), sizeof(lanes));
  for (int64_t done = kLanes; done < count;) {
    const int64_t more = std::min(done, count - done);
    std::memcpy(out + done, out, static_cast<size_t>(more) * sizeof(float));
    done += more;
  }
}

float WorkingWeight(float master, bool float32) {
  return float32 ? master : std::bit_cast<float>((Bits(master) + 0x8000u) & 0xFFFF0000u);
}

Lanes ReadLanes(const std::byte* weights, bool float32) {
  Lanes lanes;
  if (float32) {
    std::memcpy(lanes.data(), weights, sizeof(lanes));
    return lanes;
  }
  std::array<uint16_t, kLanes> halves;
  std::memcpy(halves.data(), weights, sizeof(halves));
  for (int64_t i = 0; i < kLanes; ++i) {
    lanes[i] = std::bit_cast<float>(static_cast<uint32_t>(halves[i]) << 16);
  }
  return lanes;
}

ReferenceJob::ReferenceJob(const TestJob& job, uint64_t seed) : job_(job), seed_(seed) {
  for (const ParameterUnit& unit : job.layout->units()) {
    first_group_.push_back(static_cast<int64_t>(groups_.size()));
    const int64_t size = unit.kind == UnitKind::kEmbedding ? job.model.hidden_size : kBlockElements;
    for (int64_t first = 0; first < unit.elements; first += size) {
      bool decayed = false;
      for (const TensorSpec& tensor : unit.tensors) {
        const bool inside =
            tensor.offset_elements < first / kBlockElements * kBlockElements + kBlockElements &&
            tensor.offset_elements + tensor.elements > first / kBlockElements * kBlockElements;
        if (inside) decayed = tensor.decayed;
      }
      groups_.push_back({.unit = unit.index,
                         .index = first / size,
                         .first_element = first,
                         .elements = size,
                         .decayed = decayed});
    }
  }
  first_group_.push_back(static_cast<int64_t>(groups_.size()));
  std::vector<State> states(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    states[g].moment1.fill(0.0f);
    states[g].moment2.fill(0.0f);
    for (int64_t i = 0; i < kLanes; ++i) {
      states[g].master[i] = Draw(Mix(seed, 1, g, i), 0.5f);
    }
  }
  history_.push_back(std::move(states));
}

AdamWHyperparameters ReferenceJob::Hyper() {
  return {.beta1 = 0.8, .beta2 = 0.9, .epsilon = 1e-6, .weight_decay = 0.1};
}

Schedule ReferenceJob::ScheduleOf() {
  return {.kind = ScheduleKind::kLinear,
          .peak_learning_rate = 0.02,
          .warmup_steps = 3,
          .total_steps = 10000,
          .minimum_ratio = 0.5};
}

Lanes ReferenceJob::Gradient(uint64_t seed, int64_t step, int rank, int micro_batch, int64_t unit,
                             int64_t group, const Lanes& weights) {
  const uint64_t where =
      Mix(seed, static_cast<uint64_t>(step), static_cast<uint64_t>(rank * 16 + micro_batch),
          static_cast<uint64_t>(unit * 100000 + group));
  Lanes out;
  for (int64_t i = 0; i < kLanes; ++i) {
    out[i] = Draw(Mix(where, static_cast<uint64_t>(i)), 0.3f) + 0.25f * weights[i];
  }
  return out;
}

std::vector<int64_t> ReferenceJob::Tokens(uint64_t seed, int64_t step, int rank, int micro_batch,
                                          int64_t count, int64_t vocabulary_size) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<int64_t>(Mix(seed + 7, static_cast<uint64_t>(step),
                                              static_cast<uint64_t>(rank * 16 + micro_batch),
                                              static_cast<uint64_t>(i)) %
                                          static_cast<uint64_t>(vocabulary_size)));
  }
  return tokens;
}

double ReferenceJob::Loss(uint64_t seed, int64_t step, int rank) {
  return 1.0 + static_cast<double>(
                   Mix(seed + 3, static_cast<uint64_t>(step), static_cast<uint64_t>(rank)) >> 11) *
                   0x1p-53;
}

Lanes ReferenceJob::Working(const Lanes& master) const {
  Lanes out;
  for (int64_t i = 0; i < kLanes; ++i) out[i] = WorkingWeight(master[i], job_.layout->float32());
  return out;
}

std::vector<Lanes> ReferenceJob::SummedGradients() const {
  const int64_t now = step();
  const bool float32 = job_.layout->float32();
  std::vector<std::vector<std::vector<int64_t>>> tokens;  // By rank, by micro-batch.
  for (int rank = 0; rank < job_.plan.rank_count(); ++rank) {
    tokens.emplace_back();
    for (int micro_batch = 0; micro_batch < job_.plan.accumulation(); ++micro_batch) {
      tokens.back().push_back(Tokens(seed_, now, rank, micro_batch, job_.batch.micro_batch_tokens(),
                                     job_.model.vocabulary_size));
    }
  }
  const v1::GradientReduction reduction = job_.plan.reduction();
  std::vector<Lanes> sums;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const Lanes weights = Working(history_.back()[g].master);
    const bool embedding =
        job_.layout->units()[static_cast<size_t>(group.unit)].kind == UnitKind::kEmbedding;
    const bool on_host = embedding || reduction == v1::GRADIENT_REDUCTION_HOST;
    const bool rounds_partials =
        !float32 && (on_host || reduction == v1::GRADIENT_REDUCTION_DEVICE_BFLOAT16);
    Lanes sum{};
    for (int rank = 0; rank < job_.plan.rank_count(); ++rank) {
      Lanes partial{};
      for (int micro_batch = 0; micro_batch < job_.plan.accumulation(); ++micro_batch) {
        const auto& rows = tokens[static_cast<size_t>(rank)][static_cast<size_t>(micro_batch)];
        if (embedding && std::find(rows.begin(), rows.end(), group.index) == rows.end()) continue;
        const Lanes part =
            Gradient(seed_, now, rank, micro_batch, group.unit, group.index, weights);
        for (int64_t i = 0; i < kLanes; ++i) partial[i] += part[i];
      }
      for (int64_t i = 0; i < kLanes; ++i) {
        const float rounded = rounds_partials ? RoundPartial(partial[i]) : partial[i];
        sum[i] = rank == 0 ? rounded : sum[i] + rounded;
      }
    }
    if (!on_host && !float32) {
      for (float& value : sum) value = RoundPartial(value);
    }
    sums.push_back(sum);
  }
  return sums;
}

double ReferenceJob::GradientNorm() const {
  const std::vector<Lanes> sums = SummedGradients();
  double squares = 0.0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    double of_group = 0.0;
    for (const float value : sums[g]) of_group += static_cast<double>(value) * value;
    squares += of_group * static_cast<double>(groups_[g].elements) / kLanes;
  }
  return std::sqrt(squares);
}

void ReferenceJob::Step(double clip) {
  const int64_t now = step();
  const AdamWHyperparameters hyper = Hyper();
  const double rate = LearningRate(ScheduleOf(), now);
  const auto t = static_cast<double>(now + 1);
  const auto b1 = static_cast<float>(hyper.beta1);
  const auto c1 = static_cast<float>(1.0 - hyper.beta1);
  const auto b2 = static_cast<float>(hyper.beta2);
  const auto c2 = static_cast<float>(1.0 - hyper.beta2);
  const auto a = static_cast<float>(rate / (1.0 - std::pow(hyper.beta1, t)));
  const auto q = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(hyper.beta2, t)));
  const auto epsilon = static_cast<float>(hyper.epsilon);
  const auto k = static_cast<float>(clip);

  const std::vector<Lanes> sums = SummedGradients();
  std::vector<State> states = history_.back();
  for (size_t g = 0; g < groups_.size(); ++g) {
    State& state = states[g];
    const auto d = static_cast<float>(1.0 - rate * (groups_[g].decayed ? hyper.weight_decay : 0.0));
    for (int64_t i = 0; i < kLanes; ++i) {
      float gradient = sums[g][i];
      if (k != 1.0f) gradient *= k;
      if (Below(gradient, -56)) gradient = 0.0f;
      float m = std::fma(b1, state.moment1[i], c1 * gradient);
      float v = std::fma(b2, state.moment2[i], c2 * (gradient * gradient));
      if (Below(m, -100)) m = 0.0f;
      if (Below(v, -100)) v = 0.0f;
      state.moment1[i] = m;
      state.moment2[i] = v;
      state.master[i] = std::fma(-a, m / std::fma(std::sqrt(v), q, epsilon), d * state.master[i]);
    }
  }
  history_.push_back(std::move(states));
}

void ReferenceJob::Fill(const PoolMap& pools) const {
  const SharedLayout& layout = *job_.layout;
  std::vector<float> values;
  for (const Chunk& chunk : layout.chunks()) {
    std::byte* weights = pools.At(layout.weights(chunk.index));
    std::byte* rest = pools.At(layout.rest(chunk.index));
    for (int64_t g = first_group_[chunk.unit]; g < first_group_[chunk.unit + 1]; ++g) {
      const Group& group = groups_[static_cast<size_t>(g)];
      const State& state = history_.back()[static_cast<size_t>(g)];
      if (group.first_element < chunk.first_element ||
          group.first_element >= chunk.first_element + chunk.elements) {
        continue;
      }
      for (int64_t e = 0; e < group.elements; ++e) {
        const int64_t at = group.first_element - chunk.first_element + e;
        const auto lane = static_cast<size_t>(e % kLanes);
        std::byte* block = rest + at / kBlockElements * layout.rest_block_bytes();
        const int64_t within = at % kBlockElements;
        std::memcpy(block + within * 4, &state.moment1[lane], 4);
        std::memcpy(block + 16384 + within * 4, &state.moment2[lane], 4);
        if (layout.float32()) {
          std::memcpy(weights + at * 4, &state.master[lane], 4);
          continue;
        }
        const uint32_t bits = Bits(state.master[lane]);
        const auto weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        const auto low = static_cast<int16_t>(bits - (static_cast<uint32_t>(weight) << 16));
        std::memcpy(weights + at * 2, &weight, 2);
        std::memcpy(block + 32768 + within * 2, &low, 2);
      }
    }
  }
}

std::string ReferenceJob::CompareGroup(const PoolMap& pools, const Chunk& chunk, int64_t g,
                                       int64_t step) const {
  const SharedLayout& layout = *job_.layout;
  const std::byte* weights = pools.At(layout.weights(chunk.index));
  const std::byte* rest = pools.At(layout.rest(chunk.index));
  const Group& group = groups_[static_cast<size_t>(g)];
  const State& state = history_[static_cast<size_t>(step)][static_cast<size_t>(g)];
  for (int64_t e = 0; e < group.elements; ++e) {
    const int64_t at = group.first_element - chunk.first_element + e;
    const auto lane = static_cast<size_t>(e % kLanes);
    const std::byte* block = rest + at / kBlockElements * layout.rest_block_bytes();
    const int64_t within = at % kBlockElements;
    float moment1, moment2, master;
    std::memcpy(&moment1, block + within * 4, 4);
    std::memcpy(&moment2, block + 16384 + within * 4, 4);
    if (layout.float32()) {
      std::memcpy(&master, weights + at * 4, 4);
    } else {
      uint16_t weight;
      int16_t low;
      std::memcpy(&weight, weights + at * 2, 2);
      std::memcpy(&low, block + 32768 + within * 2, 2);
      master = std::bit_cast<float>((static_cast<uint32_t>(weight) << 16) +
                                    static_cast<uint32_t>(static_cast<int32_t>(low)));
    }
    if (Bits(master) == Bits(state.master[lane]) && Bits(moment1) == Bits(state.moment1[lane]) &&
        Bits(moment2) == Bits(state.moment2[lane])) {
      continue;
    }
    return "chunk " + std::to_string(chunk.index) + " of " +
           layout.units()[static_cast<size_t>(chunk.unit)].name + ", element " +
           std::to_string(at) + " differs from step " + std::to_string(step) + ": master " +
           std::to_string(master) + " instead of " + std::to_string(state.master[lane]) +
           ", moment1 " + std::to_string(moment1) + " instead of " +
           std::to_string(state.moment1[lane]);
  }
  return "";
}

bool ReferenceJob::IsEarly(const Group& group, int64_t step) const {
  const ParameterUnit& unit = job_.layout->units()[static_cast<size_t>(group.unit)];
  if (unit.kind != UnitKind::kEmbedding || job_.layout->resident(unit.index) ||
      job_.plan.update_mode() != v1::UPDATE_MODE_OVERLAPPED) {
    return false;
  }
  const int64_t width = job_.model.hidden_size;
  const int64_t first_block = group.first_element / kBlockElements;
  const int64_t last_block = (group.first_element + group.elements - 1) / kBlockElements;
  for (int rank = 0; rank < job_.layout->rank_count(); ++rank) {
    for (const int64_t token : Tokens(seed_, step, rank, 0, job_.batch.micro_batch_tokens(),
                                      job_.model.vocabulary_size)) {
      if (token * width / kBlockElements <= last_block &&
          ((token + 1) * width - 1) / kBlockElements >= first_block) {
        return false;
      }
    }
  }
  return true;
}

std::string ReferenceJob::Compare(const PoolMap& pools, int64_t chunk_index, int64_t step,
                                  bool within_a_step) const {
  const Chunk& chunk = job_.layout->chunks()[static_cast<size_t>(chunk_index)];
  for (int64_t g = first_group_[chunk.unit]; g < first_group_[chunk.unit + 1]; ++g) {
    const Group& group = groups_[static_cast<size_t>(g)];
    if (group.first_element < chunk.first_element ||
        group.first_element >= chunk.first_element + chunk.elements) {
      continue;
    }
    const std::string difference = CompareGroup(pools, chunk, g, step);
    if (difference.empty()) continue;
    const bool is_ahead = within_a_step && step < this->step() && IsEarly(group, step) &&
                          CompareGroup(pools, chunk, g, step + 1).empty();
    if (!is_ahead) return difference;
  }
  return "";
}

std::string ReferenceJob::CompareAll(const PoolMap& pools) const {
  for (const Chunk& chunk : job_.layout->chunks()) {
    const std::string difference = Compare(pools, chunk.index, step());
    if (!difference.empty()) return difference;
  }
  return "";
}

}  // namespace oom::testing
