// The allocator's numbers, settings, history, and what it says when it has no more.
#include "rules.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdio>

namespace sim {

namespace {

// CUDA: format_size.
std::string in_words(size_t n_bytes) {
  constexpr std::array<const char*, 4> units{"bytes", "KiB", "MiB", "GiB"};
  if (n_bytes <= 1024) return std::to_string(n_bytes) + " bytes";
  double value = double(n_bytes);
  size_t unit = 0;
  while (value > 1024 && unit + 1 < units.size()) {
    value /= 1024;
    unit++;
  }
  std::array<char, 48> text;
  std::snprintf(text.data(), text.size(), "%.2f %s", value, units[unit]);
  return text.data();
}

}  // namespace

// The form of CUDA's message, which programs and people search.
void CachingAllocator::out_of_memory(const Request& request) {
  const auto& stats = stats_;
  size_t allocated = stats.allocated_bytes[size_t(StatType::AGGREGATE)].current;
  size_t free = room();
  std::string allowed = limit_ ? in_words(*limit_) + " allowed; " : "";
  note("oom", reinterpret_cast<void*>(free), request.size);
  stats_.num_ooms++;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "SIM out of memory. Tried to allocate ",
      in_words(request.segment_size), ". GPU ", device_, " has a total capacity of ",
      in_words(total_), " of which ", in_words(free), " is free. ", allowed,
      "Of the allocated memory ", in_words(allocated), " is allocated by PyTorch, and ",
      in_words(reserved_ - allocated), " is reserved by PyTorch but unallocated.");
}

CachingAllocator::DeviceStats CachingAllocator::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

template <class F>
void CachingAllocator::for_each_stat(F change) {
  for (StatArray* numbers :
       {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split,
        &stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
        &stats_.inactive_split_bytes, &stats_.requested_bytes})
    for (Stat& number : *numbers) change(number);
  change(stats_.oversize_allocations);
  change(stats_.oversize_segments);
}

void CachingAllocator::reset_peak_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_stat([](Stat& number) { number.reset_peak(); });
}

void CachingAllocator::reset_accumulated_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_stat([](Stat& number) { number.reset_accumulated(); });
  stats_.num_alloc_retries = 0;
  stats_.num_ooms = 0;
  stats_.num_sync_all_streams = 0;
  stats_.num_device_alloc = 0;
  stats_.num_device_free = 0;
}

size_t CachingAllocator::total() {
  std::lock_guard<std::mutex> lock(mutex_);
  return total_;
}

size_t CachingAllocator::free() {
  std::lock_guard<std::mutex> lock(mutex_);
  return room();
}

size_t CachingAllocator::reserved() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reserved_;
}

std::optional<size_t> CachingAllocator::limit() {
  std::lock_guard<std::mutex> lock(mutex_);
  return limit_;
}

void CachingAllocator::set_total(size_t n_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  total_ = n_bytes;
}

void CachingAllocator::set_others(size_t n_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  others_ = n_bytes;
}

void CachingAllocator::fail_allocation(size_t nth) {
  std::lock_guard<std::mutex> lock(mutex_);
  fails_in_ = nth;
}

void CachingAllocator::set_limit(std::optional<size_t> n_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = n_bytes;
}

void CachingAllocator::configure(const Settings& settings) {
  std::lock_guard<std::mutex> lock(mutex_);
  bool same = settings.expandable_segments == settings_.expandable_segments &&
              settings.max_split_bytes == settings_.max_split_bytes;
  TORCH_CHECK(same || reserved_ == 0, "Device ", device_, " holds ", reserved_,
              " bytes: expandable segments and the largest size that is split are "
              "changed while nothing is held. Free all tensors, then call "
              "empty_cache().");
  settings_ = settings;
  stats_.max_split_size = int64_t(settings.max_split_bytes);
}

void CachingAllocator::record_history(bool enabled) {
  std::lock_guard<std::mutex> lock(mutex_);
  records_history_ = enabled;
  history_.clear();
}

std::vector<HistoryEntry> CachingAllocator::history() {
  std::lock_guard<std::mutex> lock(mutex_);
  return history_;
}

void CachingAllocator::note(const char* kind, const void* address, size_t n_bytes) {
  if (!records_history_) return;
  history_.push_back({kind, reinterpret_cast<size_t>(address), n_bytes});
}

}  // namespace sim
