#include "address_space.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

namespace sim {

namespace {
constexpr size_t kPerDevice = size_t(8) << 40;  // 8 TiB
}

AddressSpace& AddressSpace::instance() {
  static auto* space = new AddressSpace;  // outlives every tensor
  return *space;
}

AddressSpace::AddressSpace() {
  void* range = mmap(nullptr, kDevices * kPerDevice, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(range != MAP_FAILED, "The simulated accelerator needs ",
              kDevices * kPerDevice, " bytes of address space and got none: raise the "
              "limit on virtual memory (ulimit -v).");
  base_ = static_cast<char*>(range);
  for (int device = 0; device < kDevices; device++)
    free_.push_back({{base_ + device * kPerDevice, kPerDevice}});
}

int AddressSpace::device_of(const void* address) const {
  auto offset = static_cast<const char*>(address) - base_;
  if (offset < 0 || size_t(offset) >= kDevices * kPerDevice) return -1;
  return static_cast<int>(size_t(offset) / kPerDevice);
}

char* AddressSpace::take(int device, size_t n_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& ranges = free_.at(device);
  for (auto it = ranges.begin(); it != ranges.end(); ++it) {
    auto [address, size] = *it;
    if (size < n_bytes) continue;
    ranges.erase(it);
    if (size > n_bytes) ranges.emplace(address + n_bytes, size - n_bytes);
    return address;
  }
  TORCH_CHECK(false, "The address space of simulated device ", device,
              " has no range of ", n_bytes, " bytes left.");
}

void AddressSpace::give(int device, char* address, size_t n_bytes) {
  discard(address, n_bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  auto& ranges = free_.at(device);
  auto it = ranges.emplace(address, n_bytes).first;
  auto next = std::next(it);
  if (next != ranges.end() && it->first + it->second == next->first) {
    it->second += next->second;
    ranges.erase(next);
  }
  if (it == ranges.begin()) return;
  auto previous = std::prev(it);
  if (previous->first + previous->second == it->first) {
    previous->second += it->second;
    ranges.erase(it);
  }
}

void AddressSpace::discard(char* address, size_t n_bytes) {
  madvise(address, n_bytes, MADV_DONTNEED);
}

}  // namespace sim
