// The plugin's face: Paddle's table of device functions, filled from runtime.h, memory.h and ccl.h.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "capture.h"
#include "ccl.h"
#include "memory.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/backends/device_ext.h"
#include "paddle/phi/core/platform/device_event_defs.h"

// Paddle's own event functions for custom devices create a stream object for each record and each wait, which starts and joins a host
// thread and takes 100 us or more. Ours replace them. Events between jobs have the waiter type of CUDA on any device.
// The registration templates are friends of DeviceEvent; these specialisations reach its slots.
namespace paddle {
namespace platform {

constexpr auto kOwn = DeviceType::CUSTOM_DEVICE;
#define TB_SLOT(Kind, slot)                                                                    \
  template <DeviceType type>                                                                   \
  struct Event##Kind##FunctionRegisterer;                                                      \
  template <>                                                                                  \
  struct Event##Kind##FunctionRegisterer<kOwn> {                                               \
    static void put(Event##Kind##Function call) { DeviceEvent::slot[DeviceTypeToId(kOwn)] = call; } \
  };
TB_SLOT(Create, event_creator_)
TB_SLOT(Record, event_recorder_)
TB_SLOT(Query, event_querier_)
TB_SLOT(Finish, event_finisher_)
TB_SLOT(SetFinished, event_finished_setter_)
TB_SLOT(Reset, event_resetter_)
#undef TB_SLOT

template <DeviceType waiter, DeviceType event>
struct EventWaitFunctionRegisterer;
template <>
struct EventWaitFunctionRegisterer<kOwn, kOwn> {
  static void put(EventWaitFunction stream, EventWaitFunction host) {
    for (DeviceType waiter : {kOwn, DeviceType::CUDA}) DeviceEvent::event_waiter_[DeviceTypeToId(waiter)][DeviceTypeToId(kOwn)] = stream;
    DeviceEvent::event_waiter_[DeviceTypeToId(DeviceType::CPU)][DeviceTypeToId(kOwn)] = host;
  }
};

}  // namespace platform
}  // namespace paddle

namespace {

using namespace tb;

C_Status guarded(const char* name, const std::function<void()>& run) {
  try {
    run();
    return C_SUCCESS;
  } catch (const std::exception& error) {
    fprintf(stderr, "testbed: %s: %s\n", name, error.what());
    return C_FAILED;
  }
}

Stream of(C_Stream stream) { return static_cast<Stream>(stream); }
Event of(C_Event event) { return static_cast<Event>(event); }

C_Status nothing() { return C_SUCCESS; }
C_Status use_device(const C_Device d) {
  return guarded("set_device", [&] { device_use(d->id); });
}
C_Status get_device(const C_Device d) {
  d->id = device_current();
  return C_SUCCESS;
}

std::atomic<int> next_priority{0};  // Paddle's table of functions passes none

C_Status create_stream(const C_Device d, C_Stream* stream) {
  static std::atomic<Stream> first{nullptr};
  int priority = switches.priorities ? next_priority.load() : 0;
  return guarded("create_stream", [&] {
    device_use(d->id);
    Stream made = switches.one_stream && first ? first.load() : stream_create(priority);
    if (!first) first = made;
    *stream = static_cast<C_Stream>(made);
  });
}
C_Status destroy_stream(const C_Device, C_Stream) { return C_SUCCESS; }
C_Status query_stream(const C_Device, C_Stream stream) { return stream_done(of(stream)) ? C_SUCCESS : C_FAILED; }
C_Status add_callback(const C_Device d, C_Stream stream, C_Callback call, void* data) {
  C_Device_st device = *d;
  stream_callback(of(stream), [=]() mutable {
    C_Status status;
    call(&device, stream, data, &status);
  });
  return C_SUCCESS;
}
C_Status sync_stream(const C_Device, C_Stream stream) {
  note(switches.nosync ? "sync_stream_left_out" : "sync_stream", stream_number(of(stream)));
  if (switches.nosync) return C_SUCCESS;
  return guarded("synchronize_stream", [&] { stream_sync(of(stream)); });
}
C_Status sync_device(const C_Device) {
  note("sync_device");
  return guarded("synchronize_device", [] { device_sync(); });
}

C_Status create_event(const C_Device d, C_Event* event) {
  device_use(d->id);
  *event = static_cast<C_Event>(event_create());
  return C_SUCCESS;
}
C_Status destroy_event(const C_Device, C_Event event) { return event_destroy(of(event)), C_SUCCESS; }
// No wait if a captured step begins or ends between event and wait, where the host has waited for the device.
void wait_unless_separate(Stream stream, Event event) {
  bool separate = capture_separates(event);
  note(separate ? "wait_event_left_out" : switches.drop_waits ? "wait_event_dropped" : "wait_event", stream_number(stream), event);
  if (!separate && !switches.drop_waits) stream_wait(stream, event);
}

C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  note("record_event", stream_number(of(stream)), event);
  event_record(of(event), of(stream));
  return C_SUCCESS;
}
bool is_over(Event event) { return (!capturing() && capture_separates(event)) || event_done(event); }
void await(Event event) {
  if (capturing() || !capture_separates(event)) event_sync(event);
}
C_Status query_event(const C_Device, C_Event event) { return is_over(of(event)) ? C_SUCCESS : C_FAILED; }
C_Status sync_event(const C_Device, C_Event event) {
  note("sync_event", -1, event);
  return guarded("synchronize_event", [&] { await(of(event)); });
}
C_Status wait_event(const C_Device, C_Stream stream, C_Event event) {
  return guarded("stream_wait_event", [&] { wait_unless_separate(of(stream), of(event)); });
}

// ---- the executor's events

using paddle::platform::DeviceEvent;

struct OwnEvent {
  Event event = event_create();
  ~OwnEvent() { event_destroy(event); }
};
Event of(const DeviceEvent* event) { return static_cast<OwnEvent*>(event->GetEvent().get())->event; }
Stream of(const phi::DeviceContext* context) { return static_cast<const phi::CustomContext*>(context)->stream(); }

void put_events() {
  using namespace paddle::platform;
  EventCreateFunctionRegisterer<kOwn>::put([](DeviceEvent* event, const phi::Place& place, unsigned int) {
    device_use(place.GetDeviceId());
    event->InitEvent(std::make_shared<OwnEvent>());
  });
  EventRecordFunctionRegisterer<kOwn>::put([](DeviceEvent* event, const phi::DeviceContext* context) {
    note("record_event", stream_number(of(context)), of(event));
    event_record(of(event), of(context));
  });
  EventQueryFunctionRegisterer<kOwn>::put([](const DeviceEvent* event) { return is_over(of(event)); });
  EventFinishFunctionRegisterer<kOwn>::put([](const DeviceEvent* event) { await(of(event)); });
  EventSetFinishedFunctionRegisterer<kOwn>::put([](const DeviceEvent*) {});
  EventResetFunctionRegisterer<kOwn>::put([](const DeviceEvent*) {});
  EventWaitFunctionRegisterer<kOwn, kOwn>::put(
      [](const DeviceEvent* event, const phi::DeviceContext* context) {
        wait_unless_separate(of(context), of(event));
      },
      [](const DeviceEvent* event, const phi::DeviceContext*) { await(of(event)); });
}

C_Status allocate(const C_Device d, void** address, size_t size) {
  device_use(d->id);
  *address = outside_allocate(size);
  return *address ? C_SUCCESS : C_FAILED;
}
C_Status deallocate(const C_Device, void* address, size_t size) {
  return guarded("free", [&] { outside_free(address, size); });
}
C_Status set_memory(const C_Device, void* address, unsigned char byte, size_t size) { return fill_now(address, byte, size), C_SUCCESS; }
C_Status allocate_host(const C_Device, void** address, size_t size) {
  *address = pinned_allocate(size);
  return *address ? C_SUCCESS : C_FAILED;
}
C_Status deallocate_host(const C_Device, void* address, size_t) { return pinned_free(address), C_SUCCESS; }

std::atomic<bool> to_fresh_memory{false};

template <Copy kind>
C_Status copy(const C_Device, void* to, const void* from, size_t size) {
  note("copy_now", -1, to, size);
  bool fresh = kind == Copy::host_to_device && to_fresh_memory;
  return guarded("copy", [&] { fresh ? copy_fresh(to, from, size) : copy_now(to, from, size, kind); });
}
template <Copy kind>
C_Status copy_on(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  return guarded("asynchronous copy", [&] { copy_async(of(stream), to, from, size, kind); });
}

C_Status get_count(size_t* count) { return *count = device_count(), C_SUCCESS; }
C_Status get_list(size_t* devices) {
  for (int k = 0; k < device_count(); ++k) devices[k] = k;
  return C_SUCCESS;
}
C_Status get_memory(const C_Device d, size_t* total, size_t* available) {
  device_use(d->id);
  device_memory(total, available);
  return C_SUCCESS;
}
C_Status smallest_chunk(const C_Device, size_t* size) { return *size = 256, C_SUCCESS; }
C_Status largest_chunk(const C_Device, size_t* size) { return *size = size_t{64} << 20, C_SUCCESS; }
C_Status capability(const C_Device, size_t* number) { return *number = 90, C_SUCCESS; }
C_Status version(const C_Device, size_t* number) { return *number = 13000, C_SUCCESS; }
C_Status processors(const C_Device, size_t* number) { return *number = 132, C_SUCCESS; }
C_Status threads(const C_Device, size_t* number) { return *number = 1024, C_SUCCESS; }
C_Status yes(const C_Device, bool* answer) { return *answer = true, C_SUCCESS; }

Type type_of(C_DataType type) {
  switch (type) {
    case FLOAT32: return Type::f32;
    case BFLOAT16: return Type::bf16;
    case FLOAT64: return Type::f64;
    case INT64: return Type::i64;
    case INT32: return Type::i32;
    case BOOL:
    case INT8:
    case UINT8: return Type::u8;
    default: throw std::runtime_error("no communication of this element type");
  }
}
Reduction reduction_of(C_CCLReduceOp op) {
  switch (op) {
    case SUM: return Reduction::sum;
    case AVG: return Reduction::average;
    case MAX: return Reduction::maximum;
    case MIN: return Reduction::minimum;
    default: return Reduction::product;
  }
}
Ring* of(C_CCLComm ring) { return reinterpret_cast<Ring*>(ring); }

C_Status ring_name(C_CCLComm ring, char* name) { return snprintf(name, 32, "%p", static_cast<void*>(ring)), C_SUCCESS; }
C_Status id_size(size_t* size) { return *size = kCclIdSize, C_SUCCESS; }
C_Status new_id(C_CCLRootId* id) {
  return guarded("unique id", [&] { ccl_new_id(static_cast<char*>(id->data)); });
}
C_Status join(size_t size, C_CCLRootId* id, size_t rank, C_CCLComm* ring) {
  return guarded("communicator", [&] {
    *ring = reinterpret_cast<C_CCLComm>(ccl_join(static_cast<const char*>(id->data), static_cast<int>(size), static_cast<int>(rank)));
  });
}
C_Status leave(C_CCLComm) { return C_SUCCESS; }  // communicators live until the process ends
C_Status all_reduce(void* x, void* out, size_t n, C_DataType type, C_CCLReduceOp op, C_CCLComm ring, C_Stream stream) {
  return guarded("all_reduce", [&] { ccl_all_reduce(of(ring), of(stream), type_of(type), x, out, n, reduction_of(op)); });
}
C_Status broadcast(void* x, size_t n, C_DataType type, size_t root, C_CCLComm ring, C_Stream stream) {
  return guarded("broadcast", [&] { ccl_broadcast(of(ring), of(stream), type_of(type), x, x, n, static_cast<int>(root)); });
}
C_Status all_gather(void* x, void* out, size_t n, C_DataType type, C_CCLComm ring, C_Stream stream) {
  return guarded("all_gather", [&] { ccl_all_gather(of(ring), of(stream), type_of(type), x, out, n); });
}
C_Status reduce_scatter(void* x, void* out, size_t n, C_DataType type, C_CCLReduceOp op, C_CCLComm ring, C_Stream stream) {
  return guarded("reduce_scatter", [&] { ccl_reduce_scatter(of(ring), of(stream), type_of(type), x, out, n, reduction_of(op)); });
}

void fill_device(C_DeviceInterface* i) {
  i->initialize = nothing, i->finalize = nothing;
  i->init_device = use_device, i->set_device = use_device, i->get_device = get_device, i->deinit_device = use_device;
  i->synchronize_device = sync_device;
  i->get_device_count = get_count, i->get_device_list = get_list;
  i->get_compute_capability = capability, i->get_runtime_version = version, i->get_driver_version = version;
  i->get_multi_process = processors, i->get_max_threads_per_mp = threads, i->get_max_threads_per_block = threads;
  i->is_float16_supported = yes, i->is_bfloat16_supported = yes;
}

void fill_streams(C_DeviceInterface* i) {
  i->create_stream = create_stream, i->destroy_stream = destroy_stream, i->query_stream = query_stream;
  i->stream_add_callback = add_callback, i->synchronize_stream = sync_stream;
  i->create_event = create_event, i->destroy_event = destroy_event, i->record_event = record_event, i->query_event = query_event;
  i->synchronize_event = sync_event, i->stream_wait_event = wait_event;
}

void fill_memory(C_DeviceInterface* i) {
  i->device_memory_allocate = allocate, i->device_memory_deallocate = deallocate, i->device_memory_set = set_memory;
  i->host_memory_allocate = allocate_host, i->host_memory_deallocate = deallocate_host;
  i->memory_copy_h2d = copy<Copy::host_to_device>, i->memory_copy_d2h = copy<Copy::device_to_host>;
  i->memory_copy_d2d = copy<Copy::device_to_device>;
  i->async_memory_copy_h2d = copy_on<Copy::host_to_device>, i->async_memory_copy_d2h = copy_on<Copy::device_to_host>;
  i->async_memory_copy_d2d = copy_on<Copy::device_to_device>;
  i->device_memory_stats = get_memory, i->device_min_chunk_size = smallest_chunk, i->device_max_chunk_size = largest_chunk;
}

void fill_communication(C_DeviceInterface* i) {
  i->xccl_get_comm_name = ring_name, i->xccl_get_unique_id_size = id_size, i->xccl_get_unique_id = new_id;
  i->xccl_comm_init_rank = join, i->xccl_destroy_comm = leave;
  i->xccl_all_reduce = all_reduce, i->xccl_broadcast = broadcast, i->xccl_all_gather = all_gather;
  i->xccl_reduce_scatter = reduce_scatter, i->xccl_group_start = nothing, i->xccl_group_end = nothing;
}

}  // namespace

TB_EXPORT void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  static char name[] = "testbed", kind[] = "1";
  params->device_type = name, params->sub_device_type = kind;
  put_events();
  C_DeviceInterface* table = params->interface;
  size_t size = table->size;
  memset(reinterpret_cast<void*>(table), 0, sizeof *table);
  table->size = size;
  fill_device(table), fill_streams(table), fill_memory(table), fill_communication(table);
}

TB_EXPORT void tb_sync() { device_sync(); }

// ---- captured steps. Calls return 0 (tb_capture_end the graph's number); after a failure tb_capture_reason tells the reason.

namespace {

std::string capture_reason;

Stream compute_stream() {
  phi::CustomPlace place("testbed", device_current());
  return static_cast<phi::CustomContext*>(phi::DeviceContextPool::Instance().Get(place))->stream();
}

size_t reasoned(const std::function<size_t()>& run, size_t otherwise) {
  try {
    return run();
  } catch (const std::exception& error) {
    capture_reason = error.what();
    return otherwise;
  }
}

}  // namespace

TB_EXPORT const char* tb_capture_reason() { return capture_reason.c_str(); }
TB_EXPORT size_t tb_capture_begin() {
  return reasoned([] { return capture_begin(compute_stream()), 0; }, 1);
}
TB_EXPORT size_t tb_capture_end(int failed) {
  return reasoned([&]() -> size_t { return failed ? (capture_abandon(compute_stream()), 0) : capture_end(compute_stream()); }, 0);
}
TB_EXPORT size_t tb_graph_launch(size_t graph) {
  return reasoned([&] { return graph_launch(graph, compute_stream()), 0; }, 1);
}
TB_EXPORT size_t tb_graph_await(size_t graph) {
  return reasoned([&] { return graph_await(graph), 0; }, 1);
}
TB_EXPORT void tb_graph_destroy(size_t graph) { graph_destroy(graph); }
TB_EXPORT void tb_next_priority(int priority) { next_priority = priority; }  // of the streams that Paddle creates from here on
TB_EXPORT int tb_stream_count() { return stream_count(); }
TB_EXPORT int tb_stream_priority(int number) { return stream_priority(number); }
TB_EXPORT size_t tb_total_memory() {
  size_t total = 0, available = 0;
  device_memory(&total, &available);
  return total;
}
TB_EXPORT size_t tb_free_memory() {
  size_t total = 0, available = 0;
  device_memory(&total, &available);
  return available;
}
// While on, copies to the device go to memory that no work uses, so they wait for nothing.
TB_EXPORT void tb_fresh(int on) { to_fresh_memory = on; }
