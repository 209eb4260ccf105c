// Addresses for simulated device memory.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

namespace sim {

constexpr int kDevices = 2;

// One range of host addresses that holds all device memory, so that an address alone
// tells whether it is device memory, and of which device. The host's pages behind it
// come into being when they are first written.
class AddressSpace {
 public:
  static AddressSpace& instance();

  // The device that an address belongs to; -1 for host memory.
  int device_of(const void* address) const;

  // The lowest free range of that length.
  char* take(int device, size_t n_bytes);

  // Take a range back; its contents are gone.
  void give(int device, char* address, size_t n_bytes);

  // Let go of what a range holds, and keep the range.
  static void discard(char* address, size_t n_bytes);

 private:
  AddressSpace();

  char* base_;
  std::mutex mutex_;
  std::vector<std::map<char*, size_t>> free_;  // for each device, by address
};

}  // namespace sim
