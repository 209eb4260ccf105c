// What the parts of the simulated accelerator share: the current device, and what is
// counted.
#pragma once

#include "address_space.h"

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

// Moments at which a host waits for its device, on CUDA.
inline std::atomic<int64_t> waits{0};

// Counts one, in which a hollow device's host waits.
void wait();

// How often a random state was copied out.
inline std::atomic<int64_t> rng_copies{0};

// The current device of this thread.
inline thread_local int current_device = 0;

// The current stream of this thread; 0 is the default one.
inline thread_local int64_t current_stream = 0;

inline c10::Device device_at(int index) {
  return {kSim, static_cast<c10::DeviceIndex>(index)};
}

// Makes a device current for as long as it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : before_(current_device) {
    current_device = device;
  }
  ~DeviceScope() { current_device = before_; }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_;
};

// Registers the CPU's kernels where torch would compose an operator of others: as it
// would layer_norm, for which CUDA has a kernel of its own, with other temporaries. Of
// an operator that is written once for all its forms it would call the form that writes
// to a given result, which has a size already: mse_loss warns of that.
void register_kernels();

// Makes torch ask this device where it asks an accelerator.
void register_hooks();

}  // namespace sim
