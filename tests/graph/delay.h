// Injected delays: the one place of these tests that sleeps, to shake the order in which threads
// meet. Nothing waits for anything by it.

#pragma once

#include <chrono>
#include <cstdint>

namespace oom::testing {

// Mostly nothing; sometimes gives the core away, rarely for up to `max_microseconds`. Thread-safe.
void RandomDelay(uint64_t seed, int max_microseconds);
// What an operator of that length costs.
void OperatorDelay(std::chrono::microseconds length);

}  // namespace oom::testing
