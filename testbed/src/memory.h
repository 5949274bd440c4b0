// Device memory by stream, managed as by Paddle's stream-safe allocator on the GPU place; and statistics, also of pinned memory (pinned.h).
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "paddle/phi/core/allocator.h"
#include "pinned.h"
#include "runtime.h"

namespace tb {

struct MemoryNumbers {
  size_t allocated, allocated_peak;  // held by live tensors
  size_t workspace, workspace_peak;  // held by kernels for themselves, while they are issued
  size_t in_use, in_use_peak;        // both, and freed blocks that another stream still read at the last check
  size_t reserved, reserved_peak;    // taken from the device, including blocks that are free or held
  size_t outside, outside_peak;      // held by Paddle's own allocators: parameters, feeds
  PinnedNumbers pinned;
};
MemoryNumbers memory_numbers();
void memory_reset_peaks();

// How far a captured step's memory rises above its level at the beginning; each launch counts as reaching this again.
struct MemoryGrowth {
  size_t allocated = 0, workspace = 0, in_use = 0;
};
void memory_watch();  // starts to watch
MemoryGrowth memory_watched();
void memory_reached(const MemoryGrowth& growth);

// Memory of Paddle's own allocators, counted as `outside`.
void* outside_allocate(size_t size);
void outside_free(void* address, size_t size);

class Pool;

// A block of device memory that knows which streams read it.
class Block : public phi::Allocation {
 public:
  Block(Pool* pool, void* address, size_t size, size_t asked, bool workspace, const phi::Place& place)
      : phi::Allocation(address, size, place), asked(asked), workspace(workspace), pool_(pool) {}
  ~Block() override;
  void touched_by(Stream stream);
  bool of_open_graph() const;  // whether it belongs to the step that is being captured

  const size_t asked;
  const bool workspace;

 private:
  friend class Pool;
  Pool* pool_;
  Stream last_ = nullptr;
  std::set<Stream> readers_;
};

// Free blocks of a pool. They are handed out as by Paddle's allocator: the end of the smallest one that is large enough, whose rest stays free;
// free neighbours merge within a chunk, which is what the pool took from the device at once.
class FreeBlocks {
 public:
  void* take(size_t size);  // null if no block is large enough
  void give(void* address, size_t size);
  void add_chunk(void* address, size_t size);  // all of it is in use
  std::vector<std::pair<void*, size_t>> remove_idle_chunks();
  std::vector<std::pair<void*, size_t>> remove_all(FreeBlocks& heir);  // which gets the chunks

 private:
  void add(char* address, size_t size);
  size_t remove(char* address);

  std::set<std::pair<size_t, char*>> by_size_;
  std::map<char*, size_t> by_address_;
  std::map<char*, size_t> chunks_;
};

// The blocks of one stream; only this stream reuses them. A captured step has its own pools, whose blocks are reused in the order of the
// graph: one that another stream read last is reused when the pool's stream runs after that reader.
class Pool : public phi::Allocator {
  friend class Block;

 public:
  static Pool* of(int device, Stream stream);
  static void release_idle();  // returns the chunks of all streams of which nothing is in use to the device
  static void end_graph(size_t graph);  // lets other steps use its memory; the device must be idle

  AllocationPtr Allocate(size_t size) override { return take_block(size, false); }
  AllocationPtr take_block(size_t size, bool workspace);
  bool IsAllocThreadSafe() const override { return true; }
  Stream stream() const { return stream_; }
  void give_back(Block* block);
  void op_begins();  // an op of this stream is about to be issued; its waits already are

 private:
  struct Held {
    void* address;
    size_t size, asked;
    std::vector<Event> events;
    std::vector<std::pair<Stream, size_t>> places;  // in a captured step: places after which the pool's stream must be
    size_t number;           // its identity
    size_t readers;          // number of readers that are not done
    bool op_behind = false;  // whether an op of this stream has been issued since
    bool poisoned = false;
  };
  Pool(int device, Stream stream, size_t graph) : device_(device), stream_(stream), graph_(graph) {}
  static Pool* of_graph(int device, Stream stream, size_t graph);
  bool is_done(const Held& held, int read) const;
  void* take(size_t size);
  void collect_held();
  void keep_free(void* address, size_t size);
  void release();
  void poison_freed();
  void reader_is_done(size_t number);
  void poison(Held& held);

  const int device_;
  const Stream stream_;
  const size_t graph_;  // 0: not of a captured step
  Pool* heir_ = nullptr;
  std::mutex mutex_;
  FreeBlocks free_;
  std::vector<Held> held_;
  std::vector<std::pair<void*, size_t>> unpoisoned_;  // free blocks that are not poisoned yet
  size_t num_held_ = 0;
};

}  // namespace tb
