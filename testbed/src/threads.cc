// A stream is a host thread with a queue; device memory is host memory. Everything is asynchronous, as on a GPU.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "capture.h"

namespace tb {
namespace {

void pause_us(double us) { std::this_thread::sleep_for(std::chrono::microseconds(static_cast<long>(us))); }

struct ThreadStream {
  ThreadStream(int number, int priority) : number(number), priority(priority), thread([this] { run(); }) {}

  void push(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      tasks.push_back(std::move(task));
      ++given;
    }
    changed.notify_all();
  }
  void sync() {
    std::unique_lock<std::mutex> lock(mutex);
    size_t until = given;
    changed.wait(lock, [&] { return done >= until; });
  }
  bool idle() {
    std::lock_guard<std::mutex> guard(mutex);
    return done == given;
  }

  const int number, priority;

 private:
  void run() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      task();
      {
        std::lock_guard<std::mutex> guard(mutex);
        ++done;
      }
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  size_t given = 0, done = 0;
  std::thread thread;
};

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  size_t recorded = 0, completed = 0;

  void wait(size_t until) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return completed >= until; });
  }
  void complete(size_t which) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      completed = std::max(completed, which);
    }
    changed.notify_all();
  }
};
using EventHandle = std::shared_ptr<EventState>;  // shared, as queued tasks may outlive the event

struct Device {
  std::mutex mutex;
  std::vector<ThreadStream*> streams;
  std::map<const char*, size_t> pinned;
};
Device& device() { static auto* made = new Device; return *made; }

ThreadStream* of(Stream stream) { return static_cast<ThreadStream*>(stream); }
EventHandle& of_event(Event event) { return *static_cast<EventHandle*>(event); }

const char* copy_name(Copy kind) {
  return kind == Copy::host_to_device ? "copy_h2d" : kind == Copy::device_to_host ? "copy_d2h" : "copy_d2d";
}

// Computation on streams of normal priority starts only if streams of higher priority have nothing to do, or one of them waits.
std::atomic<int> favoured{0}, waiting{0};

class Waiting {
 public:
  explicit Waiting(bool counts) : counts_(counts) { waiting += counts_; }
  ~Waiting() { waiting -= counts_; }

 private:
  const int counts_;
};

void give_way() {
  while (favoured && !waiting) pause_us(20);
}

// A captured step is a list of calls, which each launch makes again.
struct Recording {
  std::mutex mutex;
  std::vector<std::function<void()>> calls;
};
Recording* recording = nullptr;

bool is_recorded(std::function<void()> call) {
  if (!capturing()) return false;
  std::lock_guard<std::mutex> guard(recording->mutex);
  recording->calls.push_back(std::move(call));
  return true;
}

}  // namespace

bool again_at_launches(std::function<void()> call) { return is_recorded(std::move(call)); }

void recording_begin(Stream) { recording = new Recording; }
void* recording_end(Stream) { return recording; }
void recording_launch(void* made, Stream) {
  for (auto& each : static_cast<Recording*>(made)->calls) each();
}
void recording_destroy(void* made) { delete static_cast<Recording*>(made); }

int device_count() { return 1; }
void device_use(int) {}
int device_current() { return 0; }
void device_memory(size_t* total, size_t* available) { *total = size_t{8} << 30, *available = size_t{7} << 30; }

void device_sync() {
  capture_host_waits("for the device");
  std::vector<ThreadStream*> streams;
  {
    std::lock_guard<std::mutex> guard(device().mutex);
    streams = device().streams;
  }
  for (ThreadStream* each : streams) each->sync();
}

Stream stream_create(int priority) {
  std::lock_guard<std::mutex> guard(device().mutex);
  auto* made = new ThreadStream(static_cast<int>(device().streams.size()), priority);
  device().streams.push_back(made);
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
  return device().streams.at(number)->priority;
}

void stream_sync(Stream stream) {
  capture_host_waits("for a stream");
  of(stream)->sync();
}
bool stream_done(Stream stream) {
  capture_host_waits("it asks whether a stream is done");
  return of(stream)->idle();
}
void stream_callback(Stream stream, std::function<void()> call) {
  if (capturing()) capture_work(stream, "a call of the host");
  if (!is_recorded([=] { of(stream)->push(call); })) of(stream)->push(std::move(call));
}
int stream_number(Stream stream) { return of(stream)->number; }

Event event_create() { return new EventHandle(std::make_shared<EventState>()); }
void event_destroy(Event event) {
  capture_forget(event);
  delete static_cast<EventHandle*>(event);
}

namespace {

void record(EventHandle state, Stream stream) {
  size_t which;
  {
    std::lock_guard<std::mutex> guard(state->mutex);
    which = ++state->recorded;
  }
  of(stream)->push([state, which] { state->complete(which); });
}

void wait(Stream stream, EventHandle state) {  // does nothing for an event that was never recorded, as with CUDA
  size_t until;
  {
    std::lock_guard<std::mutex> guard(state->mutex);
    until = state->recorded;
  }
  bool counts = of(stream)->priority < 0;
  if (!until) return;
  of(stream)->push([state, until, counts] {
    Waiting here(counts);
    state->wait(until);
  });
}

}  // namespace

void event_record(Event event, Stream stream) {
  capture_record(event, stream);
  EventHandle state = of_event(event);
  if (!is_recorded([=] { record(state, stream); })) record(state, stream);
}

void event_record_launches(Event event, Stream stream) {
  capture_work(stream, "an event for the host");
  EventHandle state = of_event(event);
  is_recorded([=] { record(state, stream); });
}

bool event_done(Event event) {
  capture_query(event);
  EventHandle state = of_event(event);
  std::lock_guard<std::mutex> guard(state->mutex);
  return state->completed >= state->recorded;
}

void event_sync(Event event) {
  capture_host_waits("for an event");
  capture_query(event);
  EventHandle state = of_event(event);
  size_t until;
  {
    std::lock_guard<std::mutex> guard(state->mutex);
    until = state->recorded;
  }
  state->wait(until);
}

void stream_wait(Stream stream, Event event) {
  capture_wait(stream, event);
  EventHandle state = of_event(event);
  if (!is_recorded([=] { wait(stream, state); })) wait(stream, state);
}

void* device_allocate(size_t size) {
  void* made = nullptr;
  return posix_memalign(&made, 256, size ? size : 1) ? nullptr : made;
}
void device_free(void* address) { free(address); }

void* pinned_allocate(size_t size) {
  void* made = device_allocate(size);
  std::lock_guard<std::mutex> guard(device().mutex);
  if (made) device().pinned[static_cast<const char*>(made)] = size;
  return made;
}

void pinned_free(void* address) {
  {
    std::lock_guard<std::mutex> guard(device().mutex);
    device().pinned.erase(static_cast<const char*>(address));
  }
  free(address);
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(device().mutex);
  auto* wanted = static_cast<const char*>(address);
  auto after = device().pinned.upper_bound(wanted);
  if (after == device().pinned.begin()) return false;
  --after;
  return wanted < after->first + after->second;
}

namespace {

void issue(Stream stream, Work work, const char* name, std::function<void()> run, long op) {
  int number = of(stream)->number, priority = of(stream)->priority, us = delay_us(number, work, name);
  bool traced = tracing();
  if (work == Work::compute && priority < 0) ++favoured;
  of(stream)->push([=, run = std::move(run)] {
    if (us) pause_us(us);
    if (work == Work::compute && priority >= 0) give_way();
    double begin = traced ? now_us() : 0;
    Waiting may_wait(work == Work::collective && priority < 0);
    run();
    if (work == Work::compute && priority < 0) --favoured;
    if (traced) interval(name, number, begin, now_us(), op);
  });
}

}  // namespace

void enqueue(Stream stream, Work work, const char* name, std::function<void()> run) {
  long op = current_op();
  if (capturing()) capture_work(stream, name);
  if (!is_recorded([=] { issue(stream, work, name, run, op); })) issue(stream, work, name, std::move(run), op);
}

void copy_async(Stream stream, void* to, const void* from, size_t size, Copy kind) {
  const char* name = copy_name(kind);
  if (kind != Copy::device_to_device && capturing() && !is_pinned(kind == Copy::host_to_device ? from : to))
    capture_host_waits("a copy from or to memory that is not pinned");
  if (kind == Copy::host_to_device && !is_pinned(from)) {  // it is staged before the call returns
    auto* start = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(start, start + size);
    enqueue(stream, Work::copy, name, [=] { memcpy(to, staged->data(), size); });
    return;
  }
  enqueue(stream, Work::copy, name, [=] { memmove(to, from, size); });
  if (kind == Copy::device_to_host && !is_pinned(to)) stream_sync(stream);
}

void copy_now(void* to, const void* from, size_t size, Copy) {
  device_sync();
  memmove(to, from, size);
}

void copy_fresh(void* to, const void* from, size_t size) { memcpy(to, from, size); }

void fill_async(Stream stream, void* address, unsigned char byte, size_t size) {
  if (capturing()) capture_work(stream, "fill");
  auto fill = [=] { memset(address, byte, size); };  // not a piece of work: it has no delay and no measured time
  if (!is_recorded([=] { of(stream)->push(fill); })) of(stream)->push(fill);
}

void fill_now(void* address, unsigned char byte, size_t size) { memset(address, byte, size); }

void spin(Stream stream, double us) {
  enqueue(stream, Work::compute, "spin", [=] { pause_us(us); });
}

void settle_intervals() { device_sync(); }
void prepare_intervals() {}

}  // namespace tb
