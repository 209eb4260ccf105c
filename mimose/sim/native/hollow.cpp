// Running operators for their shapes alone, and telling what they would take.
//
// An operator is run once with tensors on torch's meta device for each signature (types,
// sizes, strides and numbers); what came out is kept, and from then on results are made
// from that. Operators that edit what they are given and do not change its place cost
// their time and nothing else.
#include "hollow.h"

#include "memory.h"
#include "random.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace sim {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

const c10::DispatchKeySet kOnMeta(c10::DispatchKey::Meta);
const c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);
constexpr size_t kMostPlans = 200'000;
constexpr int64_t kSmallBytes = int64_t(8) << 20;  // what is computed for want of a meta kernel

std::atomic<int64_t> n_forgotten{0};

bool on_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }

// ---------------------------------------------------------------- what it takes

enum class Kind {
  kPlain,     // moves its arguments and its results
  kFree,      // starts no kernel
  kMm,        // mm, addmm, bmm, baddbmm: the last two matrices among its arguments
  kConv,
  kConvBackward,
  kFlash,
  kFlashBackward,
  kEfficient,
  kEfficientBackward,
  kGather,    // reads as much of its first argument as it writes
  kFill,      // only writes
};

Kind kind_of(const std::string& name) {
  static const std::unordered_map<std::string, Kind> known{
      {"aten::mm", Kind::kMm},
      {"aten::addmm", Kind::kMm},
      {"aten::bmm", Kind::kMm},
      {"aten::baddbmm", Kind::kMm},
      {"aten::_addmm_activation", Kind::kMm},
      {"aten::convolution", Kind::kConv},
      {"aten::convolution_backward", Kind::kConvBackward},
      {"aten::_scaled_dot_product_flash_attention", Kind::kFlash},
      {"aten::_scaled_dot_product_flash_attention_backward", Kind::kFlashBackward},
      {"aten::_scaled_dot_product_efficient_attention", Kind::kEfficient},
      {"aten::_scaled_dot_product_efficient_attention_backward",
       Kind::kEfficientBackward},
      {"aten::embedding", Kind::kGather},
      {"aten::index", Kind::kGather},
      {"aten::index_select", Kind::kGather},
      {"aten::gather", Kind::kGather},
      {"aten::fill_", Kind::kFill},
      {"aten::zero_", Kind::kFill},
      {"aten::normal_", Kind::kFill},
      {"aten::uniform_", Kind::kFill},
      {"aten::resize_", Kind::kFree},
      {"aten::detach", Kind::kFree},
      {"aten::alias", Kind::kFree},
  };
  auto found = known.find(name);
  return found == known.end() ? Kind::kPlain : found->second;
}

double bytes_of(const Tensor& t) {
  double n = double(t.element_size());
  auto sizes = t.sizes();
  auto strides = t.strides();
  for (size_t i = 0; i < sizes.size(); i++)
    if (strides[i] != 0 || sizes[i] == 0) n *= double(sizes[i]);
  return n;
}

double round_up(double n, double unit) { return std::ceil(n / unit) * unit; }

struct Work {
  double flops = 0;
  double bytes = 0;
  bool is_half = false;
  bool is_free = false;
  bool is_product = false;
  bool is_attention = false;  // in half precision, which cuDNN does
  Kind kind = Kind::kPlain;
  size_t workspace = 0;  // allocated while it runs
};

template <class F>
void each_tensor(const IValue& value, F visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorList())
      if (t.defined()) visit(t);
  } else if (value.isOptionalTensorList()) {
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      if (t && t->defined()) visit(*t);
  }
}

bool half(const Tensor& t) {
  return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
}

// 4 L S d for each head, half of it where it is causal.
double attention_flops(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  double n = double(q.size(0)) * double(q.size(1));
  double length = double(q.size(2)), keys = double(k.size(2));
  double flops = 2 * n * length * keys * double(q.size(3) + v.size(3));
  return causal ? flops / 2 : flops;
}

double conv_flops(const Tensor& input, const Tensor& weight, const Tensor& output,
                  bool transposed) {
  const auto& places = transposed ? input : output;
  double n = double(places.size(0));
  for (int64_t i = 2; i < places.dim(); i++) n *= double(places.size(i));
  return 2 * n * double(weight.numel());
}

Work work_of(const c10::OperatorHandle& op, Kind kind, const IValue* arguments,
             const IValue* results) {
  const auto& schema = op.schema();
  Work work;
  if (kind == Kind::kFree) {
    work.is_free = true;
    return work;
  }
  double n_results = 0;
  for (size_t i = 0; i < schema.returns().size(); i++)
    each_tensor(results[i], [&](const Tensor& t) { n_results += bytes_of(t); });
  if (kind == Kind::kGather) {
    work.bytes = 2 * n_results;
    return work;
  }
  if (kind == Kind::kFill) {
    work.bytes = n_results;
    return work;
  }
  work.bytes = n_results;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias && alias->isWrite() && schema.returns().empty();
    each_tensor(arguments[i],
                [&](const Tensor& t) { work.bytes += bytes_of(t) * (writes ? 2 : 1); });
  }
  auto t = [&](size_t i) -> const Tensor& { return arguments[i].toTensor(); };
  switch (kind) {
    case Kind::kMm: {
      std::vector<Tensor> matrices;
      for (size_t i = 0; i < schema.arguments().size(); i++)
        if (arguments[i].isTensor() && schema.arguments()[i].name() != "out")
          matrices.push_back(t(i));
      const Tensor& a = matrices[matrices.size() - 2];
      const Tensor& b = matrices[matrices.size() - 1];
      work.flops = 2 * double(a.numel()) * double(b.size(-1));
      work.is_half = half(a);
      work.is_product = true;
      break;
    }
    case Kind::kConv:
      work.flops = conv_flops(t(0), t(1), results[0].toTensor(), arguments[6].toBool());
      work.is_half = half(t(0));
      break;
    case Kind::kConvBackward: {
      double once = conv_flops(t(1), t(2), t(0), arguments[7].toBool());
      auto mask = arguments[10].toBoolList();
      work.flops = once * (mask.get(0) + mask.get(1));
      work.is_half = half(t(1));
      break;
    }
    case Kind::kFlash:
      work.flops = attention_flops(t(0), t(1), t(2), arguments[4].toBool());
      work.is_half = half(t(0));
      break;
    case Kind::kEfficient:
      work.flops = attention_flops(t(0), t(1), t(2), arguments[6].toBool());
      work.is_half = half(t(0));
      break;
    case Kind::kFlashBackward: {
      const Tensor& q = t(1);
      const Tensor& k = t(2);
      work.flops = 2.5 * attention_flops(q, k, t(3), arguments[11].toBool());
      work.is_half = half(q);
      // mha_bwd: dq_accum and softmax_d in float32; dk and dv of all heads where keys
      // have fewer.
      double rows = double(q.size(0) * q.size(1)) * round_up(double(q.size(2)), 128);
      double n = 4 * rows * (round_up(double(q.size(3)), 32) + 1);
      if (k.size(1) != q.size(1))
        n += 2.0 * double(q.size(0) * q.size(1) * k.size(2) * k.size(3)) * 2;
      work.workspace = size_t(n);
      break;
    }
    case Kind::kEfficientBackward: {
      const Tensor& q = t(1);
      work.flops = 2.5 * attention_flops(q, t(2), t(3), false);
      work.is_half = half(q);
      double rows = double(q.size(0) * q.size(1)) * round_up(double(q.size(2)), 32);
      double n = 4 * rows;  // delta
      if (half(q)) n += 4 * rows * double(q.size(3));  // an accumulator of dq
      work.workspace = size_t(n);
      break;
    }
    default:
      break;
  }
  work.kind = kind;
  work.is_attention = work.is_half && kind >= Kind::kFlash && kind <= Kind::kEfficientBackward;
  return work;
}

// cuBLAS' workspace: of the caching allocator, and held from the first product on.
c10::DataPtr& blas_workspace(int device) {
  static auto* all = new std::array<c10::DataPtr, kDevices>;
  return (*all)[device];
}

void hold_blas_workspace() {
  auto& held = blas_workspace(current_device);
  if (card.blas_workspace > 0 && !held)
    held = device_allocator().allocate(size_t(card.blas_workspace));
}

void issue(double seconds, double flops) {
  auto& clock = clocks[current_device];
  clock.kernels += int64_t(seconds * 1e9);
  clock.n_kernels += 1;
  clock.n_listed += is_in_list;
  clock.flops += int64_t(flops / 1e6);
  double price = is_in_list ? host.listed : host.operator_seconds;
  timelines[current_device].issue(price, seconds);
}

// cuDNN builds a plan of attention for each signature, and each thread builds its own.
// It computes no gradient of a bias.
void plan_attention(const Work& work, const std::string& signature,
                    const IValue* arguments) {
  if (!work.is_attention || card.attention_plan <= 0) return;
  if (work.kind == Kind::kEfficient && arguments[3].isTensor() &&
      arguments[3].toTensor().requires_grad())
    return;
  if (work.kind == Kind::kEfficientBackward && arguments[10].toBoolList().get(3)) return;
  thread_local std::unordered_set<std::string> known;
  thread_local int64_t of_run = -1;
  if (of_run != n_forgotten) known.clear();
  of_run = n_forgotten;
  if (!known.insert(signature + char(at::GradMode::is_enabled())).second) return;
  clocks[current_device].n_attention_plans += 1;
  timelines[current_device].pass_on_host(card.attention_plan);
}

void pass(const Work& work) {
  if (work.is_free) return issue_view();
  if (work.is_product) hold_blas_workspace();
  if (work.workspace) {
    c10::DataPtr workspace = device_allocator().allocate(work.workspace);
  }
  bool is_conv = work.kind == Kind::kConv || work.kind == Kind::kConvBackward;
  double single = is_conv ? card.conv_flops : card.single_flops;
  double rate = work.is_half ? card.half_flops : single;
  issue(card.launch + std::max(work.flops / rate, work.bytes / card.memory_bytes),
        work.flops);
}

constexpr double kFewIntegers = double(4 << 20);  // bytes: a mask of 170,000 tokens

bool is_part_of_many(const Tensor& t) {
  return on_sim(t) && t.has_storage() && double(t.storage().nbytes()) > kFewIntegers;
}

// ---------------------------------------------------------------- signatures

class Signature {
 public:
  // False: it cannot be written down.
  bool write(const c10::OperatorHandle& op, const IValue* arguments, size_t n) {
    key.clear();
    number(int64_t(reinterpret_cast<intptr_t>(&op.schema())));
    for (size_t i = 0; i < n; i++)
      if (!value(arguments[i])) return false;
    return true;
  }
  std::string key;

 private:
  void number(int64_t n) { key.append(reinterpret_cast<const char*>(&n), sizeof(n)); }
  void tag(char c) { key.push_back(c); }
  bool tensor(const Tensor& t) {
    if (!t.defined()) {
      tag('u');
      return true;
    }
    if (t.layout() != c10::kStrided || t.is_conj() || t.is_neg()) return false;
    tag(on_sim(t) ? 's' : 'c');
    tag(char(t.scalar_type()));
    tag(t.unsafeGetTensorImpl()->is_wrapped_number());
    tag(char(t.dim()));
    tag(is_part_of_many(t));
    for (auto n : t.sizes()) number(n);
    for (auto n : t.strides()) number(n);
    return true;
  }
  bool value(const IValue& v) {
    if (v.isNone()) {
      tag('n');
    } else if (v.isTensor()) {
      return tensor(v.toTensor());
    } else if (v.isInt()) {
      tag('i');
      number(v.toInt());
    } else if (v.isBool()) {
      tag(v.toBool() ? 't' : 'f');
    } else if (v.isDouble()) {
      tag('d');
      double d = v.toDouble();
      key.append(reinterpret_cast<const char*>(&d), sizeof(d));
    } else if (v.isTensorList()) {
      tag('L');
      auto list = v.toTensorList();
      number(int64_t(list.size()));
      for (const Tensor& t : list)
        if (!tensor(t)) return false;
    } else if (v.isOptionalTensorList()) {
      tag('O');
      auto list = v.toOptionalTensorList();
      number(int64_t(list.size()));
      for (size_t i = 0; i < list.size(); i++) {
        std::optional<Tensor> t = list.get(i);
        if (!t) tag('n');
        else if (!tensor(*t)) return false;
      }
    } else if (v.isIntList()) {
      tag('I');
      auto list = v.toIntList();
      number(int64_t(list.size()));
      for (int64_t n : list) number(n);
    } else if (v.isBoolList()) {
      tag('B');
      auto list = v.toBoolList();
      for (bool b : list) tag(b ? 't' : 'f');
    } else if (v.isDoubleList()) {
      tag('D');
      for (double d : v.toDoubleList())
        key.append(reinterpret_cast<const char*>(&d), sizeof(d));
    } else if (v.isString()) {
      tag('S');
      key += v.toStringRef();
    } else if (v.isDevice()) {
      tag('V');
      tag(char(v.toDevice().type()));
      number(v.toDevice().index());
    } else if (v.isGenerator()) {
      tag('G');
    } else if (v.isScalar()) {
      return false;
    } else {
      return false;
    }
    return true;
  }
};

struct Made {  // one tensor of a result
  enum { kUndefined, kFresh, kArgument } kind = kUndefined;
  int index = 0;  // of its storage among new ones; of the argument
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
};

struct Result {
  enum { kConstant, kTensor, kList } kind = kConstant;
  IValue constant;
  std::vector<Made> tensors;
};

struct Plan {
  std::vector<std::pair<size_t, int>> storages;  // bytes of the new ones; see fill_of
  std::vector<Result> results;
  Work work;
  bool has_values = false;  // see Note: [Values]
};

// Note: [Values]
// Programs read some values back: whether a mask has a zero, whether two sums of bits are
// equal. So integers and truth values are computed for real where they are few, and so
// are numbers of any kind where they are very few. Few results of what is not computed
// are zeros. So what is read of large tensors says that they are zeros and equal. A part
// of a large one is not computed either: nothing has written its memory.
constexpr double kFewOfAny = 256;
constexpr size_t kZeroed = 4096;
constexpr double kCopiedIn = double(16 << 20);
constexpr double kCopiedOut = double(64 << 10);

struct Amount {
  double n_bytes = 0;
  bool are_integers = true;
  void add(const Tensor& t) {
    n_bytes += double(t.numel()) * double(t.element_size());
    if (is_part_of_many(t)) n_bytes += kFewIntegers;
    are_integers = are_integers && c10::isIntegralType(t.scalar_type(), true);
  }
  bool is_few() const {
    return n_bytes <= kFewOfAny || (are_integers && n_bytes <= kFewIntegers);
  }
};

struct Plans {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const Plan>> known;
};
Plans& plans() {
  static auto* all = new Plans;
  return *all;
}

// What comparing zeros says, with each other or with a number that is none.
bool is_true(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> known{
      "aten::eq.Tensor", "aten::le.Tensor", "aten::ge.Tensor", "aten::ne.Scalar",
      "aten::isclose"};
  return known.count(c10::toString(op.operator_name())) > 0;
}

// The byte that the memory of a few results is filled with; -1: it is left alone.
int fill_of(size_t n_bytes, caffe2::TypeMeta dtype, bool truth) {
  auto type = dtype.toScalarType();
  bool is_integer = c10::isIntegralType(type, true);
  if (n_bytes > kZeroed && !(is_integer && double(n_bytes) <= kFewIntegers)) return -1;
  return truth && type == at::kBool;
}

c10::Storage new_storage(size_t n_bytes, int fill) {
  auto memory = device_allocator().allocate(n_bytes);
  if (!memory.get()) memory = c10::DataPtr(nullptr, device_at(current_device));
  if (n_bytes && fill >= 0) std::memset(memory.get(), fill, n_bytes);
  return c10::Storage(c10::Storage::use_byte_size_t(), n_bytes, std::move(memory),
                      &device_allocator(), true);
}

// ---------------------------------------------------------------- the meta device

class MetaCall {
 public:
  Tensor to_meta(const Tensor& t) {
    if (!on_sim(t)) return t;
    arguments.push_back(t);
    auto known = twins_.find(t.unsafeGetTensorImpl());
    if (known != twins_.end()) return known->second;
    auto& storage = meta_[t.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                             c10::DataPtr(nullptr, c10::Device(c10::kMeta)),
                             c10::GetAllocator(c10::kMeta), true);
      sim_[storage.unsafeGetStorageImpl()] = t.storage();
    }
    auto twin = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), kOnMeta,
                                                         t.dtype());
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(),
                                                      t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      twin.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (t.is_conj()) twin._set_conj(true);
    if (t.is_neg()) twin._set_neg(true);
    twins_[t.unsafeGetTensorImpl()] = twin;
    places_[twin.unsafeGetTensorImpl()] = int(arguments.size()) - 1;
    return twin;
  }

  // Tensors and storages that the operator has moved or resized.
  void settle() {
    for (auto& [meta, of] : sim_) {
      if (meta->nbytes() == of.nbytes()) continue;
      changed = true;
      auto* impl = of.unsafeGetStorageImpl();
      if (meta->nbytes() > of.nbytes()) {
        auto moved = device_allocator().allocate(meta->nbytes());
        impl->set_data_ptr_noswap(std::move(moved));
      }
      impl->set_nbytes(meta->nbytes());
    }
    for (auto& [twin, place] : places_) {
      auto* impl = arguments[place].unsafeGetTensorImpl();
      if (impl->sizes() == twin->sizes() && impl->strides() == twin->strides() &&
          impl->storage_offset() == twin->storage_offset())
        continue;
      changed = true;
      impl->set_sizes_and_strides(twin->sizes(), twin->strides(),
                                  twin->storage_offset());
    }
  }

  Tensor to_sim(const Tensor& t, Plan& plan, Result& result) {
    Made made;
    if (!t.defined()) {
      result.tensors.push_back(made);
      return t;
    }
    if (!t.is_meta()) {  // a number on the host
      changed = true;
      result.tensors.push_back(made);
      return t;
    }
    auto known = places_.find(t.unsafeGetTensorImpl());
    if (known != places_.end()) {
      made.kind = Made::kArgument;
      made.index = known->second;
      written.push_back(made.index);
      result.tensors.push_back(made);
      return arguments[known->second];
    }
    auto* storage = t.storage().unsafeGetStorageImpl();
    c10::Storage of;
    auto given = sim_.find(storage);
    if (given != sim_.end()) {
      changed = true;  // a view
      of = given->second;
    } else {
      made.kind = Made::kFresh;
      auto [place, is_new] = fresh_.emplace(storage, int(fresh_storages_.size()));
      if (is_new) {
        int fill = fill_of(storage->nbytes(), t.dtype(), truth);
        plan.storages.emplace_back(storage->nbytes(), fill);
        fresh_storages_.push_back(new_storage(storage->nbytes(), fill));
        keep_.push_back(t);
      }
      made.index = place->second;
      of = fresh_storages_[place->second];
    }
    made.sizes = t.sizes().vec();
    made.strides = t.strides().vec();
    made.offset = t.storage_offset();
    made.dtype = t.dtype();
    result.tensors.push_back(made);
    auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(of), kSimKeys, t.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(),
                                                     t.storage_offset());
    if (t.is_conj()) out._set_conj(true);
    if (t.is_neg()) out._set_neg(true);
    return out;
  }

  std::vector<Tensor> arguments;  // in the order in which they are met
  std::vector<int> written;       // of these
  bool changed = false;           // so that the next call is run anew
  bool truth = false;             // of results that are truth values

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> meta_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> sim_;
  std::unordered_map<c10::TensorImpl*, Tensor> twins_;
  std::unordered_map<c10::TensorImpl*, int> places_;
  std::unordered_map<c10::StorageImpl*, int> fresh_;
  std::vector<c10::Storage> fresh_storages_;
  std::vector<Tensor> keep_;
};

void to_meta(IValue& value, MetaCall& call) {
  if (value.isTensor()) {
    value = call.to_meta(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList()) list.push_back(call.to_meta(each));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> each : value.toOptionalTensorList())
      list.push_back(each ? std::optional<Tensor>(call.to_meta(*each)) : std::nullopt);
    value = std::move(list);
  } else if (value.isDevice() && value.toDevice().type() == kSim) {
    value = c10::Device(c10::kMeta);
  } else if (value.isGenerator()) {
    value = IValue();
  }
}

// The tensors that a hit may return, in the order of MetaCall::arguments.
Tensor argument(const IValue* arguments, size_t n, int index) {
  int at = 0;
  Tensor found;
  for (size_t i = 0; i < n && !found.defined(); i++)
    each_tensor(arguments[i], [&](const Tensor& t) {
      if (on_sim(t) && at++ == index) found = t;
    });
  return found;
}

int device_of(const IValue* arguments, size_t n) {
  int device = -1;
  for (size_t i = 0; i < n && device < 0; i++) {
    if (arguments[i].isDevice() && arguments[i].toDevice().type() == kSim)
      device = arguments[i].toDevice().index();
    each_tensor(arguments[i], [&](const Tensor& t) {
      if (device < 0 && on_sim(t)) device = t.device().index();
    });
  }
  return device < 0 ? current_device : device;
}

void draw(const c10::OperatorHandle& op, const IValue* arguments, size_t n) {
  for (auto tag : op.getTags()) {
    if (tag != at::Tag::nondeterministic_seeded) continue;
    const at::Generator* from = &default_generator(current_device);
    at::Generator given;
    for (size_t i = 0; i < n; i++)
      if (arguments[i].isGenerator()) {
        given = arguments[i].toGenerator();
        from = &given;
      }
    static_cast<Generator*>(from->unsafeGetGeneratorImpl())->skip();
    return;
  }
}

// Few integers that were not computed are zeros, also if they were written in place.
void clear(const Tensor& t) {
  if (!t.defined() || !on_sim(t) || is_part_of_many(t)) return;
  if (!c10::isIntegralType(t.scalar_type(), true)) return;
  if (t.storage().nbytes()) std::memset(t.storage().mutable_data(), 0, t.storage().nbytes());
}

void make_results(const Plan& plan, Stack* stack, size_t begin, size_t n) {
  std::vector<c10::Storage> storages;
  storages.reserve(plan.storages.size());
  for (auto [n_bytes, fill] : plan.storages)
    storages.push_back(new_storage(n_bytes, fill));
  const IValue* arguments = stack->data() + begin;
  auto tensor = [&](const Made& made) -> Tensor {
    if (made.kind == Made::kUndefined) return {};
    if (made.kind == Made::kArgument) {
      Tensor written = argument(arguments, n, made.index);
      if (!plan.work.is_free) clear(written);
      return written;
    }
    auto out = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storages[made.index]), kSimKeys, made.dtype);
    out.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes, made.strides,
                                                     made.offset);
    return out;
  };
  std::vector<IValue> results;
  results.reserve(plan.results.size());
  for (const Result& result : plan.results) {
    if (result.kind == Result::kConstant) {
      results.push_back(result.constant);
    } else if (result.kind == Result::kTensor) {
      results.emplace_back(tensor(result.tensors[0]));
    } else {
      c10::List<Tensor> list;
      for (const Made& made : result.tensors) list.push_back(tensor(made));
      results.emplace_back(std::move(list));
    }
  }
  stack->resize(begin);
  for (auto& result : results) stack->push_back(std::move(result));
}

bool has_meta_kernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  auto has = [&](DispatchKey key) { return op.hasKernelForDispatchKey(key); };
  return has(DispatchKey::Meta) || has(DispatchKey::CompositeExplicitAutograd) ||
         has(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         has(DispatchKey::CompositeImplicitAutograd);
}

bool is_small(const IValue* arguments, size_t n) {
  int64_t n_bytes = 0;
  for (size_t i = 0; i < n; i++)
    each_tensor(arguments[i],
                [&](const Tensor& t) { n_bytes += t.numel() * t.element_size(); });
  return n_bytes <= kSmallBytes;
}

Amount amount_of(const IValue* values, size_t n) {
  Amount amount;
  for (size_t i = 0; i < n; i++)
    each_tensor(values[i], [&](const Tensor& t) { amount.add(t); });
  return amount;
}

bool equal(Stack* stack) {
  if (amount_of(stack->data() + stack->size() - 2, 2).is_few()) return false;
  Tensor other = stack->back().toTensor();
  stack->pop_back();
  Tensor self = stack->back().toTensor();
  stack->pop_back();
  Work work;
  work.bytes = bytes_of(self) + bytes_of(other);
  pass(work);
  stack->push_back(self.sizes() == other.sizes());
  return true;
}

}  // namespace

void issue_view() {
  clocks[current_device].n_views += 1;
  timelines[current_device].pass_on_host(host.operator_seconds);
}

void wait() {
  waits++;
  auto& lines = timelines[current_device];
  if (is_hollow) lines.wait_for(lines.end_of(current_stream));
}

bool run_hollow(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  const size_t begin = stack->size() - n;
  DeviceScope scope(device_of(stack->data() + begin, n));
  const std::string& name = schema.name();
  if (name == "aten::equal") return equal(stack);
  if (name == "aten::set_") return false;
  thread_local Signature signature;
  const bool told = signature.write(op, stack->data() + begin, n);
  if (told) {
    std::shared_ptr<const Plan> plan;
    {
      std::lock_guard<std::mutex> lock(plans().mutex);
      auto found = plans().known.find(signature.key);
      if (found != plans().known.end()) plan = found->second;
    }
    if (plan) {
      plan_attention(plan->work, signature.key, stack->data() + begin);
      pass(plan->work);
      if (plan->has_values) return false;
      draw(op, stack->data() + begin, n);
      make_results(*plan, stack, begin, n);
      return true;
    }
  }
  if (!has_meta_kernel(op)) {
    TORCH_CHECK(is_small(stack->data() + begin, n), "The hollow device cannot run ",
                op.operator_name(), ": it has no kernel for tensors without memory, "
                "and these are too large to be computed.");
    return false;
  }
  std::string key = signature.key;
  std::vector<IValue> given(stack->begin() + int64_t(begin), stack->end());
  MetaCall call;
  call.truth = is_true(op);
  for (size_t i = begin; i < stack->size(); i++) to_meta((*stack)[i], call);
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.redispatchBoxed(kOnMeta, stack);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    bool missing = dynamic_cast<const c10::NotImplementedError*>(&error) ||
                   std::string(error.what()).find("NotImplementedError") !=
                       std::string::npos;
    if (!missing) throw;
    TORCH_CHECK(is_small(given.data(), n), "The hollow device cannot run ",
                op.operator_name(), ": it has no kernel for tensors without memory, "
                "and these are too large to be computed. ", error.what());
    stack->resize(begin);
    for (auto& value : given) stack->push_back(value);
    return false;
  }
  call.settle();
  auto plan = std::make_shared<Plan>();
  const size_t first = stack->size() - schema.returns().size();
  for (size_t i = first; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    Result result;
    if (value.isTensor()) {
      result.kind = Result::kTensor;
      value = call.to_sim(value.toTensor(), *plan, result);
    } else if (value.isTensorList()) {
      result.kind = Result::kList;
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorList())
        list.push_back(call.to_sim(each, *plan, result));
      value = std::move(list);
    } else {
      result.constant = value;
    }
    plan->results.push_back(std::move(result));
  }
  plan->work = work_of(op, kind_of(name), given.data(), stack->data() + first);
  bool is_view = false;
  for (const auto& returned : schema.returns()) {
    const auto* alias = returned.alias_info();
    is_view = is_view || (alias && !alias->isWrite());
  }
  if (is_view) plan->work = Work{0, 0, false, true};
  plan_attention(plan->work, key, given.data());
  pass(plan->work);
  Amount amount = amount_of(given.data(), n);
  for (size_t i = first; i < stack->size(); i++)
    each_tensor((*stack)[i], [&](const Tensor& t) { amount.add(t); });
  bool has_values = amount.is_few() && !is_view;
  plan->has_values = has_values;
  if (has_values) {
    stack->resize(begin);
    for (auto& value : given) stack->push_back(value);
  } else {
    draw(op, given.data(), n);
    for (int place : call.written)
      if (!plan->work.is_free) clear(call.arguments[place]);
  }
  if (told && !call.changed) {
    std::lock_guard<std::mutex> lock(plans().mutex);
    if (plans().known.size() >= kMostPlans) plans().known.clear();
    plans().known.emplace(std::move(key), std::move(plan));
  }
  return !has_values;
}

void forget_attention_plans() { n_forgotten++; }

void reset_hollow() {
  forget_attention_plans();
  for (int device = 0; device < kDevices; device++) blas_workspace(device).clear();
  std::lock_guard<std::mutex> lock(plans().mutex);
  plans().known.clear();
}

bool copy_hollow(const Tensor& from, const Tensor& to) {
  const bool crosses = on_sim(from) != on_sim(to);
  DeviceScope scope((on_sim(to) ? to : from).device().index());
  double seconds = card.launch;
  if (crosses)
    seconds += bytes_of(from) / card.host_bytes;
  else
    seconds += (bytes_of(from) + bytes_of(to)) / card.memory_bytes;
  issue(seconds, 0);
  Amount amount;
  amount.add(from);
  amount.add(to);
  if (!crosses && !amount.is_few()) clear(to);
  if (!crosses) return !amount.is_few();
  if (on_sim(from)) return bytes_of(from) > kCopiedOut;
  return !(amount.is_few() || (amount.are_integers && amount.n_bytes <= kCopiedIn));
}

namespace {

// ---------------------------------------------------------------- attention, as on CUDA

Tensor padded(const Tensor& t, int64_t to) {
  int64_t rest = t.size(-1) % to;
  return rest == 0 ? t : at::pad(t, {0, to - rest});
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const std::optional<Tensor>& mask, double dropout, bool causal,
                 std::optional<double> scale, bool grouped) {
  bool plain = !is_hollow || query.dim() != 4;
  if (plain)
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout,
                                                    causal, scale, grouped);
  const bool has_mask = mask && mask->defined();
  if (!has_mask && half(query) && query.size(3) <= 256) {
    double s = scale ? *scale : 1 / std::sqrt(double(query.size(3)));
    auto result = at::_scaled_dot_product_flash_attention(
        padded(query, 8), padded(key, 8), padded(value, 8), dropout, causal, false, s);
    Tensor out = std::get<0>(result);
    return out.size(-1) == query.size(-1) ? out : out.slice(-1, 0, query.size(-1));
  }
  Tensor k = key, v = value;
  if (grouped && k.size(1) != query.size(1)) {
    k = k.repeat_interleave(query.size(1) / k.size(1), 1);
    v = v.repeat_interleave(query.size(1) / v.size(1), 1);
  }
  std::optional<Tensor> bias;
  if (has_mask) {
    Tensor b = *mask;
    if (b.scalar_type() == at::kBool) {
      auto options = query.options();
      b = at::where(b, at::zeros({}, options),
                    at::full({}, -std::numeric_limits<double>::infinity(), options));
    }
    const int64_t keys = b.size(-1);
    bool aligned = keys % 8 == 0;
    for (int64_t i = 0; i + 1 < b.dim(); i++) aligned = aligned && b.stride(i) % 8 == 0;
    if (!aligned) b = at::pad(b, {0, 8 - keys % 8}).slice(-1, 0, keys);
    bias = b.expand({query.size(0), query.size(1), query.size(2), k.size(2)});
  }
  bool wants = at::GradMode::is_enabled() &&
               (query.requires_grad() || k.requires_grad() || v.requires_grad());
  return std::get<0>(at::_scaled_dot_product_efficient_attention(
      query, k, v, bias, wants, dropout, causal, scale));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", attention);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("scaled_dot_product_attention", attention);
}

}  // namespace

}  // namespace sim
