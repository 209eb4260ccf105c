// Hollow: the device computes nothing. What is left is shapes, types, strides, aliases,
// memory, and a clock that tells what a card of given speeds would have taken.
#pragma once

#include "runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>

namespace sim {

inline std::atomic<bool> is_hollow{false};

// How fast the card is: see hollow.py.
struct Card {
  double half_flops = 1;
  double single_flops = 1;
  double memory_bytes = 1;
  double host_bytes = 1;
  double blas_workspace = 0;
  double launch = 0;
  double segment = 0;
  double segment_byte = 0;
  double granule = 0;
};
inline Card card;

// Virtual nanoseconds since the process began, of each device.
struct Clock {
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> allocator{0};
  std::atomic<int64_t> n_kernels{0};
  std::atomic<int64_t> flops{0};  // in millions
  int64_t now() const { return kernels + allocator; }
};
inline Clock clocks[kDevices];

inline void pass_in_allocator(int device, double seconds) {
  if (is_hollow) clocks[device].allocator += int64_t(seconds * 1e9);
}

// Any operator without a kernel of the device's own. False: it is to be computed.
bool run_hollow(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// False: it is to be copied.
bool copy_hollow(const at::Tensor& from, const at::Tensor& to);

// Frees what the library of products holds.
void reset_hollow();

}  // namespace sim
