// Counts the bytes of the CPU "device" of this process: plan-named memory that is announced, and every tensor
// that LibTorch allocates (its CPU allocator is replaced by one that counts). Thread-safe.

#pragma once

#include <cstdint>

#include "worker/worker_device.h"

namespace oom {

// Puts the counting allocator under LibTorch and tells malloc to keep what a step frees, so that a steady step
// maps no memory. Call once, before the first tensor.
void InstallCountingAllocator();

// Adds bytes that live as long as the process.
void CountDeviceBytes(int64_t bytes);

int64_t DeviceBytesPeak();

// Now, and the most since the last call.
MemoryUse TakeDeviceBytes();

}  // namespace oom
