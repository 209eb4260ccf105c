// Hollow: the device computes nothing. What is left is shapes, types, strides, aliases,
// memory, and a clock that tells what a card of given speeds would have taken.
#pragma once

#include "runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

namespace sim {

inline std::atomic<bool> is_hollow{false};

// How fast the card is: see hollow.py.
struct Card {
  double half_flops = 1;
  double single_flops = 1;
  double conv_flops = 1;  // of convolutions in single precision
  double memory_bytes = 1;
  double host_bytes = 1;
  double blas_workspace = 0;
  double launch = 0;
  double segment = 0;
  double segment_byte = 0;
  double granule = 0;
  double attention_plan = 0;
};
inline Card card;

// What the host takes to issue one operator, in seconds: see hollow.py.
struct Host {
  double operator_seconds = 0;
  double listed = 0;
};
inline Host host;

// How fast ranks exchange: see hollow.py.
struct Link {
  double node_bytes = 0;
  double network_bytes = 0;
  double node_hop = 0;
  double network_hop = 0;
  double start = 0;
};
inline Link link;

// Whether this thread is in an operator of lists of tensors. CUDA has one kernel for
// many of them, where this device has one for each.
inline thread_local bool is_in_list = false;

// The timelines of a device, in virtual nanoseconds. The host issues a kernel, a stream
// runs it when it is issued and the one before has ended. As on CUDA, a host is at most so
// many kernels ahead.
class Timelines {
 public:
  void issue(double seconds, double kernel_seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t& slot = ends_[n_++ % ends_.size()];
    host_ = std::max(host_ + nanoseconds(seconds), slot);
    spent_ += nanoseconds(seconds);
    int64_t& end = streams_[current_stream];
    end = slot = std::max(host_, end) + nanoseconds(kernel_seconds);
  }
  // One of many ranks' collectives, on a stream of theirs if the host does not ask for
  // its end.
  void exchange(double seconds, bool is_apart) {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t& end = streams_[is_apart ? kApart : current_stream];
    end = std::max({host_, end, streams_[current_stream]}) + nanoseconds(seconds);
  }
  void pass_on_host(double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    host_ += nanoseconds(seconds);
    spent_ += nanoseconds(seconds);
  }
  void wait_for(int64_t time) {
    std::lock_guard<std::mutex> lock(mutex_);
    host_ = std::max(host_, time);
  }
  void block(int64_t stream, int64_t time) {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_[stream] = std::max(streams_[stream], time);
  }
  // When what was issued to a stream has ended, or to all.
  int64_t end_of(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::max(host_, streams_[stream]);
  }
  int64_t now() {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t last = host_;
    for (auto& [stream, end] : streams_) last = std::max(last, end);
    return last;
  }
  // What the host has done, waits aside.
  int64_t host_spent() {
    std::lock_guard<std::mutex> lock(mutex_);
    return spent_;
  }

 private:
  static constexpr size_t kQueue = 1024;
  static int64_t nanoseconds(double seconds) { return int64_t(seconds * 1e9); }
  std::mutex mutex_;
  static constexpr int64_t kApart = -1;
  int64_t host_ = 0, spent_ = 0;
  std::unordered_map<int64_t, int64_t> streams_;  // their ends
  size_t n_ = 0;
  std::array<int64_t, kQueue> ends_{};
};

// Virtual nanoseconds since the process began, of each device.
struct Clock {
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> allocator{0};
  std::atomic<int64_t> n_kernels{0};
  std::atomic<int64_t> n_views{0};
  std::atomic<int64_t> n_listed{0};
  std::atomic<int64_t> n_attention_plans{0};
  std::atomic<int64_t> collectives{0};
  std::atomic<int64_t> flops{0};  // in millions
  int64_t now() const { return kernels + allocator; }
};
inline Clock clocks[kDevices];
inline Timelines timelines[kDevices];

// Freeing a segment waits for the device; getting one does not.
inline void pass_in_allocator(int device, double seconds, bool waits) {
  if (!is_hollow) return;
  clocks[device].allocator += int64_t(seconds * 1e9);
  if (waits) timelines[device].wait_for(timelines[device].now());
  timelines[device].pass_on_host(seconds);
}

// The host makes a view: it starts no kernel.
void issue_view();

// Any operator without a kernel of the device's own. False: it is to be computed.
bool run_hollow(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// False: it is to be copied.
bool copy_hollow(const at::Tensor& from, const at::Tensor& to);

// Takes the place of torch's collectives.
void register_collectives();

// Threads build theirs anew.
void forget_attention_plans();

// Frees what the library of products holds.
void reset_hollow();

}  // namespace sim
