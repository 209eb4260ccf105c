// The caching allocator of one simulated device.
//
// Each rule is one of CUDA's (c10/cuda/CUDACachingAllocator.cpp), whose function is
// named beside it, for the case of no graph capture. What differs is where segments come
// from, a range of host addresses in place of cudaMalloc, and that `record_stream` does
// not defer what is freed.
#pragma once

#include "address_space.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace sim {

constexpr size_t kDefaultTotalBytes = size_t(80) << 30;

// What PYTORCH_ALLOC_CONF can say that this allocator knows.
struct Settings {
  bool expandable_segments = false;
  double garbage_collection_threshold = 0;  // 0: none
  size_t max_split_bytes = std::numeric_limits<size_t>::max();
};

struct HistoryEntry {
  std::string kind;
  size_t address;
  size_t n_bytes;
};

// A growing segment: a range of addresses of which granules are mapped as needed.
struct ExpandableSegment {
  char* address;
  size_t size;
  size_t granule;
};

struct Pool;

// A stretch of a segment: handed out, free, or (expandable segments) not mapped.
struct Block {
  char* address = nullptr;
  size_t size = 0;
  size_t requested = 0;
  Pool* pool = nullptr;
  int64_t stream = 0;  // which alone gets it again
  bool allocated = false;
  bool mapped = true;
  ExpandableSegment* segment = nullptr;  // null: the segment is of the usual kind
  Block* prev = nullptr;  // neighbours in the segment
  Block* next = nullptr;
  int64_t n_searches_before = 0;  // of the pool, when the block became free

  bool is_split() const { return prev || next; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const {
    return a->address < b->address;
  }
};

struct Pool {
  bool is_small;
  std::set<Block*, BySize> free{};
  std::set<Block*, ByAddress> unmapped{};
  int64_t n_searches = 0;  // counted while garbage is collected

  void insert(Block* block) {
    block->n_searches_before = n_searches;
    free.insert(block);
  }
  int64_t age(const Block* block) const {
    return n_searches - block->n_searches_before;
  }
};

class CachingAllocator {
 public:
  using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;
  using StatArray = c10::CachingAllocator::StatArray;

  explicit CachingAllocator(int device) : device_(device) {}

  // Null for no bytes. Throws c10::OutOfMemoryError.
  void* allocate(size_t n_bytes);
  void deallocate(void* address);
  void empty_cache();

  DeviceStats stats();
  void reset_peak_stats();
  void reset_accumulated_stats();

  size_t total();
  size_t free();
  size_t reserved();
  std::optional<size_t> limit();
  void set_total(size_t n_bytes);
  void set_others(size_t n_bytes);  // held by other processes
  void fail_allocation(size_t nth);  // 1: the next one; 0: none
  void set_limit(std::optional<size_t> n_bytes);

  // Throws where memory is held: blocks of the two kinds of segments never mix.
  void configure(const Settings& settings);

  void record_history(bool enabled);
  std::vector<HistoryEntry> history();

 private:
  // Handing out and taking back: allocator.cpp.
  struct Request {
    size_t requested;  // as asked for
    size_t size;       // of the block
    size_t segment_size;
    Pool& pool;
    int64_t stream;
  };

  Block* find_free(const Request& request);
  Block* new_block(const Request& request);
  void* hand_out(Block* block, const Request& request);
  Block* split(Block* block, size_t size);
  bool should_split(const Block& block, size_t size) const;
  void count_split(const Block& front, const Block* rest, bool was_split);

  size_t merge(Block* into, Block* other);
  void count_freed(const Block& block, size_t size, int64_t blocks, int64_t n_bytes);

  // Segments, and garbage: segments.cpp.
  Block* ask_device(const Request& request);
  Block* new_segment(const Request& request);
  void release_segment(Block* block);
  void release_cached();
  void release_pool(Pool& pool);
  bool release_oversize(const Request& request);
  bool collects_garbage() const;
  void collect_garbage();
  bool release_older(double age, size_t& total_age, int64_t& n_left, size_t& n_bytes);

  // Expandable segments: expandable.cpp.
  Block* expand(const Request& request);
  Block* find_expandable(const Request& request);
  Block* new_expandable(const Request& request);
  bool map(Block* block, size_t n_bytes);
  void unmap(Block* block);
  void cut(Block* block, char* begin, char* end);
  void release_expandable(Block* block);

  // Numbers: stats.cpp.
  size_t room() const { return total_ - std::min(total_, others_ + reserved_); }
  [[noreturn]] void out_of_memory(const Request& request);
  void note(const char* kind, const void* address, size_t n_bytes);
  template <class F>
  void for_each_stat(F change);

  const int device_;
  std::mutex mutex_;
  Pool small_{true};
  Pool large_{false};
  std::unordered_map<void*, Block*> live_;
  DeviceStats stats_;
  Settings settings_;
  size_t reserved_ = 0;
  size_t total_ = kDefaultTotalBytes;
  size_t others_ = 0;
  size_t fails_in_ = 0;  // allocations; 0: none does
  std::optional<size_t> limit_;
  bool records_history_ = false;
  std::vector<HistoryEntry> history_;
};

}  // namespace sim
