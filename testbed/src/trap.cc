#include "trap.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tb {
namespace {

constexpr int kMostReports = 8;
constexpr size_t kMostLives = 64;  // per address

struct Life {
  long last_op = 0;
  std::string text;
};

struct Lives {
  std::mutex mutex;
  std::map<const void*, std::vector<Life>> of;
};
Lives& lives() { static auto* made = new Lives; return *made; }

void add(const void* address, const std::string& text, long op = 0) {
  std::lock_guard<std::mutex> guard(lives().mutex);
  auto& all = lives().of[address];
  if (all.empty()) all.emplace_back();
  all.back().text += text;
  all.back().last_op = std::max(all.back().last_op, op);
}

// The use of the memory when the host issued an operation; when the operation runs, the memory may already belong to others.
std::string life(const void* address, long op) {
  std::lock_guard<std::mutex> guard(lives().mutex);
  for (const Life& each : lives().of[address])
    if (each.last_op >= op) return each.text;
  return "not the testbed's";
}

// Poison is NaN, and so is what is computed from it; in float32 or bfloat16.
size_t count_poison(const void* values, size_t n, size_t element) {
  size_t found = 0;
  for (size_t k = 0; k < n; ++k) {
    uint32_t bits = element == 2 ? uint32_t{static_cast<const uint16_t*>(values)[k]} << 16 : static_cast<const uint32_t*>(values)[k];
    found += (bits & 0x7fffffff) > 0x7f800000;
  }
  return found;
}

}  // namespace

void trap_made(const void* address, Stream owner) {
  if (!switches.trap) return;
  std::lock_guard<std::mutex> guard(lives().mutex);
  auto& all = lives().of[address];
  if (all.size() == kMostLives) all.erase(all.begin());
  all.push_back({0, "made for stream " + std::to_string(stream_number(owner))});
}

void trap_touched(const void* address, Stream stream, const char* op, long number) {
  if (!switches.trap) return;
  add(address, ", op " + std::to_string(number) + " " + op + " on " + std::to_string(stream_number(stream)), number);
}

void trap_freed(const void* address, Stream reader) {
  if (!switches.trap) return;
  add(address, reader ? ", freed and held for stream " + std::to_string(stream_number(reader)) : std::string(", freed"));
}

void trap_look(Stream stream, const char* op, long number, const char* what, const void* values, size_t n, size_t element) {
  if (!switches.trap) return;
  stream_callback(stream, [=] {
    static std::atomic<int> reports{0};
    size_t found = count_poison(values, n, element);
    if (!found || reports++ >= kMostReports) return;
    fprintf(stderr, "testbed: poison: op %ld %s on stream %d %s %zu of %zu values; their memory: %s\n", number, op, stream_number(stream),
            what, found, n, life(values, number).c_str());
  });
}

}  // namespace tb
