#include "host_waits.h"

#include "memory.h"

#include <string>
#include <unordered_set>

namespace sim {

namespace {

// Their results, or the sizes of these, are read back by the host.
const std::unordered_set<std::string> kRead{
    "aten::equal",          "aten::nonzero",
    "aten::masked_select",  "aten::_unique",
    "aten::_unique2",       "aten::unique_dim",
    "aten::bincount",       "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
};

const std::unordered_set<std::string> kIndexed{
    "aten::index",
    "aten::_unsafe_index",
    "aten::_index_put_impl_",
};

// Each mask among indices is turned into places by nonzero.
int count_masks(const c10::IValue& indices) {
  int n = 0;
  auto list = indices.toOptionalTensorList();
  for (size_t i = 0; i < list.size(); i++) {
    std::optional<at::Tensor> index = list.get(i);
    if (!index || !index->defined()) continue;
    n += index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
  }
  return n;
}

// `x[mask] = number` is a masked_fill on CUDA.
bool fills_masked(const std::string& name, const c10::IValue* arguments, int n_masks) {
  return name == "aten::_index_put_impl_" && n_masks == 1 &&
         arguments[2].toTensor().numel() == 1 && !arguments[3].toBool();
}

}  // namespace

void count_waits(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                 size_t begin) {
  const auto& name = op.schema().name();
  const c10::IValue* arguments = stack.data() + begin;
  if (kRead.count(name)) {
    wait();
  } else if (kIndexed.count(name)) {
    int n = count_masks(arguments[1]);
    if (!fills_masked(name, arguments, n))
      for (; n > 0; n--) wait();
  } else if (name == "aten::repeat_interleave") {
    if (arguments[1].isNone()) wait();  // output_size
  }
}

void count_wait_of_copy(const at::Tensor& from, const at::Tensor& to,
                        bool non_blocking) {
  if (from.is_privateuseone() == to.is_privateuseone() || from.numel() == 0) return;
  const at::Tensor& on_host = from.is_privateuseone() ? to : from;
  if (!non_blocking || !is_pinned(on_host.storage().data())) wait();
}

}  // namespace sim
