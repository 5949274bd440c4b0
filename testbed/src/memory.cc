#include "memory.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

#include "capture.h"
#include "paddle/phi/core/enforce.h"
#include "trap.h"


namespace tb {
namespace {

constexpr unsigned char kPoison = 0xff;  // NaN in every floating type, -1 in every integer
constexpr size_t kAlign = 256;
constexpr int kMostRead = 8;

size_t rounded(size_t size) { return (std::max<size_t>(size, 1) + kAlign - 1) / kAlign * kAlign; }

class Counter {
 public:
  void add(size_t size) {
    size_t now = value_ += size, peak = peak_;
    while (now > peak && !peak_.compare_exchange_weak(peak, now)) continue;
  }
  void drop(size_t size) { value_ -= size; }
  void reset_peak() { peak_ = value_.load(); }
  void reach(size_t size) { add(size), drop(size); }
  size_t value() const { return value_; }
  size_t peak() const { return peak_; }

 private:
  std::atomic<size_t> value_{0}, peak_{0};
};

Counter allocated, workspaces, in_use, reserved, outside;

struct Pools {
  std::mutex mutex;
  std::map<std::tuple<int, Stream, size_t>, Pool*> all;
};
Pools& pools() { static auto* made = new Pools; return *made; }

}  // namespace

MemoryNumbers memory_numbers() {
  return {allocated.value(), allocated.peak(), workspaces.value(), workspaces.peak(), in_use.value(), in_use.peak(),
          reserved.value(),  reserved.peak(),  outside.value(),    outside.peak(),    pinned_numbers()};
}

void memory_reset_peaks() {
  for (Counter* each : {&allocated, &workspaces, &in_use, &reserved, &outside}) each->reset_peak();
  pinned_reset_peak();
}

namespace {
Counter* const kGrowing[] = {&allocated, &workspaces, &in_use};
size_t watched[3], peaks_before[3];
}  // namespace

void memory_watch() {
  for (int k = 0; k < 3; ++k) watched[k] = kGrowing[k]->value(), peaks_before[k] = kGrowing[k]->peak(), kGrowing[k]->reset_peak();
}

MemoryGrowth memory_watched() {
  size_t grown[3];
  for (int k = 0; k < 3; ++k) {
    grown[k] = kGrowing[k]->peak() - watched[k];
    if (size_t now = kGrowing[k]->value(); peaks_before[k] > now) kGrowing[k]->reach(peaks_before[k] - now);
  }
  return {grown[0], grown[1], grown[2]};
}

void memory_reached(const MemoryGrowth& growth) { allocated.reach(growth.allocated), workspaces.reach(growth.workspace), in_use.reach(growth.in_use); }

void* outside_allocate(size_t size) {
  void* made = device_allocate(size);
  if (!made) Pool::release_idle(), made = device_allocate(size);
  if (made) outside.add(size);
  return made;
}

void outside_free(void* address, size_t size) {
  outside.drop(size);
  capture_freed(address, size);
  device_sync();
  if (switches.poison) fill_now(address, kPoison, size);
  device_free(address);
}

// ---- free blocks

void* FreeBlocks::take(size_t size) {
  auto found = by_size_.lower_bound({size, nullptr});
  if (found == by_size_.end()) return nullptr;
  auto [whole, address] = *found;
  remove(address);
  if (whole > size) add(address, whole - size);
  return address + whole - size;
}

void FreeBlocks::give(void* block, size_t size) {
  char* address = static_cast<char*>(block);
  auto next = by_address_.upper_bound(address);
  if (next != by_address_.end() && next->first == address + size && !chunks_.count(next->first)) size += remove(next->first);
  next = by_address_.upper_bound(address);
  if (next != by_address_.begin() && !chunks_.count(address))
    if (auto before = std::prev(next); before->first + before->second == address) {
      address = before->first;
      size += remove(address);
    }
  add(address, size);
}

void FreeBlocks::add_chunk(void* address, size_t size) { chunks_.emplace(static_cast<char*>(address), size); }

std::vector<std::pair<void*, size_t>> FreeBlocks::remove_idle_chunks() {
  std::vector<std::pair<void*, size_t>> idle;
  for (auto each = chunks_.begin(); each != chunks_.end();) {
    auto found = by_address_.find(each->first);
    if (found == by_address_.end() || found->second != each->second) {
      ++each;
      continue;
    }
    idle.emplace_back(each->first, each->second);
    remove(each->first);
    each = chunks_.erase(each);
  }
  return idle;
}

std::vector<std::pair<void*, size_t>> FreeBlocks::remove_all(FreeBlocks& heir) {
  std::vector<std::pair<void*, size_t>> all(by_address_.begin(), by_address_.end());
  heir.chunks_.merge(chunks_);
  by_address_.clear(), by_size_.clear();
  return all;
}

void FreeBlocks::add(char* address, size_t size) { by_address_.emplace(address, size), by_size_.emplace(size, address); }

size_t FreeBlocks::remove(char* address) {
  auto found = by_address_.find(address);
  size_t size = found->second;
  by_size_.erase({size, address});
  by_address_.erase(found);
  return size;
}

// ---- blocks

Block::~Block() { (pool_->heir_ ? pool_->heir_ : pool_)->give_back(this); }

void Block::touched_by(Stream stream) {
  last_ = stream;
  if (stream != pool_->stream() && switches.record == 2) readers_.insert(stream);
}

bool Block::of_open_graph() const { return pool_->graph_ && pool_->graph_ == capture_number(); }

Pool* Pool::of(int device, Stream stream) { return of_graph(device, stream, capture_number()); }

Pool* Pool::of_graph(int device, Stream stream, size_t graph) {
  std::lock_guard<std::mutex> guard(pools().mutex);
  Pool*& found = pools().all[{device, stream, graph}];
  if (!found) found = new Pool(device, stream, graph);
  return found;
}

void Pool::end_graph(size_t graph) {
  std::vector<Pool*> ended;
  {
    std::lock_guard<std::mutex> guard(pools().mutex);
    for (auto each = pools().all.begin(); each != pools().all.end();) {
      if (std::get<2>(each->first) != graph) {
        ++each;
        continue;
      }
      ended.push_back(each->second);
      each = pools().all.erase(each);
    }
  }
  for (Pool* each : ended) {  // not deleted: tensors in the executor's scope may still refer to it
    Pool* heir = of_graph(each->device_, each->stream_, 0);
    std::lock_guard<std::mutex> guard(each->mutex_);
    std::lock_guard<std::mutex> heirs(heir->mutex_);
    each->heir_ = heir;
    for (auto& [address, size] : each->free_.remove_all(heir->free_)) heir->keep_free(address, size);
    for (Held& held : each->held_) in_use.drop(held.asked), heir->keep_free(held.address, held.size);
    each->held_.clear(), each->unpoisoned_.clear();
  }
}

void Pool::release_idle() {
  std::vector<Pool*> all;
  {
    std::lock_guard<std::mutex> guard(pools().mutex);
    for (auto& each : pools().all)
      if (!each.second->graph_) all.push_back(each.second);
  }
  device_sync();
  for (Pool* each : all) each->release();
}

void Pool::release() {
  std::lock_guard<std::mutex> guard(mutex_);
  collect_held();
  for (auto& [chunk, size] : free_.remove_idle_chunks()) {
    char *begin = static_cast<char*>(chunk), *end = begin + size;
    auto inside = [=](auto& each) { return each.first >= begin && each.first < end; };
    unpoisoned_.erase(std::remove_if(unpoisoned_.begin(), unpoisoned_.end(), inside), unpoisoned_.end());
    device_free(chunk);
    reserved.drop(size);
  }
}

phi::Allocator::AllocationPtr Pool::take_block(size_t size, bool workspace) {
  size_t got = rounded(size);
  void* address = take(got);
  (workspace ? workspaces : allocated).add(size), in_use.add(size);
  note(workspace ? "workspace" : "allocate", stream_number(stream_), address, size);
  trap_made(address, stream_);
  phi::CustomPlace place("testbed", device_);
  return AllocationPtr(new Block(this, address, got, size, workspace, place), [](phi::Allocation* block) { delete block; });
}

void* Pool::take(size_t size) {
  std::unique_lock<std::mutex> lock(mutex_);
  collect_held();
  poison_freed();
  if (void* address = free_.take(size)) return address;
  void* address = device_allocate(size);
  if (!address && !graph_) {
    lock.unlock();
    release_idle();
    lock.lock();
    if (void* address = free_.take(size)) return address;
    address = device_allocate(size);
  }
  if (!address)
    PADDLE_THROW(phi::errors::ResourceExhausted("testbed: out of device memory: %d bytes wanted, %d held by tensors, %d taken from the device",
                                                size, allocated.value(), reserved.value()));
  reserved.add(size);
  free_.add_chunk(address, size);
  if (switches.poison) graph_ ? fill_async(stream_, address, kPoison, size) : fill_now(address, kPoison, size);
  return address;
}

bool Pool::is_done(const Held& held, int read) const {
  bool done = graph_ || read < kMostRead;
  for (auto& each : held.places) done = done && capture_is_behind(stream_, each.first, each.second);
  for (Event event : held.events) done = done && event_done(event);
  return done;
}

// Oldest first, until a few are found that are still read: the host must not query hundreds of events at each allocation.
void Pool::collect_held() {
  auto kept = held_.begin();
  int read = 0;
  for (Held& each : held_) {
    bool done = is_done(each, read);
    read += !done;
    if (!done) {
      if (&*kept != &each) *kept = std::move(each);
      ++kept;
      continue;
    }
    for (Event event : each.events) event_destroy(event);
    in_use.drop(each.asked);
    keep_free(each.address, each.size);
  }
  held_.erase(kept, held_.end());
}

void Pool::keep_free(void* address, size_t size) {
  if (switches.poison) unpoisoned_.emplace_back(address, size);
  free_.give(address, size);
}

// The next op of this stream is the first that may write memory freed before. It is poisoned after the op's waits and before its work.
void Pool::op_begins() {
  if (!switches.poison) return;
  std::lock_guard<std::mutex> guard(mutex_);
  poison_freed();
  for (Held& each : held_) {
    each.op_behind = true;
    if (each.readers == 0 && !graph_) poison(each);
  }
}

void Pool::poison_freed() {
  for (auto& each : unpoisoned_) fill_async(stream_, each.first, kPoison, each.second);
  unpoisoned_.clear();
}

// When the last reader is done, wherever the host is, the block may go to an op of this stream; this imitates it.
void Pool::reader_is_done(size_t number) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (Held& each : held_)
    if (each.number == number && --each.readers == 0 && each.op_behind) poison(each);
}

void Pool::poison(Held& held) {
  if (!held.poisoned) fill_async(stream_, held.address, kPoison, held.size);
  held.poisoned = true;
}

void Pool::give_back(Block* block) {
  (block->workspace ? workspaces : allocated).drop(block->asked);
  note(block->workspace ? "workspace_free" : "free", stream_number(stream_), block->ptr_, block->asked);
  std::set<Stream> readers = std::move(block->readers_);
  if (switches.record == 1 && block->last_ && block->last_ != stream_) readers = {block->last_};
  if (switches.free_at_end && readers.empty()) readers = {stream_};
  trap_freed(block->ptr_, readers.empty() ? nullptr : *readers.begin());
  if (!graph_) capture_freed(block->ptr_, block->size_);
  if (!graph_ && capturing()) readers.clear();  // they are from before the capture, when the device was idle
  bool launched = graph_ && graph_ != capture_number();  // the device is idle between any reader and the next launch
  std::lock_guard<std::mutex> guard(mutex_);
  if (readers.empty() || !switches.hold || launched) {
    in_use.drop(block->asked);
    keep_free(block->ptr_, block->size_);
    return;
  }
  held_.push_back({block->ptr_, block->size_, block->asked, {}, {}, ++num_held_, readers.size()});
  if (graph_) {
    for (Stream each : readers) held_.back().places.emplace_back(each, capture_place(each));
    return;
  }
  for (Stream each : readers) {
    held_.back().events.push_back(event_create());
    event_record(held_.back().events.back(), each);
#ifndef TESTBED_CUDA  // on CUDA a callback must not use streams
    if (switches.poison) stream_callback(each, [this, number = num_held_] { reader_is_done(number); });
#endif
  }
}

}  // namespace tb

TB_EXPORT void tb_memory(size_t out[16]) {
  tb::MemoryNumbers n = tb::memory_numbers();
  const tb::PinnedNumbers& p = n.pinned;
  const size_t all[] = {n.allocated, n.allocated_peak, n.workspace, n.workspace_peak, n.in_use, n.in_use_peak, n.reserved, n.reserved_peak,
                        n.outside,   n.outside_peak,   p.used,      p.peak,           p.buffers, p.free,       p.reserved, p.allocations};
  memcpy(out, all, sizeof all);
}
TB_EXPORT void tb_memory_reset() { tb::memory_reset_peaks(); }
