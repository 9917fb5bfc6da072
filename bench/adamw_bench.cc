// AdamW on the CPU against the fastest pass that moves the same bytes.
// The update reads a BF16 gradient and reads and writes the 12-byte split state: 26 bytes a
// parameter. The yardstick is an in-place scale of the same five arrays in the same memory (weight,
// weight_low and both moments read and written, the gradient read), vectorised and fused into one
// loop. Both run on the same threads, alternately, and the medians are compared. The same again
// with denormal gradients and moments (refilled before every timed update, the yardstick on normal
// values as before), and for information with denormal weights too: the rule has no threshold for
// those, and no training reaches them. Exits with 1 if the best level misses the bar.
//   adamw_bench [--threads N] [--mib N] [--rounds N] [--level scalar|avx2|avx512]

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/optim/adamw.h"

namespace {

using namespace std::string_view_literals;

constexpr int64_t kBlockElements = 4096;
constexpr int64_t kBytesPerParameter = 26;
constexpr int64_t kMemoryPerParameter = 14;
constexpr double kBar = 0.9;

struct Options {
  int threads = 1;
  int64_t mib = 1024;
  int rounds = 9;
  oom::SimdLevel level = oom::DetectSimdLevel();
};

// Anonymous memory on hugepages where the system gives them; never returned, the process ends after
// it.
std::byte* MapArray(int64_t bytes) {
  void* const memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  OOM_CHECK(memory != MAP_FAILED);
  static_cast<void>(madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE));
  return static_cast<std::byte*>(memory);
}

struct Arrays {
  uint16_t* weight;
  std::byte* rest;
  uint16_t* gradient;
};

Arrays At(const Arrays& arrays, int64_t block) {
  return {.weight = arrays.weight + block * kBlockElements,
          .rest = arrays.rest + block * oom::kSplitRestBytesPerBlock,
          .gradient = arrays.gradient + block * kBlockElements};
}

// What the passes find in memory.
enum class Contents { kNormal, kDenormalMoments, kDenormalAll };

void Fill(Contents contents, const Arrays& arrays, int64_t first_block, int64_t last_block) {
  uint32_t random = 12345u + static_cast<uint32_t>(first_block);
  for (int64_t block = first_block; block < last_block; ++block) {
    const Arrays here = At(arrays, block);
    float* const moment1 = reinterpret_cast<float*>(here.rest);
    float* const moment2 = moment1 + kBlockElements;
    int16_t* const low = reinterpret_cast<int16_t*>(moment2 + kBlockElements);
    for (int64_t i = 0; i < kBlockElements; ++i) {
      random = random * 1664525u + 1013904223u;
      const float unit = static_cast<float>(random >> 8) * 0x1p-24f;
      const auto sign = static_cast<uint16_t>((random & 1u) << 15);
      const bool normal = contents == Contents::kNormal;
      moment1[i] = (normal ? 1e-4f : 0x1p-127f) * (unit - 0.5f);
      moment2[i] = (normal ? 1e-7f : 0x1p-127f) * unit;
      low[i] = static_cast<int16_t>(random >> 12);
      here.gradient[i] =
          static_cast<uint16_t>((normal ? 0x3A00u : 0x0001u) + (random >> 26)) | sign;
      here.weight[i] =
          static_cast<uint16_t>((contents == Contents::kDenormalAll ? 0x0001u : 0x3C80u) +
                                (random >> 27)) |
          sign;
    }
  }
}

constexpr float kScale = 0.9999999f;

// The yardstick prefetches as far ahead as helps it most, into the next block at a block's end.
constexpr int64_t kPrefetchElements = 768;

inline __attribute__((always_inline)) void PrefetchAhead(const Arrays& arrays, int64_t i) {
  const int64_t ahead = i + kPrefetchElements;
  const int64_t block = ahead / kBlockElements;
  const int64_t in_block = ahead % kBlockElements;
  const std::byte* const rest = arrays.rest + block * oom::kSplitRestBytesPerBlock;
  __builtin_prefetch(rest + in_block * 4);
  __builtin_prefetch(rest + in_block * 4 + 64);
  __builtin_prefetch(rest + kBlockElements * 4 + in_block * 4);
  __builtin_prefetch(rest + kBlockElements * 4 + in_block * 4 + 64);
  __builtin_prefetch(rest + kBlockElements * 8 + in_block * 2);
  __builtin_prefetch(arrays.weight + ahead);
  __builtin_prefetch(arrays.gradient + ahead);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void ScaleBlockAvx512(
    const Arrays& arrays) {
  float* const moment1 = reinterpret_cast<float*>(arrays.rest);
  float* const moment2 = moment1 + kBlockElements;
  int16_t* const low = reinterpret_cast<int16_t*>(moment2 + kBlockElements);
  const __m512 scale = _mm512_set1_ps(kScale);
  const __m512i one = _mm512_set1_epi16(1);
  for (int64_t i = 0; i < kBlockElements; i += 32) {
    PrefetchAhead(arrays, i);
    const __m512i gradient = _mm512_and_si512(_mm512_loadu_si512(arrays.gradient + i), one);
    const __m512i weight = _mm512_loadu_si512(arrays.weight + i);
    const __m512i weight_low = _mm512_loadu_si512(low + i);
    const __m512 a = _mm512_loadu_ps(moment1 + i), b = _mm512_loadu_ps(moment1 + i + 16);
    const __m512 c = _mm512_loadu_ps(moment2 + i), d = _mm512_loadu_ps(moment2 + i + 16);
    _mm512_storeu_si512(arrays.weight + i, _mm512_xor_si512(weight, gradient));
    _mm512_storeu_si512(low + i, _mm512_add_epi16(weight_low, one));
    _mm512_storeu_ps(moment1 + i, _mm512_mul_ps(a, scale));
    _mm512_storeu_ps(moment1 + i + 16, _mm512_mul_ps(b, scale));
    _mm512_storeu_ps(moment2 + i, _mm512_mul_ps(c, scale));
    _mm512_storeu_ps(moment2 + i + 16, _mm512_mul_ps(d, scale));
  }
}

__attribute__((target("avx2"))) inline void ScaleSixteenAvx2(const Arrays& arrays, int64_t i) {
  float* const moment1 = reinterpret_cast<float*>(arrays.rest) + i;
  float* const moment2 = moment1 + kBlockElements;
  auto* const low = reinterpret_cast<__m256i*>(arrays.rest + kBlockElements * 8 + i * 2);
  auto* const weight = reinterpret_cast<__m256i*>(arrays.weight + i);
  const auto* const gradient = reinterpret_cast<const __m256i*>(arrays.gradient + i);
  const __m256 scale = _mm256_set1_ps(kScale);
  const __m256i one = _mm256_set1_epi16(1);
  const __m256i bit = _mm256_and_si256(_mm256_loadu_si256(gradient), one);
  const __m256 a = _mm256_loadu_ps(moment1), b = _mm256_loadu_ps(moment1 + 8);
  const __m256 c = _mm256_loadu_ps(moment2), d = _mm256_loadu_ps(moment2 + 8);
  _mm256_storeu_si256(weight, _mm256_xor_si256(_mm256_loadu_si256(weight), bit));
  _mm256_storeu_si256(low, _mm256_add_epi16(_mm256_loadu_si256(low), one));
  _mm256_storeu_ps(moment1, _mm256_mul_ps(a, scale));
  _mm256_storeu_ps(moment1 + 8, _mm256_mul_ps(b, scale));
  _mm256_storeu_ps(moment2, _mm256_mul_ps(c, scale));
  _mm256_storeu_ps(moment2 + 8, _mm256_mul_ps(d, scale));
}

__attribute__((target("avx2"))) void ScaleBlockAvx2(const Arrays& arrays) {
  for (int64_t i = 0; i < kBlockElements; i += 32) {
    PrefetchAhead(arrays, i);
    ScaleSixteenAvx2(arrays, i);
    ScaleSixteenAvx2(arrays, i + 16);
  }
}

void ScaleBlockBaseline(const Arrays& arrays) {
  float* const moments = reinterpret_cast<float*>(arrays.rest);
  int16_t* const low = reinterpret_cast<int16_t*>(moments + 2 * kBlockElements);
  for (int64_t i = 0; i < kBlockElements; ++i) {
    arrays.weight[i] = static_cast<uint16_t>(arrays.weight[i] ^ (arrays.gradient[i] & 1));
    low[i] = static_cast<int16_t>(low[i] + 1);
    moments[i] *= kScale;
    moments[kBlockElements + i] *= kScale;
  }
}

// The yardstick is as fast as the CPU can, whatever level the update is told to use.
void ScaleBlocks(const Arrays& arrays, int64_t first_block, int64_t last_block) {
  const bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const auto scale = avx512                           ? ScaleBlockAvx512
                     : __builtin_cpu_supports("avx2") ? ScaleBlockAvx2
                                                      : ScaleBlockBaseline;
  for (int64_t block = first_block; block < last_block; ++block) scale(At(arrays, block));
}

// Runs one function on all threads' shares of the blocks at once and returns the seconds.
class Team {
 public:
  using Work = std::function<void(int64_t first_block, int64_t last_block)>;

  Team(int threads, int64_t blocks) : start_(threads + 1), end_(threads + 1) {
    for (int index = 0; index < threads; ++index) {
      const int64_t first = blocks * index / threads;
      const int64_t last = blocks * (index + 1) / threads;
      threads_.emplace_back([this, first, last] {
        const oom::ScopedOptimizerMxcsr mxcsr;
        while (true) {
          start_.arrive_and_wait();
          if (work_ == nullptr) return;
          (*work_)(first, last);
          end_.arrive_and_wait();
        }
      });
    }
  }
  ~Team() {
    work_ = nullptr;
    start_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  double Run(const Work& work) {
    work_ = &work;
    const auto begin = std::chrono::steady_clock::now();
    start_.arrive_and_wait();
    end_.arrive_and_wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  std::barrier<> start_, end_;
  const Work* work_ = nullptr;
  std::vector<std::thread> threads_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Prints the medians and returns their ratio. The yardstick always scales normal values.
double Compare(std::string_view name, Contents contents, const Options& options,
               const Arrays& arrays, int64_t blocks, Team* team) {
  const auto fill = [&](Contents what) {
    team->Run([&](int64_t first, int64_t last) { Fill(what, arrays, first, last); });
  };
  const auto scale = [&] {
    return team->Run([&](int64_t first, int64_t last) { ScaleBlocks(arrays, first, last); });
  };
  const auto update = [&](int64_t step) {
    const oom::AdamWScalars scalars =
        oom::MakeAdamWScalars({.weight_decay = 0.1}, 3e-4, step, /*decayed=*/true, /*clip=*/1.0);
    return team->Run([&](int64_t first, int64_t last) {
      const Arrays here = At(arrays, first);
      const uint16_t* const ranks[] = {here.gradient};
      oom::AdamWUpdate(options.level, scalars, oom::Bfloat16Partials{ranks},
                       oom::SplitState{.weight = here.weight, .rest = here.rest},
                       (last - first) * kBlockElements);
    });
  };
  std::vector<double> update_seconds, scale_seconds;
  for (int round = 0; round <= options.rounds; ++round) {
    fill(Contents::kNormal);
    const double scaled = scale();
    fill(contents);
    const double updated = update(1 + round);
    if (round == 0) continue;  // Warm-up.
    scale_seconds.push_back(scaled);
    update_seconds.push_back(updated);
  }
  const double giga = static_cast<double>(blocks * kBlockElements) / 1e9;
  const double update_median = Median(update_seconds), scale_median = Median(scale_seconds);
  const double ratio = scale_median / update_median;
  std::printf("%-28s AdamW %7.2f GB/s (%5.2f Gparam/s)   scale %7.2f GB/s   ratio %.3f\n",
              std::string(name).c_str(), giga * kBytesPerParameter / update_median,
              giga / update_median, giga * kBytesPerParameter / scale_median, ratio);
  return ratio;
}

int Usage() {
  std::fprintf(
      stderr,
      "usage: adamw_bench [--threads N] [--mib N] [--rounds N] [--level scalar|avx2|avx512]\n"
      "  --threads  threads of both passes (1)\n"
      "  --mib      memory of the five arrays together, 14 bytes a parameter (1024)\n"
      "  --rounds   timed rounds, of which the median counts (9)\n"
      "  --level    instruction set of the update (the CPU's best)\n");
  return 2;
}

bool Parse(int argc, char** argv, Options* options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    const std::string_view value = argv[i + 1];
    const int64_t number = std::strtoll(argv[i + 1], nullptr, 10);
    if (flag == "--level"sv) {
      bool known = false;
      for (const auto level :
           {oom::SimdLevel::kScalar, oom::SimdLevel::kAvx2, oom::SimdLevel::kAvx512}) {
        if (value != oom::SimdLevelName(level) || level > oom::DetectSimdLevel()) continue;
        options->level = level;
        known = true;
      }
      if (!known) return false;
    } else if (number < 1 || number > 1 << 24) {
      return false;
    } else if (flag == "--threads"sv) {
      options->threads = static_cast<int>(number);
    } else if (flag == "--mib"sv) {
      options->mib = number;
    } else if (flag == "--rounds"sv) {
      options->rounds = static_cast<int>(number);
    } else {
      return false;
    }
  }
  return argc % 2 == 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, &options)) return Usage();
  const int64_t blocks = std::max<int64_t>(
      options.threads, (options.mib << 20) / (kMemoryPerParameter * kBlockElements));
  const Arrays arrays{
      .weight = reinterpret_cast<uint16_t*>(MapArray(blocks * kBlockElements * 2)),
      .rest = MapArray(blocks * oom::kSplitRestBytesPerBlock),
      .gradient = reinterpret_cast<uint16_t*>(MapArray(blocks * kBlockElements * 2))};
  std::printf("%s, %d thread(s), %.1f million parameters, median of %d\n",
              std::string(oom::SimdLevelName(options.level)).c_str(), options.threads,
              static_cast<double>(blocks * kBlockElements) / 1e6, options.rounds);
  Team team(options.threads, blocks);
  const double normal = Compare("normal values", Contents::kNormal, options, arrays, blocks, &team);
  const double denormal = Compare("denormal gradient, moments", Contents::kDenormalMoments, options,
                                  arrays, blocks, &team);
  Compare("denormal weights too", Contents::kDenormalAll, options, arrays, blocks, &team);
  const bool met = normal >= kBar && denormal >= kBar;
  std::printf("bar: ratio at least %.2f on the first two: %s\n", kBar, met ? "met" : "NOT met");
  return met || options.level != oom::DetectSimdLevel() ? 0 : 1;
}
