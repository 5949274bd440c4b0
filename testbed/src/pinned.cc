#include "pinned.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "capture.h"
#include "paddle/phi/core/enforce.h"

namespace tb {
namespace {

constexpr unsigned char kPoison = 0xff;
constexpr size_t kCut = 256;

// An allocation of pinned memory, and its ranges that no buffer uses; adjacent ranges are merged.
struct Slab {
  Slab(char* base, size_t size) : base(base), size(size), free{{0, size}} {}

  bool has(const void* address) const { return address >= base && address < base + size; }
  void give_back(size_t offset, size_t bytes) {
    auto after = free.lower_bound(offset);
    if (after != free.end() && offset + bytes == after->first) bytes += after->second, after = free.erase(after);
    if (after != free.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free.emplace(offset, bytes);
  }

  char* base;
  size_t size;
  size_t reached = 0;             // no buffer has ever used what lies beyond
  std::map<size_t, size_t> free;  // offset -> bytes
};

struct Pinned {
  std::mutex mutex;
  std::vector<Slab> slabs;
  std::multimap<size_t, void*> whole;          // free buffers that are allocations of their own
  std::map<const void*, Event> last;           // when the last copy that used a buffer is done
  std::vector<std::pair<void*, size_t>> held;  // freed, but a copy still uses them
  PinnedNumbers n{};
};
Pinned& pins() { static auto* made = new Pinned; return *made; }

size_t cut_of(size_t size) { return (std::max<size_t>(size, 1) + kCut - 1) / kCut * kCut; }

[[noreturn]] void refuse(const Pinned& p, size_t size) {
  PADDLE_THROW(phi::errors::ResourceExhausted(
      "testbed: %d bytes of pinned host memory were refused (%d bytes are in use, %d were taken in %d allocations); offload less", size,
      p.n.used, p.n.reserved, p.n.allocations));
}

bool may_make(const Pinned& p) {
  int limit = switches.refuse_pinned_after;
  return limit < 0 || p.n.buffers < static_cast<size_t>(limit);
}

char* take_from_host(Pinned& p, size_t size) {
  auto* made = static_cast<char*>(pinned_allocate(size));
  if (made) p.n.reserved += size, ++p.n.allocations;
  return made;
}

// Without poison, what the host's allocator left there might be the expected values.
void* made_new(Pinned& p, char* address, size_t size) {
  ++p.n.buffers;
  if (switches.poison) memset(address, kPoison, size);
  return address;
}

// From the smallest range that is large enough, so that unused parts of slabs are used last.
void* cut(Pinned& p, size_t size) {
  Slab* slab = nullptr;
  std::map<size_t, size_t>::iterator range;
  for (Slab& each : p.slabs)
    for (auto at = each.free.begin(); at != each.free.end(); ++at)
      if (at->second >= size && (!slab || at->second < range->second)) slab = &each, range = at;
  if (!slab) return nullptr;
  size_t offset = range->first, left = range->second - size, end = offset + size;
  bool is_new = end > slab->reached;
  if (is_new && !may_make(p)) return nullptr;
  slab->free.erase(range);
  if (left) slab->free.emplace(end, left);
  if (!is_new) return slab->base + offset;
  slab->reached = end;
  return made_new(p, slab->base + offset, size);
}

// If the host has no whole slab left, it may have enough for the buffer alone.
bool add_slab(Pinned& p, size_t size) {
  for (size_t bytes : {std::max(size, static_cast<size_t>(switches.pinned_slab) << 20), size})
    if (char* base = take_from_host(p, bytes)) return p.slabs.emplace_back(base, bytes), true;
  return false;
}

void* take_cut(Pinned& p, size_t size) {
  if (void* found = cut(p, cut_of(size))) return found;
  if (!may_make(p) || !add_slab(p, cut_of(size))) refuse(p, size);
  return cut(p, cut_of(size));
}

void* take_whole(Pinned& p, size_t size) {
  auto found = p.whole.find(size);
  if (found == p.whole.end()) {
    char* made = may_make(p) ? take_from_host(p, size) : nullptr;
    if (!made) refuse(p, size);
    return made_new(p, made, size);
  }
  void* address = found->second;
  p.whole.erase(found);
  return address;
}

void give_back(Pinned& p, void* address, size_t size) {
  if (switches.poison) memset(address, kPoison, size);
  for (Slab& each : p.slabs)
    if (each.has(address)) return each.give_back(static_cast<char*>(address) - each.base, cut_of(size));
  p.whole.emplace(size, address);
}

bool is_idle(Pinned& p, const void* address) {
  auto found = p.last.find(address);
  return found == p.last.end() || event_done(found->second);
}

void collect(Pinned& p) {
  auto kept = p.held.begin();
  for (auto& each : p.held) {
    if (is_idle(p, each.first)) give_back(p, each.first, each.second);
    else *kept++ = each;
  }
  p.held.erase(kept, p.held.end());
}

void* take(size_t size) {
  Pinned& p = pins();
  std::lock_guard<std::mutex> guard(p.mutex);
  collect(p);
  void* address = switches.pinned_slab > 0 ? take_cut(p, size) : take_whole(p, size);
  p.n.used += size;
  p.n.peak = std::max(p.n.peak, p.n.used);
  return address;
}

void free_buffer(void* address, size_t size) {
  Pinned& p = pins();
  std::lock_guard<std::mutex> guard(p.mutex);
  p.n.used -= size;
  if (switches.pinned_events && !is_idle(p, address)) p.held.emplace_back(address, size);
  else give_back(p, address, size);
}

class PinnedBlock : public phi::Allocation {
 public:
  explicit PinnedBlock(size_t size) : phi::Allocation(take(size), size, phi::CPUPlace()) {}
  ~PinnedBlock() override {
    note("pinned_free", -1, ptr_, size_);
    capture_freed(ptr_, size_);
    free_buffer(ptr_, size_);
  }
};

}  // namespace

PinnedNumbers pinned_numbers() {
  Pinned& p = pins();
  std::lock_guard<std::mutex> guard(p.mutex);
  PinnedNumbers found = p.n;
  found.free = found.reserved - found.used;
  for (auto& each : p.held) found.free -= each.second;
  return found;
}

void pinned_reset_peak() {
  std::lock_guard<std::mutex> guard(pins().mutex);
  pins().n.peak = pins().n.used;
}

std::shared_ptr<phi::Allocation> pinned_make(size_t size) {
  auto made = std::make_shared<PinnedBlock>(size);
  note("pinned_allocate", -1, made->ptr(), size);
  return made;
}

void pinned_copied(const void* address, Stream stream) {
  if (capturing()) return capture_uses(address);
  Pinned& p = pins();
  std::lock_guard<std::mutex> guard(p.mutex);
  Event& last = p.last[address];
  if (!last) last = event_create();
  event_record(last, stream);
}

void pinned_wait(const void* address, Stream stream) {
  Pinned& p = pins();
  std::lock_guard<std::mutex> guard(p.mutex);
  auto found = p.last.find(address);
  if (found != p.last.end()) stream_wait(stream, found->second);
}

}  // namespace tb
