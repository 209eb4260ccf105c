#include "allocator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace sim {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

namespace {

constexpr size_t kMinBlock = 512;               // every size is a multiple of it
constexpr size_t kSmallSize = size_t(1) << 20;  // up to here from the small pool
constexpr size_t kSmallBuffer = size_t(2) << 20;
constexpr size_t kLargeBuffer = size_t(20) << 20;
constexpr size_t kMinLarge = size_t(10) << 20;  // from here on a segment of its own
constexpr size_t kRoundLarge = size_t(2) << 20;

size_t rounded_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// CUDA: round_size.
size_t block_size(size_t requested) {
  return std::max(kMinBlock, rounded_up(requested, kMinBlock));
}

// CUDA: get_allocation_size.
size_t segment_size(size_t size) {
  if (size <= kSmallSize) return kSmallBuffer;
  if (size < kMinLarge) return kLargeBuffer;
  return rounded_up(size, kRoundLarge);
}

// CUDA: get_stat_types_for_pool. Each number is kept for all and for the pool.
template <class F>
void for_pool(StatArray& numbers, const Pool& pool, F change) {
  change(numbers[size_t(StatType::AGGREGATE)]);
  change(numbers[size_t(pool.is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL)]);
}

void add(StatArray& numbers, const Pool& pool, int64_t amount) {
  for_pool(numbers, pool, [&](Stat& number) {
    if (amount > 0) number.increase(amount);
    if (amount < 0) number.decrease(-amount);
  });
}

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

// CUDA: the expandable_size of get_free_block.
size_t size_with_unmapped(const Block* block) {
  bool grows = block->next && !block->next->mapped;
  return block->size + (grows ? block->next->size : 0);
}

}  // namespace

// ------------------------------------------------------------ allocating and freeing

// CUDA: malloc.
void* CachingAllocator::allocate(size_t n_bytes) {
  if (n_bytes == 0) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  size_t size = block_size(n_bytes);
  Pool& pool = size <= kSmallSize ? small_ : large_;
  Request request{n_bytes, size, segment_size(size), pool};
  Block* block = find_free(request);
  if (!block) block = new_block(request);
  if (!block) out_of_memory(request);
  return hand_out(block, request);
}

// CUDA: get_free_block. Best fit: the smallest that is large enough, then the lowest
// address; of an expandable segment's blocks the one that can grow least.
Block* CachingAllocator::find_free(const Request& request) {
  auto& free = request.pool.free;
  if (collects_garbage()) request.pool.n_searches++;
  Block key;
  key.size = request.size;
  auto found = free.lower_bound(&key);
  if (found == free.end()) return nullptr;
  if ((*found)->segment)
    for (auto next = std::next(found);
         next != free.end() && size_with_unmapped(*next) < size_with_unmapped(*found);
         ++next)
      found = next;
  Block* block = *found;
  bool oversize = request.size >= settings_.max_split_bytes;
  if (!oversize && block->size >= settings_.max_split_bytes) return nullptr;
  if (oversize && block->size >= request.size + kLargeBuffer) return nullptr;
  free.erase(found);
  return block;
}

// CUDA: malloc, from where no free block was found.
Block* CachingAllocator::new_block(const Request& request) {
  if (collects_garbage()) collect_garbage();
  if (Block* block = ask_device(request)) return block;
  if (release_oversize(request))
    if (Block* block = ask_device(request)) return block;
  release_cached();
  stats_.num_alloc_retries++;
  return ask_device(request);
}

// CUDA: alloc_found_block.
void* CachingAllocator::hand_out(Block* block, const Request& request) {
  const bool was_split = block->is_split();
  Block* rest = nullptr;
  if (should_split(*block, request.size)) {
    rest = block;
    block = split(rest, request.size);
  }
  count_split(*block, rest, was_split);
  block->allocated = true;
  block->requested = request.requested;
  live_[block->address] = block;
  note("alloc", block->address, block->requested);
  add(stats_.allocation, *block->pool, 1);
  add(stats_.allocated_bytes, *block->pool, block->size);
  add(stats_.active, *block->pool, 1);
  add(stats_.active_bytes, *block->pool, block->size);
  add(stats_.requested_bytes, *block->pool, block->requested);
  if (block->size >= settings_.max_split_bytes) stats_.oversize_allocations.increase(1);
  return block->address;
}

// CUDA: should_split. The large pool keeps the rest of a block if it is 1 MiB or less.
bool CachingAllocator::should_split(const Block& block, size_t size) const {
  size_t rest = block.size - size;
  if (block.pool->is_small || settings_.expandable_segments) return rest >= kMinBlock;
  return size < settings_.max_split_bytes && rest > kSmallSize;
}

// Cut a new block from the front of one; what is left of that goes back to the pool.
Block* CachingAllocator::split(Block* block, size_t size) {
  auto* front = new Block{block->address, size, 0, block->pool};
  front->segment = block->segment;
  front->prev = block->prev;
  if (front->prev) front->prev->next = front;
  front->next = block;
  block->prev = front;
  block->address += size;
  block->size -= size;
  block->pool->insert(block);
  return front;
}

// CUDA: alloc_found_block. Expandable segments are left out of inactive_split.
void CachingAllocator::count_split(const Block& front, const Block* rest,
                                   bool was_split) {
  if (front.segment) return;
  if (rest && was_split) {
    add(stats_.inactive_split_bytes, *front.pool, -int64_t(front.size));
  } else if (rest) {
    add(stats_.inactive_split_bytes, *front.pool, rest->size);
    add(stats_.inactive_split, *front.pool, 1);
  } else if (was_split) {
    add(stats_.inactive_split_bytes, *front.pool, -int64_t(front.size));
    add(stats_.inactive_split, *front.pool, -1);
  }
}

// CUDA: free and free_block.
void CachingAllocator::deallocate(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(address);
  TORCH_INTERNAL_ASSERT(found != live_.end(), "invalid device pointer: ", address);
  Block* block = found->second;
  live_.erase(found);
  block->allocated = false;
  note("free", block->address, block->requested);
  if (block->size >= settings_.max_split_bytes) stats_.oversize_allocations.decrease(1);
  const size_t size = block->size;
  int64_t blocks = 0;
  int64_t n_bytes = 0;
  for (Block* neighbour : {block->prev, block->next}) {
    size_t merged = merge(block, neighbour);
    blocks -= merged > 0;
    n_bytes -= int64_t(merged);
  }
  block->pool->insert(block);
  if (block->is_split()) {
    blocks += 1;
    n_bytes += int64_t(block->size);
  }
  count_freed(*block, size, blocks, n_bytes);
}

void CachingAllocator::count_freed(const Block& block, size_t size, int64_t blocks,
                                   int64_t n_bytes) {
  const Pool& pool = *block.pool;
  if (!block.segment) {
    add(stats_.inactive_split, pool, blocks);
    add(stats_.inactive_split_bytes, pool, n_bytes);
  }
  add(stats_.allocation, pool, -1);
  add(stats_.allocated_bytes, pool, -int64_t(size));
  add(stats_.active, pool, -1);
  add(stats_.active_bytes, pool, -int64_t(size));
  add(stats_.requested_bytes, pool, -int64_t(block.requested));
}

// CUDA: try_merge_blocks. Returns the size of what was merged in; 0: nothing.
size_t CachingAllocator::merge(Block* into, Block* other) {
  if (!other || other->allocated || other->mapped != into->mapped) return 0;
  if (into->prev == other) {
    into->address = other->address;
    into->prev = other->prev;
    if (into->prev) into->prev->next = into;
  } else {
    into->next = other->next;
    if (into->next) into->next->prev = into;
  }
  const size_t size = other->size;
  into->size += size;
  if (other->mapped)
    into->pool->free.erase(other);
  else
    into->pool->unmapped.erase(other);
  delete other;
  return size;
}

// -------------------------------------------------------------------------- segments

// CUDA: alloc_block. The limit is checked with the size of a usual segment, also where
// an expandable one grows: that can end up to one granule above the limit.
Block* CachingAllocator::ask_device(const Request& request) {
  if (limit_ && reserved_ + request.segment_size > *limit_) return nullptr;
  return settings_.expandable_segments ? expand(request) : new_segment(request);
}

Block* CachingAllocator::new_segment(const Request& request) {
  const size_t size = request.segment_size;
  if (reserved_ + size > total_) return nullptr;
  char* address = AddressSpace::instance().take(device_, size);
  reserved_ += size;
  add(stats_.segment, request.pool, 1);
  add(stats_.reserved_bytes, request.pool, size);
  if (size >= settings_.max_split_bytes) stats_.oversize_segments.increase(1);
  stats_.num_device_alloc++;
  note("segment_alloc", address, size);
  return new Block{address, size, 0, &request.pool};
}

// CUDA: release_block.
void CachingAllocator::release_segment(Block* block) {
  stats_.num_device_free++;
  note("segment_free", block->address, block->size);
  AddressSpace::instance().give(device_, block->address, block->size);
  reserved_ -= block->size;
  add(stats_.segment, *block->pool, -1);
  add(stats_.reserved_bytes, *block->pool, -int64_t(block->size));
  if (block->size >= settings_.max_split_bytes) stats_.oversize_segments.decrease(1);
  block->pool->free.erase(block);
  delete block;
}

void CachingAllocator::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  release_cached();
}

// CUDA: release_cached_blocks.
void CachingAllocator::release_cached() {
  stats_.num_sync_all_streams++;
  release_pool(large_);
  release_pool(small_);
}

// CUDA: release_blocks. Segments that are wholly free; free granules of expandable ones.
void CachingAllocator::release_pool(Pool& pool) {
  for (Block* block : std::vector<Block*>(pool.free.begin(), pool.free.end())) {
    if (block->segment) {
      unmap(block);
      if (!block->is_split()) release_expandable(block);
    } else if (!block->is_split()) {
      release_segment(block);
    }
  }
}

// CUDA: release_available_cached_blocks. Only where max_split_size is set: the smallest
// block that is never split and large enough, else such blocks from the largest down.
bool CachingAllocator::release_oversize(const Request& request) {
  bool limited = settings_.max_split_bytes != std::numeric_limits<size_t>::max();
  if (!limited || settings_.expandable_segments) return false;
  auto& free = request.pool.free;
  Block key;
  key.size = std::max(request.size, settings_.max_split_bytes);
  auto found = free.lower_bound(&key);
  if (found != free.end()) {
    release_segment(*found);
    return true;
  }
  size_t released = 0;
  while (released < key.size && !free.empty() &&
         (*free.rbegin())->size >= settings_.max_split_bytes) {
    released += (*free.rbegin())->size;
    release_segment(*free.rbegin());
  }
  return released >= key.size;
}

// ------------------------------------------------------------------------- garbage

// CUDA: malloc. Only where a limit is set.
bool CachingAllocator::collects_garbage() const {
  return limit_ && settings_.garbage_collection_threshold > 0;
}

// CUDA: garbage_collect_cached_blocks. Whole segments of the large pool, those of at
// least average age, until what is over the threshold is released.
void CachingAllocator::collect_garbage() {
  auto threshold = size_t(settings_.garbage_collection_threshold * double(*limit_));
  if (reserved_ <= threshold) return;
  const size_t target = reserved_ - threshold;
  size_t total_age = 0;
  int64_t n_left = 0;
  for (Block* block : large_.free) {
    if (block->is_split()) continue;
    total_age += large_.age(block);
    n_left++;
  }
  size_t released = 0;
  bool goes_on = true;
  while (released < target && goes_on && n_left > 0)
    goes_on = release_older(double(total_age) / double(n_left), total_age, n_left, released);
}

bool CachingAllocator::release_older(double age, size_t& total_age, int64_t& n_left,
                                     size_t& n_bytes) {
  bool any = false;
  for (Block* block : std::vector<Block*>(large_.free.begin(), large_.free.end())) {
    if (block->is_split() || double(large_.age(block)) < age) continue;
    any = true;
    n_bytes += block->size;
    total_age -= large_.age(block);
    n_left--;
    release_segment(block);
  }
  return any;
}

// -------------------------------------------------------------- expandable segments

// CUDA: try_allocate_expandable_block. Grows a free block, or begins one.
Block* CachingAllocator::expand(const Request& request) {
  Block* block = find_expandable(request);
  if (!block->mapped && !map(block, std::min(block->size, request.size))) return nullptr;
  while (block->size < request.size) {
    Block* next = block->next;  // not mapped; it takes the mapped one before it in
    if (!map(next, std::min(request.size - block->size, next->size))) return nullptr;
    block = next;
  }
  request.pool.free.erase(block);
  return block;
}

// CUDA: find_expandable_block. The lowest address from which free and unmapped blocks
// have room; a new segment if there is none.
Block* CachingAllocator::find_expandable(const Request& request) {
  for (Block* block : request.pool.unmapped) {
    if (block->prev && !block->prev->allocated) block = block->prev;
    size_t room = 0;
    for (Block* b = block; b && !b->allocated && room < request.size; b = b->next)
      room += b->size;
    if (room >= request.size) return block;
  }
  return new_expandable(request.pool);
}

// CUDA: ExpandableSegment. Addresses for 1 1/8 of the device's memory, in granules of
// 2 MiB for the small pool and of 20 MiB for the large one.
Block* CachingAllocator::new_expandable(Pool& pool) {
  const size_t granule = pool.is_small ? kSmallBuffer : kLargeBuffer;
  const size_t size = rounded_up(total_ + total_ / 8, granule);
  char* address = AddressSpace::instance().take(device_, size);
  auto* block = new Block{address, size, 0, &pool};
  block->segment = new ExpandableSegment{address, size, granule};
  block->mapped = false;
  pool.unmapped.insert(block);
  return block;
}

// CUDA: map_block. Maps granules from the beginning of an unmapped block.
bool CachingAllocator::map(Block* block, size_t n_bytes) {
  const size_t size = rounded_up(n_bytes, block->segment->granule);
  if (reserved_ + size > total_) return false;
  Pool& pool = *block->pool;
  char* address = block->address;
  pool.unmapped.erase(block);
  cut(block, address, address + size);
  block->mapped = true;
  merge(block, block->prev);
  merge(block, block->next);
  pool.insert(block);
  reserved_ += size;
  add(stats_.reserved_bytes, pool, size);
  stats_.num_device_alloc++;
  note("segment_map", address, size);
  return true;
}

// CUDA: unmap_block. Takes the granules that lie wholly in a free block from it.
void CachingAllocator::unmap(Block* block) {
  const ExpandableSegment& segment = *block->segment;
  auto granules = [&](const char* to) { return size_t(to - segment.address); };
  char* begin = segment.address + rounded_up(granules(block->address), segment.granule);
  size_t last = granules(block->address + block->size) / segment.granule;
  char* end = segment.address + last * segment.granule;
  if (begin >= end) return;
  Pool& pool = *block->pool;
  pool.free.erase(block);
  cut(block, begin, end);
  block->mapped = false;
  merge(block, block->prev);
  merge(block, block->next);
  pool.unmapped.insert(block);
  const size_t size = size_t(end - begin);
  AddressSpace::discard(begin, size);
  reserved_ -= size;
  add(stats_.reserved_bytes, pool, -int64_t(size));
  stats_.num_device_free++;
  note("segment_unmap", begin, size);
}

// Narrow a block, which is in no set, to a range; what is left on either side becomes a
// block of the same kind.
void CachingAllocator::cut(Block* block, char* begin, char* end) {
  auto beside = [&](char* address, size_t size, Block* prev, Block* next) {
    auto* other = new Block{address, size, 0, block->pool};
    other->segment = block->segment;
    other->mapped = block->mapped;
    other->prev = prev;
    other->next = next;
    if (prev) prev->next = other;
    if (next) next->prev = other;
    if (other->mapped)
      block->pool->insert(other);
    else
      block->pool->unmapped.insert(other);
  };
  char* old_end = block->address + block->size;
  if (begin > block->address)
    beside(block->address, size_t(begin - block->address), block->prev, block);
  if (old_end > end) beside(end, size_t(old_end - end), block, block->next);
  block->address = begin;
  block->size = size_t(end - begin);
}

// CUDA: release_expandable_segment.
void CachingAllocator::release_expandable(Block* block) {
  block->pool->unmapped.erase(block);
  AddressSpace::instance().give(device_, block->segment->address, block->segment->size);
  delete block->segment;
  delete block;
}

// --------------------------------------------------------------- numbers and settings

// The form of CUDA's message, which programs and people search.
void CachingAllocator::out_of_memory(const Request& request) {
  const auto& stats = stats_;
  size_t allocated = stats.allocated_bytes[size_t(StatType::AGGREGATE)].current;
  size_t free = total_ - std::min(total_, reserved_);
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
