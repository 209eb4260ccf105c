#include "memory.h"

#include <c10/core/CPUAllocator.h>

#include <map>

namespace sim {

CachingAllocator& memory_of(int device) {
  static auto* all = [] {  // outlives every tensor
    auto* made = new std::vector<CachingAllocator*>;
    for (int index = 0; index < kDevices; index++)
      made->push_back(new CachingAllocator(index));
    return made;
  }();
  return *all->at(device);
}

namespace {

void free_on_device(void* address) {
  if (!address) return;
  memory_of(AddressSpace::instance().device_of(address)).deallocate(address);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n_bytes) override {
    void* address = memory_of(current_device).allocate(n_bytes);
    return {address, address, &free_on_device, device_at(current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, std::size_t n_bytes) const override {
    default_copy_data(to, from, n_bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int index = 0; index < kDevices; index++) memory_of(index).empty_cache();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex device) override {
    return memory_of(device).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    memory_of(device).reset_accumulated_stats();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    memory_of(device).reset_peak_stats();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto& memory = memory_of(device);
    return {memory.free(), memory.total()};
  }
};

void free_on_host(void* address) {
  if (AddressSpace::instance().device_of(address) >= 0)
    free_on_device(address);
  else
    c10::GetDefaultCPUAllocator()->raw_deallocate(address);
}

class HostMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n_bytes) override {
    void* address = KernelScope::entered()
                        ? memory_of(current_device).allocate(n_bytes)
                        : c10::GetDefaultCPUAllocator()->raw_allocate(n_bytes);
    return {address, address, &free_on_host, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_host; }
  void copy_data(void* to, const void* from, std::size_t n_bytes) const override {
    default_copy_data(to, from, n_bytes);
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n_bytes) override {
    void* address = c10::GetDefaultCPUAllocator()->raw_allocate(n_bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (address) ranges_[address] = n_bytes;
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t n_bytes) const override {
    default_copy_data(to, from, n_bytes);
  }
  bool has(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = ranges_.upper_bound(const_cast<void*>(address));
    if (after == ranges_.begin()) return false;
    auto [begin, n_bytes] = *std::prev(after);
    return address < static_cast<char*>(begin) + n_bytes;
  }
  static PinnedMemory& instance() {
    static auto* memory = new PinnedMemory;  // outlives every tensor
    return *memory;
  }

 private:
  static void free_pinned(void* address) {
    if (!address) return;
    {
      std::lock_guard<std::mutex> lock(instance().mutex_);
      instance().ranges_.erase(address);
    }
    c10::GetDefaultCPUAllocator()->raw_deallocate(address);
  }

  std::mutex mutex_;
  std::map<void*, size_t> ranges_;
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kSim, &device_memory);

}  // namespace

c10::DeviceAllocator& device_allocator() { return device_memory; }

c10::Allocator& pinned_allocator() { return PinnedMemory::instance(); }

bool is_pinned(const void* address) { return PinnedMemory::instance().has(address); }

void wrap_host_allocator() {
  static auto* memory = new HostMemory;
  constexpr uint8_t kPriority = 1;  // above the default's, below nobody's
  c10::SetCPUAllocator(memory, kPriority);
}

}  // namespace sim
