// The sizes that CUDA's allocator rounds to, and how it counts.
#pragma once

#include "allocator.h"

#include <algorithm>

namespace sim {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr size_t kMinBlock = 512;               // every size is a multiple of it
constexpr size_t kSmallSize = size_t(1) << 20;  // up to here from the small pool
constexpr size_t kSmallBuffer = size_t(2) << 20;
constexpr size_t kLargeBuffer = size_t(20) << 20;
constexpr size_t kMinLarge = size_t(10) << 20;  // from here on a segment of its own
constexpr size_t kRoundLarge = size_t(2) << 20;

inline size_t rounded_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// CUDA: round_size.
inline size_t block_size(size_t requested) {
  return std::max(kMinBlock, rounded_up(requested, kMinBlock));
}

// CUDA: get_allocation_size.
inline size_t segment_size(size_t size) {
  if (size <= kSmallSize) return kSmallBuffer;
  if (size < kMinLarge) return kLargeBuffer;
  return rounded_up(size, kRoundLarge);
}

// CUDA: get_stat_types_for_pool. Each number is kept for all and for the pool.
template <class F>
inline void for_pool(StatArray& numbers, const Pool& pool, F change) {
  change(numbers[size_t(StatType::AGGREGATE)]);
  change(numbers[size_t(pool.is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL)]);
}

inline void add(StatArray& numbers, const Pool& pool, int64_t amount) {
  for_pool(numbers, pool, [&](Stat& number) {
    if (amount > 0) number.increase(amount);
    if (amount < 0) number.decrease(-amount);
  });
}

}  // namespace sim
