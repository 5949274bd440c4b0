// Streams, events, memory and copies, with host threads (threads.cc) or with CUDA (cuda.cu).
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
void device_sync();  // also throws failures of device threads
void device_memory(size_t* total, size_t* available);

// Lives until the process ends, as the last blocks that Paddle frees still refer to their stream. Priority 0 is normal; lower runs first.
Stream stream_create(int priority = 0);
int stream_count();
std::vector<Stream> all_streams();
int stream_priority(int number);  // as requested
void stream_sync(Stream stream);
bool stream_done(Stream stream);
void stream_callback(Stream stream, std::function<void()> call);
int stream_number(Stream stream);

Event event_create();
void event_destroy(Event event);
void event_record(Event event, Stream stream);
void event_record_launches(Event event, Stream stream);  // while a step is captured: each launch will record the event, for the host
bool event_done(Event event);
void event_sync(Event event);
void stream_wait(Stream stream, Event event);

void* device_allocate(size_t size);  // null if there is not enough
void device_free(void* address);
void* pinned_allocate(size_t size);
void pinned_free(void* address);
bool is_pinned(const void* address);

// Copies to and from pageable memory block or are staged, as with CUDA.
void copy_async(Stream stream, void* to, const void* from, size_t size, Copy kind);
void copy_now(void* to, const void* from, size_t size, Copy kind);
void copy_fresh(void* to, const void* from, size_t size);  // from the host, to memory that no work has used yet
void fill_async(Stream stream, void* address, unsigned char byte, size_t size);
void fill_now(void* address, unsigned char byte, size_t size);
void spin(Stream stream, double us);

#ifdef TESTBED_CUDA
// Exists around every piece of work: adds the planted delay before it, and measures its interval.
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
// Whether a step is being captured; if so, each of its launches will make the call, which must not be made now.
bool again_at_launches(std::function<void()> call);
#endif

}  // namespace tb
