// The device's guard, with streams and events, and torch's hooks for an accelerator.
#include "runtime.h"

#include "hollow.h"
#include "memory.h"
#include "random.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <ctime>

namespace sim {

namespace {

// Kernels have run when the host goes on, so that a device's time is the host's: what
// this process has computed, for nobody else has work for such a device.
// A hollow device has a clock of its own.
struct EventState {
  std::clock_t recorded;
  int64_t hollow;
};

// Streams differ in time alone: kernels have run when the host goes on. What makes a
// host wait is counted.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return device_at(current_device); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> n_made{0};
    return stream_of(device, ++n_made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(stream.device(), current_stream);
    current_stream = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait();
    wait_until(stream.device_index(), timelines[stream.device_index()].end_of(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait();
    wait_until(device, timelines[device].now());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new EventState;
    static_cast<EventState*>(*event)->recorded = std::clock();
    int device = stream.device_index() < 0 ? current_device : stream.device_index();
    static_cast<EventState*>(*event)->hollow =
        host.operator_seconds > 0 ? timelines[device].end_of(stream.id())
                                  : clocks[device].now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event || host.operator_seconds <= 0) return;
    timelines[stream.device_index()].block(stream.id(),
                                           static_cast<EventState*>(event)->hollow);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    wait();
    if (event) wait_until(current_device, static_cast<EventState*>(event)->hollow);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    if (is_hollow)
      return 1e-6 * double(static_cast<EventState*>(end)->hollow -
                           static_cast<EventState*>(begin)->hollow);
    auto passed = static_cast<EventState*>(end)->recorded -
                  static_cast<EventState*>(begin)->recorded;
    return 1e3 * static_cast<double>(passed) / CLOCKS_PER_SEC;
  }
  c10::Stream stream_of(c10::Device device, int64_t id) const {
    bool known = device.index() >= 0;
    return c10::Stream(c10::Stream::UNSAFE, known ? device : getDevice(), id);
  }
  static void wait_until(int device, int64_t time) {
    if (is_hollow && host.operator_seconds > 0) timelines[device].wait_for(time);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }

  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK(device >= 0 && device < kDevices, "There is no device ", int(device),
                " of the simulated accelerator: it has ", kDevices, ".");
    current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : int(device));
  }

  at::Device getDeviceFromPtr(void* address) const override {
    int device = AddressSpace::instance().device_of(address);
    TORCH_CHECK(device >= 0, address, " is no memory of the simulated accelerator.");
    return device_at(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              size_t n_bytes) const override {
    DeviceScope scope(storage.device().index());
    auto moved = device_allocator().allocate(n_bytes);
    size_t kept = std::min(n_bytes, storage.nbytes());
    if (kept && !is_hollow) std::memcpy(moved.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(moved));
    storage.set_nbytes(n_bytes);
  }
};

}  // namespace

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace sim
