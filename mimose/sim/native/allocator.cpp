// Handing out blocks and taking them back.
#include "rules.h"
#include "runtime.h"

#include <c10/util/Exception.h>

namespace sim {

namespace {

// CUDA: the expandable_size of get_free_block.
size_t size_with_unmapped(const Block* block) {
  bool grows = block->next && !block->next->mapped;
  return block->size + (grows ? block->next->size : 0);
}

}  // namespace

// CUDA: malloc.
void* CachingAllocator::allocate(size_t n_bytes) {
  if (n_bytes == 0) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  size_t size = block_size(n_bytes);
  Pool& pool = size <= kSmallSize ? small_ : large_;
  Request request{n_bytes, size, segment_size(size), pool, current_stream};
  if (fails_in_ && --fails_in_ == 0) out_of_memory(request);
  Block* block = find_free(request);
  if (!block) block = new_block(request);
  if (!block) out_of_memory(request);
  return hand_out(block, request);
}

// CUDA: get_free_block. Best fit of the stream: the smallest that is large enough, then
// the lowest address; of an expandable segment's blocks the one that can grow least.
Block* CachingAllocator::find_free(const Request& request) {
  auto& free = request.pool.free;
  if (collects_garbage()) request.pool.n_searches++;
  Block key;
  key.size = request.size;
  key.stream = request.stream;
  auto found = free.lower_bound(&key);
  if (found == free.end() || (*found)->stream != request.stream) return nullptr;
  if ((*found)->segment)
    for (auto next = std::next(found);
         next != free.end() && (*next)->stream == request.stream &&
         size_with_unmapped(*next) < size_with_unmapped(*found);
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
  auto* front = new Block{block->address, size, 0, block->pool, block->stream};
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

}  // namespace sim
