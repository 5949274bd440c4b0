// The same streams, events and memory on an NVIDIA GPU.
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "activity.h"
#include "capture.h"

namespace tb {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("testbed: ") + what + ": " + cudaGetErrorString(error));
}
#define TB_CHECK(call) check(call, #call)

cudaStream_t of(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t of_event(Event event) { return static_cast<cudaEvent_t>(event); }

constexpr size_t kSpare = 16384;

struct Measured {
  std::string name;
  int stream;
  cudaEvent_t begin, end;  // null if the driver's tracer records its times
  long op;
  bool launched;  // its events belong to a captured step, of which each launch records them
};

struct Device {
  std::mutex mutex;
  std::map<Stream, int> numbers;
  std::vector<cudaStream_t> streams;
  std::vector<Measured> measured;
  std::vector<cudaEvent_t> spare;  // timed events, created before tracing starts
  cudaEvent_t base = nullptr;
  double base_us = 0;
  bool watched = false;  // by the driver's tracer
};
Device& device() { static auto* made = new Device; return *made; }

// Times of events are relative to an origin that both clocks know: the moment when tracing began.
void set_base(Device& d) {
  TB_CHECK(cudaDeviceSynchronize());
  if (!d.base) TB_CHECK(cudaEventCreate(&d.base));
  TB_CHECK(cudaEventRecord(d.base, nullptr));
  TB_CHECK(cudaEventSynchronize(d.base));
  d.base_us = now_us();
}

cudaEvent_t timed_event(Device& d) {
  cudaEvent_t made;
  if (d.spare.empty()) {
    TB_CHECK(cudaEventCreate(&made));
    return made;
  }
  made = d.spare.back();
  d.spare.pop_back();
  return made;
}

__global__ void spin_kernel(long long ns) {
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < ns);
}

void spin_plain(Stream stream, double us) {
  spin_kernel<<<1, 1, 0, of(stream)>>>(static_cast<long long>(us * 1e3));
  check(cudaGetLastError(), "spin");
}

void record_time(cudaEvent_t event, Stream stream) {
  auto flags = capturing() ? cudaEventRecordExternal : cudaEventRecordDefault;
  if (cudaEventRecordWithFlags(event, of(stream), flags) != cudaSuccess) fprintf(stderr, "testbed: a traced interval has no time\n");
}

// The graph that recorded these events is destroyed: they are reused once their times have been read.
void release_times(const Measured& over) {
  Device& d = device();
  std::lock_guard<std::mutex> guard(d.mutex);
  for (Measured& each : d.measured)
    if (each.begin == over.begin) {
      each.launched = false;
      return;
    }
  d.spare.push_back(over.begin), d.spare.push_back(over.end);
}

const char* copy_name(Copy kind) {
  return kind == Copy::host_to_device ? "copy_h2d" : kind == Copy::device_to_host ? "copy_d2h" : "copy_d2d";
}
cudaMemcpyKind direction(Copy kind) {
  return kind == Copy::host_to_device ? cudaMemcpyHostToDevice : kind == Copy::device_to_host ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
}

}  // namespace

int device_count() {  // a rank uses the first GPU that it sees; its communicators need the others
  int found = 0;
  return cudaGetDeviceCount(&found) == cudaSuccess && found ? 1 : 0;
}
void device_use(int number) { TB_CHECK(cudaSetDevice(number)); }
int device_current() {
  int number = 0;
  TB_CHECK(cudaGetDevice(&number));
  return number;
}
void device_sync() {
  capture_host_waits("for the device");
  TB_CHECK(cudaDeviceSynchronize());
}
void device_memory(size_t* total, size_t* available) { TB_CHECK(cudaMemGetInfo(available, total)); }

Stream stream_create(int priority) {
  cudaStream_t made;
  TB_CHECK(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, priority));
  std::lock_guard<std::mutex> guard(device().mutex);
  int number = static_cast<int>(device().streams.size());
  device().streams.push_back(made);
  device().numbers[made] = number;
  return made;
}
int stream_count() {
  std::lock_guard<std::mutex> guard(device().mutex);
  return static_cast<int>(device().streams.size());
}
std::vector<Stream> all_streams() {
  std::lock_guard<std::mutex> guard(device().mutex);
  return {device().streams.begin(), device().streams.end()};
}
int stream_priority(int number) {
  std::lock_guard<std::mutex> guard(device().mutex);
  int found = 0;
  TB_CHECK(cudaStreamGetPriority(device().streams.at(number), &found));
  return found;
}
void stream_sync(Stream stream) {
  capture_host_waits("for a stream");
  TB_CHECK(cudaStreamSynchronize(of(stream)));
}
bool stream_done(Stream stream) {
  capture_host_waits("it asks whether a stream is done");
  return cudaStreamQuery(of(stream)) == cudaSuccess;
}
int stream_number(Stream stream) {
  std::lock_guard<std::mutex> guard(device().mutex);
  auto found = device().numbers.find(stream);
  return found == device().numbers.end() ? -1 : found->second;
}

void stream_callback(Stream stream, std::function<void()> call) {
  if (capturing()) capture_work(stream, "a call of the host");
  auto* kept = new std::function<void()>(std::move(call));
  if (capturing()) {  // each launch calls it
    capture_keep([=] { delete kept; });
    TB_CHECK(cudaLaunchHostFunc(of(stream), [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, kept));
    return;
  }
  auto run = [](void* data) {
    auto* function = static_cast<std::function<void()>*>(data);
    (*function)();
    delete function;
  };
  TB_CHECK(cudaLaunchHostFunc(of(stream), run, kept));
}

Event event_create() {
  cudaEvent_t made;
  TB_CHECK(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
  return made;
}
void event_destroy(Event event) {
  capture_forget(event);
  cudaEventDestroy(of_event(event));
}
void event_record(Event event, Stream stream) {
  capture_record(event, stream);
  TB_CHECK(cudaEventRecord(of_event(event), of(stream)));
}
void event_record_launches(Event event, Stream stream) {
  capture_work(stream, "an event for the host");
  TB_CHECK(cudaEventRecordWithFlags(of_event(event), of(stream), cudaEventRecordExternal));
}
bool event_done(Event event) {
  capture_query(event);
  return cudaEventQuery(of_event(event)) == cudaSuccess;
}
void event_sync(Event event) {
  capture_host_waits("for an event");
  capture_query(event);
  TB_CHECK(cudaEventSynchronize(of_event(event)));
}
void stream_wait(Stream stream, Event event) {
  capture_wait(stream, event);
  TB_CHECK(cudaStreamWaitEvent(of(stream), of_event(event), 0));
}

// Relaxed, as kernels allocate memory when they are issued, and other threads continue.
void recording_begin(Stream origin) { TB_CHECK(cudaStreamBeginCapture(of(origin), cudaStreamCaptureModeRelaxed)); }
void* recording_end(Stream origin) {
  cudaGraph_t graph = nullptr;
  TB_CHECK(cudaStreamEndCapture(of(origin), &graph));
  cudaGraphExec_t made = nullptr;
  cudaError_t error = cudaGraphInstantiateWithFlags(&made, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "cudaGraphInstantiateWithFlags");
  return made;
}
void recording_launch(void* made, Stream origin) { TB_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(made), of(origin))); }
void recording_destroy(void* made) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(made)); }

void* device_allocate(size_t size) {
  void* made = nullptr;
  if (cudaMalloc(&made, size ? size : 1) == cudaSuccess) return made;
  cudaGetLastError();
  return nullptr;
}
void device_free(void* address) { cudaFree(address); }
void* pinned_allocate(size_t size) {
  void* made = nullptr;
  if (cudaHostAlloc(&made, size ? size : 1, cudaHostAllocPortable) == cudaSuccess) return made;
  cudaGetLastError();
  return nullptr;
}
void pinned_free(void* address) { cudaFreeHost(address); }
bool is_pinned(const void* address) {
  cudaPointerAttributes found;
  return cudaPointerGetAttributes(&found, address) == cudaSuccess && found.type == cudaMemoryTypeHost;
}

void copy_async(Stream stream, void* to, const void* from, size_t size, Copy kind) {
  if (kind != Copy::device_to_device && capturing() && !is_pinned(kind == Copy::host_to_device ? from : to))
    capture_host_waits("a copy from or to memory that is not pinned");
  Piece piece(stream, Work::copy, copy_name(kind));
  TB_CHECK(cudaMemcpyAsync(to, from, size, direction(kind), of(stream)));
}
void copy_now(void* to, const void* from, size_t size, Copy kind) {
  device_sync();
  TB_CHECK(cudaMemcpy(to, from, size, direction(kind)));
  TB_CHECK(cudaStreamSynchronize(nullptr));
}
void copy_fresh(void* to, const void* from, size_t size) {
  static Stream own = stream_create();
  TB_CHECK(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, of(own)));
  stream_sync(own);
}
void fill_async(Stream stream, void* address, unsigned char byte, size_t size) {
  if (capturing()) capture_work(stream, "fill");
  TB_CHECK(cudaMemsetAsync(address, byte, size, of(stream)));
}
void fill_now(void* address, unsigned char byte, size_t size) {
  TB_CHECK(cudaMemset(address, byte, size));
  TB_CHECK(cudaStreamSynchronize(nullptr));  // neither the host nor non-blocking streams wait for it by themselves
}

void spin(Stream stream, double us) {
  Piece piece(stream, Work::compute, "spin");
  spin_plain(stream, us);
}

Piece::Piece(Stream stream, Work work, const char* name) : stream_(stream) {
  if (capturing()) capture_work(stream, name);
  int number = stream_number(stream), us = delay_us(number, work, name);
  if (us) spin_plain(stream, us);
  if (!tracing()) return;
  Device& d = device();
  Measured made{name, number, nullptr, nullptr, current_op(), capturing()};
  watched_ = d.watched && !made.launched;
  long piece;
  {
    std::lock_guard<std::mutex> guard(d.mutex);
    if (!watched_) made.begin = timed_event(d), made.end = timed_event(d);
    piece = static_cast<long>(d.measured.size());
    d.measured.push_back(made);
  }
  if (watched_) {
    activity::begin(piece);
    return;
  }
  if (made.launched) capture_keep([made] { release_times(made); });
  record_time(made.begin, stream);
  interval_ = made.end;
}

Piece::~Piece() {
  if (watched_) activity::end();
  if (interval_) record_time(static_cast<cudaEvent_t>(interval_), stream_);
}

void settle_intervals() {
  device_sync();
  Device& d = device();
  std::lock_guard<std::mutex> guard(d.mutex);
  if (d.watched) {
    auto spans = activity::take();
    for (const activity::Span& span : spans) {
      const Measured& each = d.measured.at(span.piece);
      interval(each.name.c_str(), each.stream, span.begin_us, span.end_us, each.op);
    }
    size_t asked = 0;
    for (const Measured& each : d.measured) asked += !each.begin;
    if (asked > spans.size()) fprintf(stderr, "testbed: CUPTI has no time of %zu of %zu pieces of work\n", asked - spans.size(), asked);
  }
  d.watched = false;
  for (Measured& each : d.measured) {
    if (!each.begin) continue;
    float begin = 0, end = 0;
    cudaEventElapsedTime(&begin, d.base, each.begin);
    cudaEventElapsedTime(&end, d.base, each.end);
    interval(each.name.c_str(), each.stream, d.base_us + begin * 1e3, d.base_us + end * 1e3, each.op);
    if (!each.launched) d.spare.push_back(each.begin), d.spare.push_back(each.end);
  }
  d.measured.clear();
}

void prepare_intervals() {
  Device& d = device();
  std::lock_guard<std::mutex> guard(d.mutex);
  while (d.spare.size() < kSpare) {
    cudaEvent_t made;
    TB_CHECK(cudaEventCreate(&made));
    d.spare.push_back(made);
  }
  set_base(d);
  d.watched = activity::start();
}

}  // namespace tb
