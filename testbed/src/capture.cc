#include "capture.h"

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "memory.h"

namespace tb {
namespace {

using Clock = std::map<Stream, size_t>;  // stream -> its latest place that the clock's owner runs after

struct Graph {
  void* made = nullptr;
  std::set<const char*> uses;
  std::vector<Event> results;  // recorded at each launch
  std::vector<std::function<void()>> releases;
  std::string ended;  // why it must no longer be launched
  MemoryGrowth growth;
};

struct Captures {
  std::mutex mutex;
  std::map<size_t, Graph> graphs;
  // the open capture
  std::map<Stream, Clock> clocks;  // clocks of the streams that belong to it
  std::map<Event, Clock> recorded;
  std::string refused;
  // all captures
  std::map<Event, size_t> epochs;  // event -> the capture in which it was last recorded
};
Captures& all() { static auto* made = new Captures; return *made; }

std::atomic<size_t> open_number{0}, last_number{0}, num_epochs{0};

// The capture ends with the first reason; later ones are its consequences.
[[noreturn]] void refuse(Captures& c, const std::string& why) {
  if (c.refused.empty()) c.refused = why;
  throw std::runtime_error("testbed: the step cannot be captured: " + why);
}

std::string name_of(Stream stream) { return "stream " + std::to_string(stream_number(stream)); }

void merge(Clock& into, const Clock& from) {
  for (auto& each : from) into[each.first] = std::max(into[each.first], each.second);
}

bool is_forked(Stream stream) {
  std::lock_guard<std::mutex> guard(all().mutex);
  return all().clocks.count(stream) != 0;
}

std::vector<Stream> side_streams(Stream origin) {
  std::vector<Stream> found;
  for (Stream each : all_streams())
    if (each != origin) found.push_back(each);
  return found;
}

void order(Stream first, Stream then) {
  Event event = event_create();
  event_record(event, first);
  stream_wait(then, event);
  event_destroy(event);
}

void forget(const Graph& graph, size_t number) {
  if (graph.made) recording_destroy(graph.made);
  for (Event each : graph.results) event_destroy(each);
  for (auto& release : graph.releases) release();
  Pool::end_graph(number);
}

void close(Captures& c) {
  open_number = 0;
  c.clocks.clear(), c.recorded.clear(), c.refused.clear();
}

}  // namespace

size_t capture_number() { return open_number; }

void capture_begin(Stream origin) {
  if (capturing()) throw std::runtime_error("testbed: a step is being captured already");
  Pool::release_idle();  // the graph gets memory of its own
  memory_watch();
  {
    std::lock_guard<std::mutex> guard(all().mutex);
    recording_begin(origin);
    open_number = ++last_number;
    all().graphs[open_number];
    all().clocks[origin];
  }
  std::vector<Stream> sides = side_streams(origin);
  if (switches.graph_fault == 1) sides.clear();
  for (Stream each : sides) order(origin, each);
}

size_t capture_end(Stream origin) {
  Captures& c = all();
  std::vector<Stream> sides = side_streams(origin);
  if (switches.graph_fault == 2) sides.clear();
  std::string broken;
  try {
    for (Stream each : sides)
      if (is_forked(each)) order(each, origin);
  } catch (const std::exception& error) {  // CUDA ends a capture at the first error
    broken = error.what();
  }
  std::unique_lock<std::mutex> guard(c.mutex);
  std::string why = c.refused.empty() ? broken : c.refused;
  for (auto& each : c.clocks)
    if (why.empty() && each.second.count(each.first) && c.clocks[origin][each.first] < each.second[each.first])
      why = name_of(each.first) + " is not joined: the origin does not wait for its last work";
  size_t number = open_number;
  Graph& graph = c.graphs[number];
  if (why.empty()) why = graph.ended;
  void* made = nullptr;
  try {
    made = recording_end(origin);
  } catch (const std::exception& error) {
    if (why.empty()) why = error.what();
  }
  close(c);
  graph.made = made, graph.growth = memory_watched();
  if (why.empty()) return number;
  Graph failed = std::move(graph);
  c.graphs.erase(number);
  guard.unlock();
  forget(failed, number);
  throw std::runtime_error(why);
}

void capture_abandon(Stream origin) {
  {
    std::lock_guard<std::mutex> guard(all().mutex);
    if (all().refused.empty()) all().refused = "the step failed";
  }
  capture_end(origin);
}

void graph_launch(size_t number, Stream origin) {
  Graph* graph;
  {
    std::lock_guard<std::mutex> guard(all().mutex);
    graph = &all().graphs.at(number);
    if (!graph->ended.empty()) throw std::runtime_error(graph->ended);
  }
  memory_reached(graph->growth);
  recording_launch(graph->made, origin);
}

void graph_await(size_t number) {
  std::vector<Event> results;
  {
    std::lock_guard<std::mutex> guard(all().mutex);
    results = all().graphs.at(number).results;
  }
  for (Event each : results) event_sync(each);
}

void graph_destroy(size_t number) {
  Graph over;
  {
    std::lock_guard<std::mutex> guard(all().mutex);
    auto found = all().graphs.find(number);
    if (found == all().graphs.end()) return;
    over = std::move(found->second);
    all().graphs.erase(found);
  }
  forget(over, number);
}

// ---- requests to the device

void capture_work(Stream stream, const char* what) {
  Captures& c = all();
  std::lock_guard<std::mutex> guard(c.mutex);
  auto found = c.clocks.find(stream);
  if (found == c.clocks.end()) refuse(c, name_of(stream) + " is not forked from the origin, and is given work: " + what);
  ++found->second[stream];
}

void capture_host_waits(const char* what) {
  if (!capturing()) return;
  std::lock_guard<std::mutex> guard(all().mutex);
  refuse(all(), std::string("the host waits inside it: ") + what);
}

void capture_record(Event event, Stream stream) {
  Captures& c = all();
  if (!capturing()) {
    if (!num_epochs) return;
    std::lock_guard<std::mutex> guard(c.mutex);
    num_epochs -= c.epochs.erase(event);
    return;
  }
  std::lock_guard<std::mutex> guard(c.mutex);
  auto found = c.clocks.find(stream);
  if (found == c.clocks.end()) refuse(c, name_of(stream) + " is not forked from the origin, and records an event");
  ++found->second[stream];
  c.recorded[event] = found->second;
  c.epochs[event] = open_number;
  num_epochs = c.epochs.size();
}

void capture_wait(Stream stream, Event event) {
  if (!capturing()) return;
  Captures& c = all();
  std::lock_guard<std::mutex> guard(c.mutex);
  auto found = c.recorded.find(event);
  if (found == c.recorded.end()) refuse(c, name_of(stream) + " waits for an event that was recorded outside of it");
  merge(c.clocks[stream], found->second);  // from here on the stream belongs to the capture
}

void capture_query(Event event) {
  if (!num_epochs) return;
  Captures& c = all();
  std::lock_guard<std::mutex> guard(c.mutex);
  if (c.epochs.count(event)) refuse(c, "the host asks for an event that was recorded in a capture");
}

void capture_forget(Event event) {
  if (!num_epochs) return;
  Captures& c = all();
  std::lock_guard<std::mutex> guard(c.mutex);
  c.recorded.erase(event);
  c.epochs.erase(event);
  num_epochs = c.epochs.size();
}

void capture_keep(std::function<void()> release) {
  std::lock_guard<std::mutex> guard(all().mutex);
  all().graphs[open_number].releases.push_back(std::move(release));
}

void capture_result(Stream stream) {
  if (!capturing()) return;
  Event made = event_create();
  {
    std::lock_guard<std::mutex> guard(all().mutex);
    all().graphs[open_number].results.push_back(made);  // destroyed with the graph, or when the capture fails
  }
  event_record_launches(made, stream);
}

bool capture_separates(Event event) {
  if (!num_epochs) return capturing();
  std::lock_guard<std::mutex> guard(all().mutex);
  auto found = all().epochs.find(event);
  return (found == all().epochs.end() ? 0 : found->second) != open_number;
}

// ---- order and memory

size_t capture_place(Stream stream) {
  std::lock_guard<std::mutex> guard(all().mutex);
  return ++all().clocks[stream][stream];
}

bool capture_is_behind(Stream stream, Stream other, size_t place) {
  std::lock_guard<std::mutex> guard(all().mutex);
  return all().clocks[stream][other] >= place;
}

void capture_uses(const void* address) {
  std::lock_guard<std::mutex> guard(all().mutex);
  all().graphs[open_number].uses.insert(static_cast<const char*>(address));
}

void capture_freed(const void* address, size_t size) {
  bool meets = false;
  {
    std::lock_guard<std::mutex> guard(all().mutex);
    auto* start = static_cast<const char*>(address);
    for (auto& each : all().graphs) {
      auto first = each.second.uses.lower_bound(start);
      if (first == each.second.uses.end() || *first >= start + std::max<size_t>(size, 1)) continue;
      each.second.ended = "memory that it uses was freed: " + std::to_string(size) + " bytes that were allocated before it";
      meets = true;
    }
  }
  if (meets && !capturing()) device_sync();  // a launch may still use it, which only the origin would show
}

}  // namespace tb
