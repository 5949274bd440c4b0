// Streams, events, memory and copies: once with host threads (threads.cc), once with CUDA (cuda.cu).
#pragma once
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <vector>

#include "control.h"

namespace tb {

using Stream = void*;
using Event = void*;
enum class Copy { host_to_device, device_to_host, device_to_device };

int device_count();
void device_use(int device);
int device_current();
void device_sync();  // also the place where a failure of a device thread is thrown
void device_memory(size_t* total, size_t* available);

// Lives as long as the process: blocks that Paddle frees last still name their stream. Priority 0 is normal, lower runs first.
Stream stream_create(int priority = 0);
int stream_count();
std::vector<Stream> all_streams();
int stream_priority(int number);  // as it was given
void stream_sync(Stream stream);
bool stream_done(Stream stream);
void stream_callback(Stream stream, std::function<void()> call);
int stream_number(Stream stream);

Event event_create();
void event_destroy(Event event);
void event_record(Event event, Stream stream);
void event_record_launches(Event event, Stream stream);  // while a step is captured: each launch records it, for the host
bool event_done(Event event);
void event_sync(Event event);
void stream_wait(Stream stream, Event event);

void* device_allocate(size_t size);  // null where there is none
void device_free(void* address);
void* pinned_allocate(size_t size);
void pinned_free(void* address);
bool is_pinned(const void* address);

// To and from pageable memory a copy blocks or stages, as CUDA's does.
void copy_async(Stream stream, void* to, const void* from, size_t size, Copy kind);
void copy_now(void* to, const void* from, size_t size, Copy kind);
void copy_fresh(void* to, const void* from, size_t size);  // from the host; no work has used the memory yet
void fill_async(Stream stream, void* address, unsigned char byte, size_t size);
void fill_now(void* address, unsigned char byte, size_t size);
void spin(Stream stream, double us);

#ifdef TESTBED_CUDA
// Around every piece of work: the planted delay in front, the measured interval about it.
class Piece {
 public:
  Piece(Stream stream, Work work, const char* name);
  ~Piece();

 private:
  Stream stream_;
  void* interval_ = nullptr;
  bool watched_ = false;
};
#else
void enqueue(Stream stream, Work work, const char* name, std::function<void()> run);
// Whether a step is being captured; the call is then made at each of its launches, and must not be made now.
bool again_at_launches(std::function<void()> call);
#endif

}  // namespace tb
