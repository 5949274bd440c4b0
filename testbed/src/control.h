// What a test can set and read: switches, planted delays, the trace of what the host requested and what the device did.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

// name, default with host threads, default on CUDA, meaning
#define TB_SWITCHES(X)                                                                                              \
  X(nosync, 1, 1, "the host does not wait for the device at the end of a job")                                       \
  X(record, 1, 1, "whose reads hold a freed block: 0 nobody's, 1 its last reader's, 2 every reader's")               \
  X(hold, 1, 1, "a freed block that another stream still reads is kept until that stream is done")                   \
  X(poison, 1, 0, "freed device and pinned memory is filled with NaN patterns")                                      \
  X(pinned_events, 0, 0, "a freed pinned buffer is kept until the copies that use it are done")                      \
  X(d2h_blocks, 0, 0, "memcpy_d2h into pinned memory blocks the host until it is done, as on the GPU place")         \
  X(trap, 0, 0, "an operation that meets poison says so on stderr, and whose memory it is (host threads)")            \
  X(copy_order, 0, 0, "a copy in from a pinned buffer waits for the copy out that filled it")                        \
  X(drop_waits, 0, 0, "planted fault: no stream ever waits for another")                                             \
  X(refuse_pinned_after, -1, -1, "planted fault: pinned allocations after this many fail; negative for never")       \
  X(pageable, 0, 0, "pinned memory is ordinary memory: copies are staged and block the host")                        \
  X(pinned_slab, 64, 2048, "pinned buffers are cut from allocations of so many MiB; 0: each is one of its own")      \
  X(priorities, 1, 1, "a stream has the priority that its first operation asks for, as on the GPU place")          \
  X(one_stream, 0, 0, "all streams that Paddle makes from now on are one")                                           \
  X(sync_waits, 1, 1, "sync_calc_stream holds the host until its stream is done")                                    \
  X(free_at_end, 0, 0, "a freed block is kept until its own stream is done with it, as where events collect memory") \
  X(pinned_kept, 1, 1, "a copy out uses the pinned buffer again that its variable has")                              \
  X(graph_fault, 0, 0, "planted fault in captured steps: 1: a stream is not forked, 2: a stream is not joined")

#define TB_EXPORT extern "C" __attribute__((visibility("default")))

namespace tb {

struct Switches {
#ifdef TESTBED_CUDA
#define X(name, threads, cuda, meaning) std::atomic<int> name{cuda};
#else
#define X(name, threads, cuda, meaning) std::atomic<int> name{threads};
#endif
  TB_SWITCHES(X)
#undef X
};
extern Switches switches;

enum class Work : int { compute = 0, copy = 1, collective = 2 };

// Microseconds by which the next piece of work on a stream is delayed; almost always 0.
// A site is (stream number, number of earlier pieces of work on that stream), the same in every run of the same program.
int delay_us(int stream, Work work, const char* name);

// The host's part of the trace, in order; recorded only while tracing is on.
void note(const char* what, int stream = -1, const void* address = nullptr, size_t size = 0);
bool tracing();
// The number of the operation that this host thread is issuing, from 1 in host order; 0 if it issues none.
long begin_op(const char* name, int stream);
void end_op();
long current_op();
// The device's part of the trace: the interval of one piece of work of an operation.
void interval(const char* name, int stream, double begin_us, double end_us, long op);
double now_us();

}  // namespace tb
