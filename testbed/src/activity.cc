#include "activity.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "control.h"
#include "library.h"

#if __has_include(<cupti.h>)
#include <cupti.h>

namespace tb::activity {
namespace {

constexpr size_t kBuffer = size_t{8} << 20, kAlignment = 8;
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET,
                                         CUPTI_ACTIVITY_KIND_DRIVER, CUPTI_ACTIVITY_KIND_RUNTIME,
                                         CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};

struct Functions {
  Library library{"TESTBED_CUPTI", "libcupti.so.13"};
#define CUPTI(name) decltype(::name)* name = library.find<decltype(::name)>(#name)
  CUPTI(cuptiActivityRegisterCallbacks);
  CUPTI(cuptiActivityEnable);
  CUPTI(cuptiActivityDisable);
  CUPTI(cuptiActivityFlushAll);
  CUPTI(cuptiActivityGetNextRecord);
  CUPTI(cuptiActivityPushExternalCorrelationId);
  CUPTI(cuptiActivityPopExternalCorrelationId);
  CUPTI(cuptiGetTimestamp);
  CUPTI(cuptiGetResultString);
#undef CUPTI
};

struct Work {
  uint32_t correlation;
  uint64_t begin_ns, end_ns;
};

struct State {
  std::mutex mutex;
  std::map<uint32_t, long> pieces;  // the driver's id of a launch -> the piece of work that it belongs to
  std::vector<Work> work;
  double now_us = 0;
  uint64_t now_ns = 0;
};
State& state() { static auto* made = new State; return *made; }
const Functions& functions() { static auto* found = new Functions; return *found; }

void check(CUptiResult result, const char* what) {
  if (result == CUPTI_SUCCESS) return;
  const char* why = "unknown";
  functions().cuptiGetResultString(result, &why);
  throw std::runtime_error(std::string("testbed: ") + what + ": " + why);
}
#define CUPTI_CHECK(name, ...) check(functions().name(__VA_ARGS__), #name)

template <class Record>
void keep(const CUpti_Activity* record) {
  auto* found = reinterpret_cast<const Record*>(record);
  state().work.push_back({found->correlationId, found->start, found->end});
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(aligned_alloc(kAlignment, kBuffer));
  *size = *buffer ? kBuffer : 0, *most_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t filled) {
  std::lock_guard<std::mutex> guard(state().mutex);
  CUpti_Activity* record = nullptr;
  while (functions().cuptiActivityGetNextRecord(buffer, filled, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) keep<CUpti_ActivityKernel10>(record);
    if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) keep<CUpti_ActivityMemcpy6>(record);
    if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) keep<CUpti_ActivityMemset4>(record);
    if (record->kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION) {
      auto* found = reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(record);
      state().pieces[found->correlationId] = static_cast<long>(found->externalId);
    }
  }
  free(buffer);
}

}  // namespace

bool start() {
  if (!getenv("TESTBED_CUPTI")) return false;
  size_t enabled = 0;
  try {
    static const bool registered = (CUPTI_CHECK(cuptiActivityRegisterCallbacks, give_buffer, take_buffer), true);
    for (auto kind : kKinds) CUPTI_CHECK(cuptiActivityEnable, kind), ++enabled;
    state().now_us = now_us();
    CUPTI_CHECK(cuptiGetTimestamp, &state().now_ns);
    return registered;
  } catch (const std::runtime_error& error) {
    fprintf(stderr, "%s; device work is timed by events\n", error.what());
    for (size_t k = 0; k < enabled; ++k) functions().cuptiActivityDisable(kKinds[k]);
    return false;
  }
}

void begin(long piece) {
  functions().cuptiActivityPushExternalCorrelationId(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, static_cast<uint64_t>(piece));
}

void end() {  // must not throw
  uint64_t last = 0;
  functions().cuptiActivityPopExternalCorrelationId(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &last);
}

std::vector<Span> take() {
  for (auto kind : kKinds) functions().cuptiActivityDisable(kind);
  functions().cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);  // records that do not arrive are counted as missing
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  std::map<long, Span> found;
  auto us = [&s](uint64_t ns) { return s.now_us + static_cast<double>(static_cast<int64_t>(ns - s.now_ns)) / 1e3; };
  for (const Work& each : s.work) {
    auto piece = s.pieces.find(each.correlation);
    if (piece == s.pieces.end()) continue;  // belongs to no piece: a library launched it by itself
    double begin_us = us(each.begin_ns), end_us = us(each.end_ns);
    auto [at, is_new] = found.try_emplace(piece->second, Span{piece->second, begin_us, end_us});
    if (!is_new) at->second.begin_us = std::min(at->second.begin_us, begin_us), at->second.end_us = std::max(at->second.end_us, end_us);
  }
  s.work.clear(), s.pieces.clear();
  std::vector<Span> spans;
  for (const auto& [piece, span] : found) spans.push_back(span);
  return spans;
}

}  // namespace tb::activity

#else  // built without CUPTI's headers

namespace tb::activity {

bool start() {
  if (getenv("TESTBED_CUPTI")) fprintf(stderr, "testbed: built without the headers of CUPTI; device work is timed by events\n");
  return false;
}
void begin(long) {}
void end() {}
std::vector<Span> take() { return {}; }

}  // namespace tb::activity

#endif
