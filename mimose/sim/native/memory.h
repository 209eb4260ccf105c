// The allocators that torch knows: of the device, of the host, of pinned memory.
#pragma once

#include "allocator.h"
#include "runtime.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace sim {

CachingAllocator& memory_of(int device);

// Allocates on the current device.
c10::DeviceAllocator& device_allocator();

// Where tensors in pinned host memory come from.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

// Replaces the CPU's allocator by one that is the same but within a `KernelScope`.
void wrap_host_allocator();

// While it lives, what this thread allocates on the CPU is memory of the current
// device: a CPU kernel that runs for the device makes results and temporaries there.
class KernelScope {
 public:
  KernelScope() { depth++; }
  ~KernelScope() { depth--; }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

  static bool entered() { return depth > 0; }

 private:
  static inline thread_local int depth = 0;
};

}  // namespace sim
