// Half-precision kernels for Paddle's CPU wheel, which has few of its own.
//
// A wrapped kernel widens its bfloat16 or float16 inputs to float32, runs Paddle's own float32 CPU kernel, and rounds
// the outputs once, to nearest, ties to even. What is not half precision goes through untouched. A refused kernel only
// lets a program build: it raises when run. Both are registered in Paddle's kernel factory; Python decides for which ops.

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "paddle/phi/core/kernel_registry.h"

namespace {

using phi::DataType;
using phi::DenseTensor;
using phi::Kernel;
using phi::KernelContext;
using phi::KernelFactory;
using phi::KernelKey;
using phi::TensorBase;

bool IsHalf(DataType dtype) { return dtype == DataType::BFLOAT16 || dtype == DataType::FLOAT16; }

// -- one element -----------------------------------------------------------------------------------------------------

template <typename To, typename From>
To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Bfloat16 {
  static float Widen(uint16_t half) { return Bits<float>(static_cast<uint32_t>(half) << 16); }

  static uint16_t Round(float value) {
    const uint32_t bits = Bits<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40U;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : rounded);
  }
};

// F. Giesen's conversions: the subnormal half numbers are made by the float adder, which rounds to nearest even itself.
struct Float16 {
  static float Widen(uint16_t half) {
    const uint32_t magnitude = (half & 0x7FFFU) << 13, exponent = magnitude & 0x0F800000U;
    float value = Bits<float>(magnitude + ((127U - 15U) << 23));
    if (exponent == 0x0F800000U) {  // infinite or NaN
      value = Bits<float>(magnitude + ((127U - 15U) << 23) + ((128U - 16U) << 23));
    } else if (exponent == 0) {  // zero or subnormal
      value = Bits<float>(magnitude + ((127U - 14U) << 23)) - Bits<float>((127U - 14U) << 23);
    }
    return Bits<float>(Bits<uint32_t>(value) | static_cast<uint32_t>(half & 0x8000U) << 16);
  }

  static uint16_t Round(float value) {
    constexpr uint32_t kInfinity = 255U << 23, kTooLarge = (127U + 16U) << 23, kSmallestNormal = (127U - 14U) << 23;
    constexpr uint32_t kSubnormalUnit = ((127U - 15U) + (23U - 10U) + 1U) << 23;
    const uint32_t bits = Bits<uint32_t>(value), sign = bits & 0x80000000U, magnitude = bits ^ sign;
    uint32_t half;
    if (magnitude >= kTooLarge) {
      half = magnitude > kInfinity ? 0x7E00U : 0x7C00U;
    } else if (magnitude < kSmallestNormal) {
      half = Bits<uint32_t>(Bits<float>(magnitude) + Bits<float>(kSubnormalUnit)) - kSubnormalUnit;
    } else {
      half = (magnitude + ((15U - 127U) << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
    }
    return static_cast<uint16_t>(half | sign >> 16);
  }
};

template <typename Format>
void WidenAll(const uint16_t* from, float* to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = Format::Widen(from[i]);
}

template <typename Format>
void RoundAll(const float* from, uint16_t* to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = Format::Round(from[i]);
}

// -- one tensor ------------------------------------------------------------------------------------------------------

// Give `wide` the shape of `half`, and float32.
void TakeShape(const DenseTensor& half, DenseTensor* wide) {
  const phi::DenseTensorMeta meta(DataType::FLOAT32, half.dims(), half.layout(), half.lod());
  wide->set_meta(meta);
}

// A float32 copy of a half-precision tensor; of one without data (an operand whose shape alone is read) only the shape.
void Widen(const phi::DeviceContext& device, const DenseTensor& half, DenseTensor* wide, const std::string& op) {
  TakeShape(half, wide);
  const std::shared_ptr<phi::Allocation> holder = half.Holder();  // an executor may drop the tensor's own meanwhile
  if (holder == nullptr || holder->ptr() == nullptr) return;
  PADDLE_ENFORCE_EQ(half.meta().is_contiguous(),
                    true,
                    common::errors::Unimplemented("op '%s': a strided half-precision input has no CPU kernel; make it "
                                                  "contiguous first (Tensor.contiguous())",
                                                  op));
  auto* to = static_cast<float*>(device.Alloc(wide, DataType::FLOAT32));
  const auto* from = reinterpret_cast<const uint16_t*>(static_cast<const char*>(holder->ptr()) + half.meta().offset);
  if (half.dtype() == DataType::BFLOAT16) {
    WidenAll<Bfloat16>(from, to, half.numel());
  } else {
    WidenAll<Float16>(from, to, half.numel());
  }
}

void Round(const phi::DeviceContext& device, const DenseTensor& wide, DataType dtype, DenseTensor* half) {
  half->Resize(wide.dims());
  if (!wide.initialized()) return;
  const auto* from = wide.data<float>();
  auto* to = static_cast<uint16_t*>(device.Alloc(half, dtype));
  if (dtype == DataType::BFLOAT16) {
    RoundAll<Bfloat16>(from, to, wide.numel());
  } else {
    RoundAll<Float16>(from, to, wide.numel());
  }
}

// -- one call --------------------------------------------------------------------------------------------------------

// Where an optimizer keeps the float32 master copy of a half-precision parameter, as positions among its arguments.
struct MasterSlots {
  size_t param_in, master_in, param_out, master_out;
};

const MasterSlots* MasterSlotsOf(const std::string& op) {
  static const std::unordered_map<std::string, MasterSlots> slots = {
      {"adam", {0, 8, 0, 6}}, {"adamw", {0, 8, 0, 6}}, {"momentum", {0, 4, 0, 2}}, {"sgd", {0, 3, 0, 1}}};
  const auto found = slots.find(op);
  return found == slots.end() ? nullptr : &found->second;
}

// One run of the float32 kernel in place of a half-precision one.
class Call {
 public:
  Call(const std::string& op, KernelContext* outer, const Kernel& kernel, DataType dtype)
      : op_(op), outer_(outer), kernel_(kernel), dtype_(dtype), device_(outer->GetDeviceContext<phi::DeviceContext>()) {}

  void Run() {
    KernelContext inner(const_cast<phi::DeviceContext*>(&device_));
    const auto* slots = MasterSlotsOf(op_);
    const bool has_master = slots != nullptr && HasInput(slots->master_in) && HasOutput(slots->master_out);
    if (has_master) UseMaster(*slots);
    for (size_t i = 0; i < kernel_.args_def().input_defs().size(); ++i) AddInputs(i, &inner);
    for (size_t i = 0; i < outer_->AttrsSize(); ++i) AddAttribute(outer_->AttrAt(i), &inner);
    for (size_t i = 0; i < kernel_.args_def().output_defs().size(); ++i) AddOutputs(i, &inner);
    kernel_(&inner);
    for (const auto& [half, wide] : results_) Round(device_, *wide, half->dtype(), half);
  }

 private:
  bool HasInput(size_t argument) {
    const auto* tensor = outer_->MutableInputAt(outer_->InputRangeAt(argument).first);
    return tensor != nullptr && tensor->initialized();
  }

  bool HasOutput(size_t argument) {
    return outer_->MutableOutputAt(static_cast<size_t>(outer_->OutputRangeAt(argument).first)) != nullptr;
  }

  // The float32 kernel updates the master copy in place of the parameter; the parameter is the rounded master copy.
  void UseMaster(const MasterSlots& slots) {
    const auto* param = outer_->MutableInputAt(outer_->InputRangeAt(slots.param_in).first);
    const auto* master = outer_->MutableInputAt(outer_->InputRangeAt(slots.master_in).first);
    const auto param_at = static_cast<size_t>(outer_->OutputRangeAt(slots.param_out).first);
    const auto master_at = static_cast<size_t>(outer_->OutputRangeAt(slots.master_out).first);
    auto* master_out = static_cast<DenseTensor*>(outer_->MutableOutputAt(master_at));
    auto* param_out = static_cast<DenseTensor*>(outer_->MutableOutputAt(param_at));
    inputs_[param] = master;
    outputs_[param_out] = master_out;
    results_.emplace_back(param_out, master_out);
  }

  void AddInputs(size_t argument, KernelContext* inner) {
    const auto range = outer_->InputRangeAt(argument);
    paddle::small_vector<const TensorBase*> tensors;
    for (int i = range.first; i < range.second; ++i) tensors.emplace_back(InnerInput(outer_->MutableInputAt(i)));
    inner->EmplaceBackInputs(tensors);
  }

  void AddOutputs(size_t argument, KernelContext* inner) {
    const auto range = outer_->OutputRangeAt(argument);
    paddle::small_vector<TensorBase*> tensors;
    for (int i = range.first; i < range.second; ++i) {
      tensors.emplace_back(InnerOutput(outer_->MutableOutputAt(static_cast<size_t>(i))));
    }
    inner->EmplaceBackOutputs(tensors);
  }

  // An element type to compute or to store in is an attribute too; inside it is float32.
  static void AddAttribute(const phi::Attribute& attribute, KernelContext* inner) {
    const auto* dtype = paddle::get_if<DataType>(&attribute);
    const bool half = dtype != nullptr && IsHalf(*dtype);
    inner->EmplaceBackAttr(half ? phi::Attribute(DataType::FLOAT32) : attribute);
  }

  const TensorBase* InnerInput(const TensorBase* tensor) {
    if (tensor == nullptr) return nullptr;
    const auto known = inputs_.find(tensor);
    if (known != inputs_.end()) return known->second;
    const auto* dense = Dense(tensor);
    if (!IsHalf(dense->dtype())) return inputs_[tensor] = tensor;
    auto* wide = &temporaries_.emplace_back();
    Widen(device_, *dense, wide, op_);
    wide_of_[dense] = wide;
    return inputs_[tensor] = wide;
  }

  // An output that is also an input stays one tensor inside, so that an update in place sees what was there.
  TensorBase* InnerOutput(TensorBase* tensor) {
    if (tensor == nullptr) return nullptr;
    const auto known = outputs_.find(tensor);
    if (known != outputs_.end()) return known->second;
    auto* dense = const_cast<DenseTensor*>(Dense(tensor));
    const DataType dtype = dense->dtype() == DataType::UNDEFINED ? dtype_ : dense->dtype();
    if (!IsHalf(dtype)) return outputs_[tensor] = tensor;
    auto* wide = InputInPlace(*dense);
    if (wide == nullptr) {
      wide = &temporaries_.emplace_back();
      TakeShape(*dense, wide);
    }
    dense->set_type(dtype);
    results_.emplace_back(dense, wide);
    return outputs_[tensor] = wide;
  }

  DenseTensor* InputInPlace(const DenseTensor& output) {
    for (const auto& [half, wide] : wide_of_) {
      if (half == &output) return wide;
      if (!half->initialized() || !output.initialized()) continue;
      if (half->data() == output.data() && half->dims() == output.dims()) return wide;
    }
    return nullptr;
  }

  const DenseTensor* Dense(const TensorBase* tensor) const {
    PADDLE_ENFORCE_EQ(DenseTensor::classof(tensor),
                      true,
                      common::errors::Unimplemented("op '%s': half precision on a CPU works on dense tensors only; use "
                                                    "float32 here, or run on GPUs",
                                                    op_));
    return static_cast<const DenseTensor*>(tensor);
  }

  const std::string& op_;
  KernelContext* outer_;
  const Kernel& kernel_;
  const DataType dtype_;
  const phi::DeviceContext& device_;
  std::deque<DenseTensor> temporaries_;  // a deque: addresses stay
  std::unordered_map<const TensorBase*, const TensorBase*> inputs_;
  std::unordered_map<TensorBase*, TensorBase*> outputs_;
  std::unordered_map<const DenseTensor*, DenseTensor*> wide_of_;
  std::vector<std::pair<DenseTensor*, const DenseTensor*>> results_;
};

// -- kernels called outside of programs ------------------------------------------------------------------------------

// Dynamic mode calls a kernel through a plain function pointer whose type only Paddle knows. Ours
// takes no arguments (the caller cleans them up) and raises; one function for each kernel, so that it knows its name.
constexpr size_t kMostKernels = 2048;
std::array<std::string, kMostKernels> dynamic_messages;
size_t num_dynamic = 0;

template <size_t kIndex>
void RaiseInDynamicMode() {
  PADDLE_THROW(common::errors::Unimplemented("%s", dynamic_messages[kIndex]));
}

template <size_t... kIndices>
constexpr std::array<void (*)(), sizeof...(kIndices)> MakeRaisers(std::index_sequence<kIndices...>) {
  return {&RaiseInDynamicMode<kIndices>...};
}

void* DynamicRaiser(const std::string& message) {
  static constexpr auto kRaisers = MakeRaisers(std::make_index_sequence<kMostKernels>());
  static std::unordered_map<std::string, void*> raisers;  // kernels of one message share a function
  const auto known = raisers.find(message);
  if (known != raisers.end()) return known->second;
  if (num_dynamic == kMostKernels) return nullptr;
  dynamic_messages[num_dynamic] = message;
  return raisers[message] = reinterpret_cast<void*>(kRaisers[num_dynamic++]);
}

// -- registering -----------------------------------------------------------------------------------------------------

constexpr size_t kMostOperands = 64;

KernelKey CpuKey(DataType dtype) { return KernelKey(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, dtype); }

const Kernel* FindKernel(const std::string& op, DataType dtype) {
  const auto& kernels = KernelFactory::Instance().kernels();
  const auto of_op = kernels.find(op);
  if (of_op == kernels.end()) return nullptr;
  const auto kernel = of_op->second.find(CpuKey(dtype));
  return kernel == of_op->second.end() ? nullptr : &kernel->second;
}

void Register(const std::string& op, DataType dtype, Kernel kernel, const phi::KernelArgsDef& args) {
  *kernel.mutable_args_def() = args;
  for (auto& input : kernel.mutable_args_def()->input_defs()) {
    if (input.dtype == DataType::FLOAT32) input.SetDataType(dtype);
  }
  for (auto& output : kernel.mutable_args_def()->output_defs()) {
    if (output.dtype == DataType::FLOAT32) output.SetDataType(dtype);
  }
  KernelFactory::Instance().kernels()[op][CpuKey(dtype)] = kernel;
}

// Operands of a kernel that nothing is known of. Paddle reads what is defined of each operand without asking how many there are.
phi::KernelArgsDef UnknownArgs(DataType dtype) {
  phi::KernelArgsDef args;
  for (size_t i = 0; i < kMostOperands; ++i) {
    args.AppendInput(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, dtype, std::type_index(typeid(const DenseTensor&)));
  }
  return args;
}

}  // namespace

extern "C" {

// Whether `op` has a CPU kernel for an element type (a number of phi::DataType).
int interlace_has(const char* op, int dtype) { return FindKernel(op, static_cast<DataType>(dtype)) != nullptr; }

// Give `op` a CPU kernel for a half-precision type that computes in float32. Paddle's own kernel stays, unless
// `replace`; in dynamic mode it stays always. Returns 1 where done, 0 where there was one, -1 without a float32 kernel,
// -2 where there is no room left.
int interlace_wrap(const char* op, int dtype, int replace, const char* dynamic_message) {
  const auto half = static_cast<DataType>(dtype);
  const auto* own = FindKernel(op, half);
  if (own != nullptr && !replace) return 0;
  const auto* wide = FindKernel(op, DataType::FLOAT32);
  if (wide == nullptr || !wide->IsValid() || wide->GetKernelRegisteredType() != phi::KernelRegisteredType::FUNCTION) return -1;
  void* dynamic = own != nullptr ? own->GetVariadicKernelFn<void*>() : DynamicRaiser(dynamic_message);
  if (dynamic == nullptr) return -2;
  const std::string name(op);
  const Kernel inner = *wide;
  const Kernel in_place = own != nullptr ? *own : Kernel();
  const auto run = [name, inner, in_place, half](KernelContext* context) {
    if (name == "cast" && context->MutableInputAt(0) == context->MutableOutputAt(static_cast<size_t>(0))) {
      in_place(context);  // what lies in the tensor is no longer what its element type says
    } else {
      Call(name, context, inner, half).Run();
    }
  };
  Register(name, half, Kernel(run, dynamic), inner.args_def());
  return 1;
}

// Give `op`, which never looks at an element, its float32 CPU kernel for another type. Returns as interlace_wrap.
int interlace_reuse(const char* op, int dtype) {
  const auto half = static_cast<DataType>(dtype);
  if (FindKernel(op, half) != nullptr) return 0;
  const auto* wide = FindKernel(op, DataType::FLOAT32);
  if (wide == nullptr) return -1;
  const Kernel same = *wide;
  Register(op, half, same, same.args_def());
  return 1;
}

// Give `op` a CPU kernel that raises `message` when run, so that programs with it build. Returns as interlace_wrap.
int interlace_refuse(const char* op, int dtype, const char* message) {
  const auto half = static_cast<DataType>(dtype);
  if (FindKernel(op, half) != nullptr) return 0;
  void* dynamic = DynamicRaiser(message);
  if (dynamic == nullptr) return -2;
  const std::string text(message);
  const auto run = [text](KernelContext*) { PADDLE_THROW(common::errors::Unimplemented("%s", text)); };
  const auto* wide = FindKernel(op, DataType::FLOAT32);
  Register(op, half, Kernel(run, dynamic), wide != nullptr ? wide->args_def() : UnknownArgs(half));
  return 1;
}

}  // extern "C"
