// A step that is captured once and launched again: what the host knows of it, whatever the device is. The order that one capture
// gives is followed here, so that what CUDA refuses is refused with host threads too, and so that memory is used again by that order.
#pragma once
#include <cstddef>
#include <functional>
#include <string>

#include "runtime.h"

namespace tb {

// ---- what the device does, in threads.cc and cuda.cu

void recording_begin(Stream origin);
void* recording_end(Stream origin);  // what can be launched
void recording_launch(void* made, Stream origin);
void recording_destroy(void* made);

// ---- a capture; both ends throw the first reason why the step cannot be captured

// The device is idle. All streams begin behind `origin`, and at the end `origin` waits for all of them: a launch on it comes after all of
// the launch before, and nothing inside needs an event of an earlier step.
void capture_begin(Stream origin);
size_t capture_end(Stream origin);  // the graph's number, from 1
void capture_abandon(Stream origin);
void graph_launch(size_t graph, Stream origin);
void graph_await(size_t graph);    // the host waits until the last launch has copied its results
void graph_destroy(size_t graph);  // the device is idle

size_t capture_number();  // of the graph that is being captured, 0 for none
inline bool capturing() { return capture_number() != 0; }

// ---- what the device is asked for meanwhile

void capture_work(Stream stream, const char* what);  // throws where the stream is not forked
void capture_host_waits(const char* what);           // throws: inside a capture the host cannot wait, and cannot ask
void capture_record(Event event, Stream stream);
void capture_wait(Stream stream, Event event);  // throws where the event was recorded outside
void capture_query(Event event);                // throws where the event was recorded in a capture
void capture_forget(Event event);
void capture_keep(std::function<void()> release);  // of what each launch uses: called when the graph is over
void capture_result(Stream stream);             // what `graph_await` waits for: all that the stream was given so far
// Recorded in another capture than the wait, or only one of the two in any: an idle device lies between them, so the wait is left out.
bool capture_separates(Event event);

// ---- order and memory

size_t capture_place(Stream stream);                                   // behind all that the stream was given so far
bool capture_is_behind(Stream stream, Stream other, size_t place);     // whether all that comes on `stream` runs after that place
void capture_uses(const void* address);                                // memory from outside that the graph will use at each launch
void capture_freed(const void* address, size_t size);                  // ends all graphs that use it

}  // namespace tb
