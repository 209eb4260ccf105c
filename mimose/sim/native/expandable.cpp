// Expandable segments: one range of addresses a pool and stream, of which granules are mapped.
#include "hollow.h"
#include "rules.h"

namespace sim {

// CUDA: try_allocate_expandable_block. Grows a free block, or begins one.
Block* CachingAllocator::expand(const Request& request) {
  Block* block = find_expandable(request);
  if (!block->mapped && !map(block, std::min(block->size, request.size)))
    return nullptr;
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
    if (block->stream != request.stream) continue;
    if (block->prev && !block->prev->allocated) block = block->prev;
    size_t room = 0;
    for (Block* b = block; b && !b->allocated && room < request.size; b = b->next)
      room += b->size;
    if (room >= request.size) return block;
  }
  return new_expandable(request);
}

// CUDA: ExpandableSegment. Addresses for 1 1/8 of the device's memory, in granules of
// 2 MiB for the small pool and of 20 MiB for the large one.
Block* CachingAllocator::new_expandable(const Request& request) {
  Pool& pool = request.pool;
  const size_t granule = pool.is_small ? kSmallBuffer : kLargeBuffer;
  const size_t size = rounded_up(total_ + total_ / 8, granule);
  char* address = AddressSpace::instance().take(device_, size);
  auto* block = new Block{address, size, 0, &pool, request.stream};
  block->segment = new ExpandableSegment{address, size, granule};
  block->mapped = false;
  pool.unmapped.insert(block);
  return block;
}

// CUDA: map_block. Maps granules from the beginning of an unmapped block.
bool CachingAllocator::map(Block* block, size_t n_bytes) {
  const size_t size = rounded_up(n_bytes, block->segment->granule);
  if (size > room()) return false;
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
  pass_in_allocator(device_, card.granule * double(size / block->segment->granule),
                    false);
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
  pass_in_allocator(device_, card.granule * double(size / segment.granule), true);
  note("segment_unmap", begin, size);
}

// Narrow a block, which is in no set, to a range; what is left on either side becomes a
// block of the same kind.
void CachingAllocator::cut(Block* block, char* begin, char* end) {
  auto beside = [&](char* address, size_t size, Block* prev, Block* next) {
    auto* other = new Block{address, size, 0, block->pool, block->stream};
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

}  // namespace sim
