// Getting segments from the device and giving them back: when asked, when there is no
// room, and by age.
#include "hollow.h"
#include "rules.h"

namespace sim {

// CUDA: alloc_block. The limit is checked with the size of a usual segment, also where
// an expandable one grows: that can end up to one granule above the limit.
Block* CachingAllocator::ask_device(const Request& request) {
  if (limit_ && reserved_ + request.segment_size > *limit_) return nullptr;
  return settings_.expandable_segments ? expand(request) : new_segment(request);
}

Block* CachingAllocator::new_segment(const Request& request) {
  const size_t size = request.segment_size;
  if (size > room()) return nullptr;
  char* address = AddressSpace::instance().take(device_, size);
  reserved_ += size;
  add(stats_.segment, request.pool, 1);
  add(stats_.reserved_bytes, request.pool, size);
  if (size >= settings_.max_split_bytes) stats_.oversize_segments.increase(1);
  stats_.num_device_alloc++;
  pass_in_allocator(device_, card.segment + card.segment_byte * double(size),
                    false);
  note("segment_alloc", address, size);
  return new Block{address, size, 0, &request.pool, request.stream};
}

// CUDA: release_block.
void CachingAllocator::release_segment(Block* block) {
  stats_.num_device_free++;
  pass_in_allocator(device_, card.segment + card.segment_byte * double(block->size),
                    true);
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

// CUDA: release_blocks. Segments that are wholly free, and free granules of expandable
// ones.
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
  key.stream = request.stream;
  auto found = free.lower_bound(&key);
  if (found != free.end() && (*found)->stream == request.stream) {
    release_segment(*found);
    return true;
  }
  size_t released = 0;
  while (released < key.size && found != free.begin()) {
    Block* block = *--found;
    if (block->stream != request.stream || block->size < settings_.max_split_bytes) break;
    released += block->size;
    release_segment(block);
    found = free.lower_bound(&key);
  }
  return released >= key.size;
}

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
  while (released < target && goes_on && n_left > 0) {
    double average = double(total_age) / double(n_left);
    goes_on = release_older(average, total_age, n_left, released);
  }
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

}  // namespace sim
