// Every operator of the device: the CPU's kernel, run on aliases.
//
// Device memory is host memory, so that nothing is copied. Each tensor of the device is
// given to the kernel as a CPU tensor over the same bytes. What the kernel allocates
// comes from the device's allocator (see KernelScope), and a result is taken over with
// its memory.
#include "hollow.h"
#include "host_waits.h"
#include "memory.h"
#include "random.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace sim {

namespace {

using at::Tensor;

const c10::DispatchKeySet kOnCpu(c10::DispatchKey::CPU);
const c10::DispatchKeySet kOnSim(c10::DispatchKey::PrivateUse1);

bool is_sim(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

c10::DataPtr& data_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

bool same_place(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

void copy_place(const Tensor& to, const Tensor& from) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(),
                                                  from.storage_offset());
}

// A tensor of the same place and kind over another storage.
Tensor twin(const Tensor& of, const c10::Storage& storage, c10::DispatchKeySet keys) {
  auto made =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, of.dtype());
  copy_place(made, of);
  if (of.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (of.is_conj()) made._set_conj(true);
  if (of.is_neg()) made._set_neg(true);
  return made;
}

// The tensors of one call, on the device and as the CPU's kernel sees them.
class Call {
 public:
  Tensor to_cpu(const Tensor& tensor) {
    if (!is_sim(tensor)) return tensor;
    auto known = aliases_.find(tensor.unsafeGetTensorImpl());
    if (known != aliases_.end()) return known->second;
    auto alias = twin(tensor, alias_of(tensor.storage()), kOnCpu);
    aliases_[tensor.unsafeGetTensorImpl()] = alias;
    originals_[alias.unsafeGetTensorImpl()] = tensor;
    return alias;
  }

  Tensor to_sim(const Tensor& tensor) {
    bool ours = tensor.defined() && tensor.is_cpu() && tensor.layout() == c10::kStrided;
    if (!ours) return tensor;
    auto known = originals_.find(tensor.unsafeGetTensorImpl());
    if (known != originals_.end()) return known->second;
    auto& storage = on_sim_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) storage = take_over(tensor.storage());
    return twin(tensor, storage, kOnSim);
  }

  // Give the device's tensors the place and the memory that the kernel gave their
  // aliases.
  void settle() {
    for (auto& [of, alias] : on_cpu_)
      take_resized(on_sim_[alias.unsafeGetStorageImpl()], alias);
    for (auto& [of, alias] : aliases_) {
      auto& original = originals_[alias.unsafeGetTensorImpl()];
      if (!same_place(original, alias)) copy_place(original, alias);
    }
  }

 private:
  const c10::Storage& alias_of(const c10::Storage& storage) {
    auto& alias = on_cpu_[storage.unsafeGetStorageImpl()];
    if (!alias) {
      c10::DataPtr same(data_of(storage).get(), c10::Device(c10::kCPU));
      alias = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                           std::move(same), c10::GetCPUAllocator(), true);
      on_sim_[alias.unsafeGetStorageImpl()] = storage;
    }
    return alias;
  }

  static void take_resized(c10::Storage& storage, const c10::Storage& alias) {
    auto& data = data_of(alias);
    bool moved = data.get() != data_of(storage).get();
    if (!moved || AddressSpace::instance().device_of(data.get()) < 0) return;
    c10::DataPtr taken = std::move(data);
    taken.unsafe_set_device(storage.device());
    storage.set_data_ptr_noswap(std::move(taken));
    storage.set_nbytes(alias.nbytes());
  }

  // A new storage of the current device with the memory of one that a kernel made.
  static c10::Storage take_over(const c10::Storage& made) {
    auto& data = data_of(made);
    const size_t n_bytes = made.nbytes();
    c10::DataPtr taken(nullptr, device_at(current_device));
    if (AddressSpace::instance().device_of(data.get()) >= 0) {
      taken = std::move(data);
      taken.unsafe_set_device(device_at(current_device));
    } else if (n_bytes > 0 && data.get()) {  // of the host: made in another thread
      taken = device_allocator().allocate(n_bytes);
      std::memcpy(taken.get(), data.get(), n_bytes);
    }
    return c10::Storage(c10::Storage::use_byte_size_t(), n_bytes, std::move(taken),
                        &device_allocator(), true);
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> on_cpu_;  // by the device's
  std::unordered_map<c10::StorageImpl*, c10::Storage> on_sim_;  // by the CPU's
  std::unordered_map<c10::TensorImpl*, Tensor> aliases_;        // by the device's
  std::unordered_map<c10::TensorImpl*, Tensor> originals_;      // by the CPU's
};

// Replaces what an operator is given by what the CPU's kernel takes, and notes on which
// device it runs, and from which generator it draws.
class Arguments {
 public:
  explicit Arguments(Call& call) : call_(call) {}

  void replace(c10::IValue& value) {
    if (value.isTensor()) {
      value = tensor(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorList()) list.push_back(tensor(each));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> each : value.toOptionalTensorList())
        list.push_back(each ? std::optional<Tensor>(tensor(*each)) : std::nullopt);
      value = std::move(list);
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      note(value.toDevice().index());
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      at::Generator given = value.toGenerator();
      TORCH_CHECK(given.device().type() == kSim, "Expected a 'sim' device type for "
                  "generator but found '", given.device(), "'");
      generator_ = given;
      value = c10::IValue();  // it draws from the CPU's default one: see DrawScope
    }
  }

  int device() const { return device_ < 0 ? current_device : device_; }

  // The engine to draw from, where the operator draws.
  std::optional<at::mt19937> engine(const c10::OperatorHandle& op) const {
    if (generator_) return engine_of(*generator_);
    for (auto tag : op.getTags())
      if (tag == at::Tag::nondeterministic_seeded)
        return engine_of(default_generator(device()));
    return std::nullopt;
  }

 private:
  Tensor tensor(const Tensor& given) {
    if (is_sim(given)) note(given.device().index());
    return call_.to_cpu(given);
  }
  void note(int device) {
    if (device_ < 0) device_ = device;
  }
  static at::mt19937 engine_of(const at::Generator& generator) {
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next_engine();
  }

  Call& call_;
  int device_ = -1;
  std::optional<at::Generator> generator_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                const std::optional<at::mt19937>& engine) {
  KernelScope allocates_on_device;
  std::optional<DrawScope> draws;
  if (engine) draws.emplace(*engine);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_casts(c10::DispatchKey::AutocastCPU);
  op.redispatchBoxed(kOnCpu, stack);
}

void replace_result(c10::IValue& value, Call& call) {
  if (value.isTensor()) {
    value = call.to_sim(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList()) list.push_back(call.to_sim(each));
    value = std::move(list);
  }
}

// Any operator that has no kernel of the device's own.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  count_waits(op, *stack, begin);
  if (is_hollow && run_hollow(op, stack)) return;
  Call call;
  Arguments arguments(call);
  for (size_t i = begin; i < stack->size(); i++) arguments.replace((*stack)[i]);
  DeviceScope scope(arguments.device());
  run_on_cpu(op, stack, arguments.engine(op));
  call.settle();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    replace_result((*stack)[i], call);
}

// Of lists of tensors: torch's loop over each of them.
void run_list(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  is_in_list = true;
  try {
    op.redispatchBoxed(kOnCpu, stack);
  } catch (...) {
    is_in_list = false;
    throw;
  }
  is_in_list = false;
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// torch asks a device of one's own for these two where it has no kernel to choose.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run(find("aten::convolution"), stack);
}

// The general form takes the sizes of the bias besides, after the weight.
void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto first = stack->end() - int64_t(op.schema().arguments().size());
  const int64_t channels = first->toTensor().size(1);
  const bool wants_bias = stack->back().toBoolList().get(2);
  c10::IValue sizes;
  if (wants_bias) sizes = c10::List<int64_t>({channels});
  stack->insert(first + 3, std::move(sizes));
  run(find("aten::convolution_backward"), stack);
}

int index_of(const std::optional<c10::Device>& device) {
  return device && device->index() >= 0 ? device->index() : current_device;
}

// Where nothing is computed, the bits of a little memory are no accident: zeros.
Tensor known(Tensor made) {
  constexpr size_t kLittle = 256 << 10;
  const auto& storage = made.storage();
  if (is_hollow && storage.nbytes() && storage.nbytes() <= kLittle)
    std::memset(data_of(storage).get(), 0, storage.nbytes());
  return made;
}

// Sums of bits compare a tensor with an earlier one. Integers are added up where they are
// few, so the bits of numbers that were not computed must be the same: zeros.
Tensor view_dtype(const Tensor& self, c10::ScalarType dtype) {
  constexpr int64_t kComputed = 256, kFewIntegers = 4 << 20;
  const int64_t n_bytes = int64_t(self.nbytes());
  if (is_hollow && at::isIntegralType(dtype, true) && n_bytes > kComputed &&
      !at::isIntegralType(self.scalar_type(), true) && n_bytes <= kFewIntegers &&
      self.is_contiguous())
    std::memset(static_cast<char*>(data_of(self.storage()).get()) +
                    self.storage_offset() * int64_t(self.element_size()),
                0, size_t(n_bytes));
  return at::native::view_dtype(self, dtype);
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                  std::optional<int64_t> offset) {
  if (is_hollow) issue_view();
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef sizes) {
  if (is_hollow) issue_view();
  return at::native::view(self, sizes);
}

Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout>, std::optional<c10::Device> device,
             std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  DeviceScope scope(index_of(device));
  return known(at::detail::empty_generic(sizes, &device_allocator(), kOnSim,
                                         c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  DeviceScope scope(index_of(device));
  return known(at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                                 kOnSim, c10::dtype_or_default(dtype)));
}

// Copies between devices, and between a device and the host.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  count_wait_of_copy(from, to, non_blocking);
  if (is_hollow && copy_hollow(from, to)) return to;
  Call call;
  Tensor source = call.to_cpu(from);
  Tensor target = call.to_cpu(to);
  DeviceScope scope((is_sim(to) ? to : from).device().index());
  KernelScope allocates_on_device;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  target.copy_(source, non_blocking);
  return to;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset,
                    at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, sizes, strides);
}

// Whether a tensor can take another's place: `parameter.data = moved`, which is how
// Module.to() keeps tied weights tied. torch knows it of the devices it has itself.
bool can_take_place(const Tensor& self, const Tensor& from) {
  return self.layout() == c10::kStrided && from.layout() == c10::kStrided;
}

c10::Scalar item(const Tensor& tensor) {
  wait();
  Call call;
  return call.to_cpu(tensor).item();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("view.dtype", view_dtype);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_has_compatible_shallow_copy_type", can_take_place);
  m.impl("_local_scalar_dense", item);
}

// A copy conjugates and negates itself; resolving its source first would be a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// Whether torch would compose an operator of others that the CPU has a kernel for.
bool is_composed(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  auto has = [&](DispatchKey key) { return op.hasKernelForDispatchKey(key); };
  bool composed = has(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                  has(DispatchKey::CompositeExplicitAutograd) ||
                  has(DispatchKey::CompositeImplicitAutograd);
  return composed && has(DispatchKey::CPU) && !has(DispatchKey::PrivateUse1);
}

}  // namespace

void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten",
                                c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    auto op = dispatcher.findOp(name);
    if (op && name.name.find("aten::_foreach_") == 0)
      library.impl(c10::toString(name).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&run_list>());
    else if (op && is_composed(*op))
      library.impl(c10::toString(name).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

}  // namespace sim
