#include "control.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>


namespace tb {

Switches switches;

namespace {

struct Named {
  const char* name;
  std::atomic<int>* value;
  const char* meaning;
};

const std::vector<Named>& table() {
#define X(name, threads, cuda, meaning) {#name, &switches.name, meaning},
  static const auto* made = new std::vector<Named>{TB_SWITCHES(X)};
#undef X
  return *made;
}

const Named* find(const char* name) {
  for (const Named& each : table())
    if (!strcmp(each.name, name)) return &each;
  return nullptr;
}

using Site = std::pair<int, long>;

struct DelayLog {
  Site site;
  int us;
  int work;
  std::string name;
  int step;
  long op;  // its number in the step, from 0; negative outside of steps
};

struct Delays {
  std::mutex mutex;
  uint64_t seed = 0;
  int permille = 0, max_us = 0, kinds = 0;
  bool listed = false;
  std::map<Site, int> chosen;
  std::map<int, long> given;
  std::vector<DelayLog> log;
  std::atomic<bool> follows_steps{false};
  int step = 0;
  long step_begin = 0;
  std::vector<std::string> step_ops;
};

struct HostNote {
  double at_us;
  const char* what;
  int stream;
  const void* address;
  size_t size;
  long op;
};

struct Interval {
  std::string name;
  int stream;
  double begin_us, end_us;
  long op;
};

struct Trace {
  std::mutex mutex;
  std::atomic<bool> on{false};
  std::vector<HostNote> notes;
  std::vector<Interval> intervals;
};

// Never destroyed: device threads outlive static destruction.
Delays& delays() { static auto* made = new Delays; return *made; }
Trace& trace() { static auto* made = new Trace; return *made; }

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

int drawn_us(const Delays& d, Site site) {
  uint64_t draw = mix(d.seed ^ mix(site.first * 1000003ULL + site.second));
  if (static_cast<int>(draw % 1000) >= d.permille) return 0;
  return 1 + static_cast<int>((draw >> 20) % d.max_us);
}

int wanted_us(const Delays& d, Site site, Work work) {
  if (d.listed) {
    auto found = d.chosen.find(site);
    return found == d.chosen.end() ? 0 : found->second;
  }
  bool drawn = d.permille && d.max_us && (d.kinds >> static_cast<int>(work) & 1);
  return drawn ? drawn_us(d, site) : 0;
}

}  // namespace

int delay_us(int stream, Work work, const char* name) {
  Delays& d = delays();
  std::lock_guard<std::mutex> guard(d.mutex);
  Site site{stream, d.given[stream]++};
  int us = wanted_us(d, site, work);
  if (us) d.log.push_back({site, us, static_cast<int>(work), name, d.step, current_op() - d.step_begin - 1});
  return us;
}

double now_us() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(since).count();
}

bool tracing() { return trace().on; }

void note(const char* what, int stream, const void* address, size_t size) {
  if (!trace().on) return;
  std::lock_guard<std::mutex> guard(trace().mutex);
  trace().notes.push_back({now_us(), what, stream, address, size, 0});
}

namespace {
std::atomic<long> ops_begun{0};
thread_local long op_here = 0;
}  // namespace

long begin_op(const char* name, int stream) {
  op_here = ++ops_begun;
  if (delays().follows_steps) {
    std::lock_guard<std::mutex> guard(delays().mutex);
    delays().step_ops.push_back(name);
  }
  if (trace().on) {
    std::lock_guard<std::mutex> guard(trace().mutex);
    trace().notes.push_back({now_us(), name, stream, nullptr, 0, op_here});
  }
  return op_here;
}
void end_op() {
  if (trace().on) note("op_end");
  op_here = 0;
}
long current_op() { return op_here; }

void interval(const char* name, int stream, double begin_us, double end_us, long op) {
  std::lock_guard<std::mutex> guard(trace().mutex);
  trace().intervals.push_back({name, stream, begin_us, end_us, op});
}

void settle_intervals();   // the device's part: CUDA reads its events here
void prepare_intervals();  // called before tracing starts: CUDA creates its events here

}  // namespace tb

using namespace tb;

TB_EXPORT int tb_switch_count() { return static_cast<int>(table().size()); }
TB_EXPORT const char* tb_switch_name(int k) { return table()[k].name; }
TB_EXPORT const char* tb_switch_meaning(int k) { return table()[k].meaning; }
TB_EXPORT int tb_switch_get(const char* name, int* value) {
  const Named* found = find(name);
  if (found) *value = *found->value;
  return found != nullptr;
}
TB_EXPORT int tb_switch_set(const char* name, int value) {
  const Named* found = find(name);
  if (found) *found->value = value;
  return found != nullptr;
}

TB_EXPORT void tb_delays_drawn(uint64_t seed, int permille, int max_us, int kinds) {
  Delays& d = delays();
  std::lock_guard<std::mutex> guard(d.mutex);
  d.seed = seed, d.permille = permille, d.max_us = max_us, d.kinds = kinds, d.listed = false;
}
TB_EXPORT void tb_delays_listed() {
  std::lock_guard<std::mutex> guard(delays().mutex);
  delays().listed = true;
  delays().chosen.clear();
}
TB_EXPORT void tb_delay_add(int stream, long ordinal, int us) {
  std::lock_guard<std::mutex> guard(delays().mutex);
  delays().chosen[{stream, ordinal}] = us;
}
TB_EXPORT void tb_delays_restart() {  // restart the count of sites
  std::lock_guard<std::mutex> guard(delays().mutex);
  delays().given.clear();
  delays().log.clear();
}
TB_EXPORT int tb_delays_write(const char* path) {
  FILE* out = fopen(path, "w");
  if (!out) return 0;
  std::lock_guard<std::mutex> guard(delays().mutex);
  for (const DelayLog& each : delays().log)
    fprintf(out, "%d\t%ld\t%d\t%d\t%s\t%d\t%ld\n", each.site.first, each.site.second, each.us, each.work, each.name.c_str(), each.step, each.op);
  for (const std::string& each : delays().step_ops) fprintf(out, "op\t%s\n", each.c_str());
  fclose(out);
  return 1;
}
TB_EXPORT void tb_delays_step() {  // a step begins: its operations are recorded, and the places of delays in it
  std::lock_guard<std::mutex> guard(delays().mutex);
  delays().follows_steps = true;
  delays().step += 1;
  delays().step_begin = ops_begun;
  delays().step_ops.clear();
}

TB_EXPORT void tb_trace(int on) {
  if (on) prepare_intervals();
  std::lock_guard<std::mutex> guard(trace().mutex);
  trace().on = on;
  if (on) trace().notes.clear(), trace().intervals.clear();
}
TB_EXPORT int tb_trace_write(const char* path) {
  settle_intervals();
  FILE* out = fopen(path, "w");
  if (!out) return 0;
  std::lock_guard<std::mutex> guard(trace().mutex);
  for (const HostNote& each : trace().notes) {
    if (each.op) fprintf(out, "op\t%.3f\t%s\t%d\t%ld\n", each.at_us, each.what, each.stream, each.op);
    else fprintf(out, "host\t%.3f\t%s\t%d\t%p\t%zu\n", each.at_us, each.what, each.stream, each.address, each.size);
  }
  for (const Interval& each : trace().intervals)
    fprintf(out, "device\t%.3f\t%.3f\t%s\t%d\t%ld\n", each.begin_us, each.end_us, each.name.c_str(), each.stream, each.op);
  fclose(out);
  return 1;
}
