// A step that is captured once and launched repeatedly: the host's view of it, for both kinds of devices. It tracks the order that the
// capture establishes, so that host threads refuse what CUDA refuses, and so that memory is reused according to that order.
#pragma once
#include <cstddef>
#include <functional>
#include <string>

#include "runtime.h"

namespace tb {

// ---- the device's part, in threads.cc and cuda.cu

void recording_begin(Stream origin);
void* recording_end(Stream origin);  // returns what can be launched
void recording_launch(void* made, Stream origin);
void recording_destroy(void* made);

// ---- a capture; capture_end and capture_abandon throw the first reason why the step cannot be captured

// The device must be idle. All streams start after `origin`, which waits for all of them at the end: a launch runs after the whole previous
// launch, and nothing inside needs an event of an earlier step.
void capture_begin(Stream origin);
size_t capture_end(Stream origin);  // returns the graph's number, from 1
void capture_abandon(Stream origin);
void graph_launch(size_t graph, Stream origin);
void graph_await(size_t graph);    // the host waits until the last launch has copied its results
void graph_destroy(size_t graph);  // the device must be idle

size_t capture_number();  // number of the graph that is being captured; 0 for none
inline bool capturing() { return capture_number() != 0; }

// ---- requests to the device during a capture

void capture_work(Stream stream, const char* what);  // throws if the stream is not forked
void capture_host_waits(const char* what);           // throws: during a capture the host can neither wait nor query
void capture_record(Event event, Stream stream);
void capture_wait(Stream stream, Event event);  // throws if the event was recorded outside
void capture_query(Event event);                // throws if the event was recorded in a capture
void capture_forget(Event event);
void capture_keep(std::function<void()> release);  // frees what each launch uses; called when the graph is destroyed
void capture_result(Stream stream);             // makes `graph_await` wait for all work of the stream so far
// Whether record and wait are not in one capture, or not both outside of captures. The device was idle between them: no wait is needed.
bool capture_separates(Event event);

// ---- order and memory

size_t capture_place(Stream stream);                                   // after all work of the stream so far
bool capture_is_behind(Stream stream, Stream other, size_t place);     // whether later work on `stream` runs after this place
void capture_uses(const void* address);                                // memory from outside that each launch will use
void capture_freed(const void* address, size_t size);                  // invalidates all graphs that use it

}  // namespace tb
