// torch.autocast on the device: torch's own lists of operators, as CUDA has them.
//
// torch's wrappers (autocast_mode.h: KERNEL) are a template for each operator, and slow
// to compile. These here are boxed: one function for each policy, whatever the
// operator. The casts, and the cache of casted weights, are torch's `cached_cast`.
#include "runtime.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace sim {

namespace {

using at::Tensor;
using at::autocast::cached_cast;
using torch::jit::Stack;

const c10::DispatchKeySet kAutocast(c10::DispatchKey::AutocastPrivateUse1);

at::ScalarType lower() { return at::autocast::get_autocast_dtype(kSim); }

struct Range {  // the arguments of an operator
  Stack::iterator first, last;
  Stack::iterator begin() const { return first; }
  Stack::iterator end() const { return last; }
};

Range arguments(const c10::OperatorHandle& op, Stack* stack) {
  return {stack->end() - int64_t(op.schema().arguments().size()), stack->end()};
}

void cast(c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) {
    value = cached_cast(dtype, value.toTensor(), kSim);
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList())
      list.push_back(cached_cast(dtype, each, kSim));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> each : value.toOptionalTensorList())
      list.push_back(cached_cast(dtype, each, kSim));
    value = std::move(list);
  }
}

at::ScalarType widest(at::ScalarType dtype, const c10::IValue& value) {
  if (value.isTensor()) return at::autocast::prioritize(dtype, value.toTensor(), kSim);
  if (value.isTensorList())
    for (const Tensor& each : value.toTensorList())
      dtype = at::autocast::prioritize(dtype, each, kSim);
  return dtype;
}

void call_with(at::ScalarType dtype, const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  for (auto& value : arguments(op, stack)) cast(value, dtype);
  op.callBoxed(stack);
}

// CastPolicy::lower_precision_fp.
void in_lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  call_with(lower(), op, stack);
}

// CastPolicy::fp32.
void in_float32(const c10::OperatorHandle& op, Stack* stack) {
  call_with(at::kFloat, op, stack);
}

// CastPolicy::promote: in the widest type among the arguments.
void in_widest(const c10::OperatorHandle& op, Stack* stack) {
  at::ScalarType dtype = lower();
  for (const auto& value : arguments(op, stack)) dtype = widest(dtype, value);
  call_with(dtype, op, stack);
}

// CastPolicy::fp32_set_opt_dtype: the operator casts, unless it was told a type.
void with_float32_result(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  auto values = arguments(op, stack);
  if (at::autocast::is_eligible(values.begin()->toTensor(), kSim)) {
    auto place = op.schema().argumentIndexWithName("dtype");
    TORCH_INTERNAL_ASSERT(place, op.operator_name(), " takes no dtype");
    auto& dtype = *(values.begin() + *place);
    if (dtype.isNone()) dtype = at::kFloat;
  }
  op.callBoxed(stack);
}

// CastPolicy::fp32_append_dtype: calls the overload that takes a type.
void norm_in_float32(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  const Tensor& self = arguments(op, stack).begin()->toTensor();
  auto dtype = at::autocast::is_eligible(self, kSim) ? at::kFloat : self.scalar_type();
  bool has_dim = op.schema().overload_name() == "ScalarOpt_dim";
  const char* overload = has_dim ? "ScalarOpt_dim_dtype" : "ScalarOpt_dtype";
  stack->emplace_back(dtype);
  auto& dispatcher = c10::Dispatcher::singleton();
  dispatcher.findSchemaOrThrow("aten::norm", overload).callBoxed(stack);
}

Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&,
                                   const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy and BCELoss are unsafe to autocast, as on "
              "CUDA: use binary_cross_entropy_with_logits or BCEWithLogitsLoss.");
}

template <void (*F)(const c10::OperatorHandle&, Stack*)>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<F>();
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// An entry of torch's lists: an operator, or an operator and its overload.
#define SIM_NAME1(op) "aten::" #op
#define SIM_NAME2(op, overload) "aten::" #op "." #overload
#define SIM_PICK(_1, _2, name, ...) name
#define SIM_NAME(...) SIM_PICK(__VA_ARGS__, SIM_NAME2, SIM_NAME1)(__VA_ARGS__)
#define SIM_LOWER(...) m.impl(SIM_NAME(__VA_ARGS__), boxed<&in_lower_precision>());
#define SIM_FLOAT32(...) m.impl(SIM_NAME(__VA_ARGS__), boxed<&in_float32>());
#define SIM_RESULT(...) m.impl(SIM_NAME(__VA_ARGS__), boxed<&with_float32_result>());
#define SIM_WIDEST(...) m.impl(SIM_NAME(__VA_ARGS__), boxed<&in_widest>());

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_RESULT)
  AT_FORALL_PROMOTE(SIM_WIDEST)
  m.impl("norm.Scalar", boxed<&norm_in_float32>());
  m.impl("norm.ScalarOpt_dim", boxed<&norm_in_float32>());
  m.impl("binary_cross_entropy", refuse_binary_cross_entropy);
}

}  // namespace

}  // namespace sim
