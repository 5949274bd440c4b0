#include "op.h"

#include <cstring>

#include "capture.h"
#include "trap.h"

namespace tb {

void refuse(const std::string& op, const std::string& why) {
  PADDLE_THROW(phi::errors::Unimplemented("testbed: %s: %s", op, why));
}

Type type_of(DataType type) {
  switch (type) {
    case DataType::FLOAT32: return Type::f32;
    case DataType::BFLOAT16: return Type::bf16;
    case DataType::FLOAT64: return Type::f64;
    case DataType::INT64: return Type::i64;
    case DataType::INT32: return Type::i32;
    case DataType::BOOL:
    case DataType::INT8:
    case DataType::UINT8: return Type::u8;
    default: refuse("element type", std::to_string(static_cast<int>(type)) + " has no device functions");
  }
}
Type type_of(const DenseTensor& tensor) { return type_of(tensor.dtype()); }

Dims dims_of(const DenseTensor& tensor) { return common::vectorize<int64_t>(tensor.dims()); }

namespace {

void use_pool(const phi::CustomContext& context) {
  auto* pool = Pool::of(context.GetPlace().GetDeviceId(), context.stream());
  const_cast<phi::CustomContext&>(context).SetAllocator(pool);  // Paddle's own kernels for all devices use it too
  pool->op_begins();
}

#ifdef TESTBED_CUDA
void look(const Op& op, long, const DenseTensor*, const char*) { refuse(op.name, "cannot look for poison here: the switch trap is for host threads"); }
#else
// Not looked at: integers, which may be -1; results of `empty`, which are poison until filled; `share_data`, which reads nothing.
void look(const Op& op, long number, const DenseTensor* tensor, const char* what) {
  bool floating = tensor && tensor->initialized() && (tensor->dtype() == DataType::FLOAT32 || tensor->dtype() == DataType::BFLOAT16);
  if (floating && strcmp(op.name, "empty") && strcmp(op.name, "share_data"))
    trap_look(op.stream, op.name, number, what, tensor->data(), tensor->numel(), phi::SizeOf(tensor->dtype()));
}
#endif

}  // namespace

Op::Op(const phi::CustomContext& context, const char* name, const std::vector<const DenseTensor*>& reads)
    : name(name), stream(context.stream()), context_(context), touched_(reads) {
  use_pool(context);
  number_ = begin_op(name, stream_number(stream));
  for (const DenseTensor* each : reads)
    if (each && each->initialized() && phi::is_cpu_place(each->place())) refuse(name, "reads host memory, which no device function can");
  if (switches.trap && strcmp(name, "broadcast"))
    for (const DenseTensor* each : reads) look(*this, number_, each, "reads poison in");
}

Op::Op(const phi::CustomContext& context, const char* name, std::initializer_list<const DenseTensor*> reads)
    : Op(context, name, std::vector<const DenseTensor*>(reads)) {}

Op::~Op() {
  end_op();
  for (const DenseTensor* each : touched_) {
    auto* block = each ? dynamic_cast<Block*>(each->Holder().get()) : nullptr;
    if (block) {
      block->touched_by(stream);
      trap_touched(block->ptr(), stream, name, number_);
    }
    if (capturing() && each && each->Holder() && !(block && block->of_open_graph())) capture_uses(each->data());
    if (switches.trap) look(*this, number_, each, "is done, and poison are");
  }
}

void* Op::out(DenseTensor* tensor, DataType type) {
  void* address = context_.Alloc(tensor, type);
  touched_.push_back(tensor);
  return address;
}

void* Op::scratch(size_t size) {
  scratch_.push_back(Pool::of(context_.GetPlace().GetDeviceId(), stream)->take_block(size, true));
  return scratch_.back()->ptr();
}

}  // namespace tb
