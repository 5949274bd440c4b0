// Device memory by stream, as Paddle's stream-safe allocator keeps it on the GPU place; what it and pinned memory (pinned.h) hold.
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
  size_t allocated, allocated_peak;  // what live tensors hold
  size_t workspace, workspace_peak;  // what kernels take for themselves while they are issued
  size_t in_use, in_use_peak;        // both, and freed blocks that another stream still read when their own stream last asked
  size_t reserved, reserved_peak;    // what was taken from the device, blocks that are free or held included
  size_t outside, outside_peak;      // what Paddle's own allocators took: parameters, feeds
  PinnedNumbers pinned;
};
MemoryNumbers memory_numbers();
void memory_reset_peaks();

// What a captured step takes beyond what is held when it begins: each launch counts as reaching it again.
struct MemoryGrowth {
  size_t allocated = 0, workspace = 0, in_use = 0;
};
void memory_watch();  // from here on
MemoryGrowth memory_watched();
void memory_reached(const MemoryGrowth& growth);

// Memory that Paddle's own allocators take and give back, counted as `outside`.
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
  bool of_open_graph() const;  // whether the step that is being captured owns it

  const size_t asked;
  const bool workspace;

 private:
  friend class Pool;
  Pool* pool_;
  Stream last_ = nullptr;
  std::set<Stream> readers_;
};

// The blocks of one stream. A block that is given back serves this stream alone again. A captured step has pools of its own, whose
// blocks are used again in the order of the graph: one that another stream read last when the own stream is behind that reader.
class Pool : public phi::Allocator {
  friend class Block;

 public:
  static Pool* of(int device, Stream stream);
  static void release_idle();  // gives all free blocks of all streams back to the device
  static void end_graph(size_t graph);  // its memory serves other steps; the device is idle

  AllocationPtr Allocate(size_t size) override { return take_block(size, false); }
  AllocationPtr take_block(size_t size, bool workspace);
  bool IsAllocThreadSafe() const override { return true; }
  Stream stream() const { return stream_; }
  void give_back(Block* block);
  void op_begins();  // an op of this stream is about to be issued, after what it waits for

 private:
  struct Held {
    void* address;
    size_t size, asked;
    std::vector<Event> events;
    std::vector<std::pair<Stream, size_t>> places;  // in a captured step: what the own stream must be behind
    size_t number;           // names it
    size_t readers;          // that are not done
    bool op_behind = false;  // whether an op of this stream was issued since
    bool poisoned = false;
  };
  Pool(int device, Stream stream, size_t graph) : device_(device), stream_(stream), graph_(graph) {}
  static Pool* of_graph(int device, Stream stream, size_t graph);
  bool is_done(const Held& held, int read) const;
  void* take(size_t size, size_t* got);
  void collect_held();
  void keep_free(void* address, size_t size);
  void release();
  void poison_freed();
  void reader_is_done(size_t number);
  void poison(Held& held);

  const int device_;
  const Stream stream_;
  const size_t graph_;  // 0: of no captured step
  Pool* heir_ = nullptr;
  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
  std::vector<Held> held_;
  std::vector<std::pair<void*, size_t>> unpoisoned_;  // of the free ones
  size_t num_held_ = 0;
};

}  // namespace tb
