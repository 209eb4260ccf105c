// What ranks exchange, on a hollow device: nothing, and the time that it would take. Only
// a few integers are copied, as if all ranks had the same: sizes that ranks compare.
#include "hollow.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

namespace sim {

namespace {

constexpr int kNode = 8;  // ranks of a node

class Done final : public c10d::Work {
 public:
  explicit Done(c10::IValue result) : result_(std::move(result)) {}
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(result_);
    return future;
  }

 private:
  c10::IValue result_;
};

int64_t bytes_in(const c10::IValue& value) {
  if (value.isTensor()) return int64_t(value.toTensor().nbytes());
  int64_t n = 0;
  if (value.isList())
    for (const c10::IValue& each : value.toListRef()) n += bytes_in(each);
  return n;
}

// NCCL's own model of a ring (graph/tuning.cc): a start, a hop for each step, and the
// bytes that pass each rank, by the slower of the links.
bool are_few_integers(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    return at::isIntegralType(t.scalar_type(), true) && t.nbytes() <= (64 << 10);
  }
  bool all = value.isList();
  if (all)
    for (const c10::IValue& each : value.toListRef()) all = all && are_few_integers(each);
  return all;
}

double seconds_of(const std::string& name, double n_bytes, int n_ranks) {
  if (n_ranks < 2 || link.node_bytes <= 0) return 0;
  const int n_nodes = (n_ranks + kNode - 1) / kNode;
  const bool is_all_reduce = name.find("allreduce") != std::string::npos;
  const double rounds = is_all_reduce ? 2 : 1;
  const double between = rounds * (n_nodes - 1);
  const double within = rounds * (n_ranks - 1) - between;
  const double rate = n_nodes > 1 ? link.network_bytes : link.node_bytes;
  return link.start + within * link.node_hop + between * link.network_hop +
         rounds * n_bytes * (n_ranks - 1) / n_ranks / rate;
}

void exchange_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// (outputs, inputs, group, ...) or (tensors, group, ...) -> (the first, work) or work.
void exchange(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), begin = stack->size() - n;
  if (!is_hollow) return exchange_on_cpu(op, stack);
  int64_t n_bytes = 0;
  int n_ranks = 1;
  bool is_apart = true;
  for (size_t i = 0; i < n; i++) {
    const c10::IValue& value = (*stack)[begin + i];
    if (value.isTensor() || value.isList()) n_bytes = std::max(n_bytes, bytes_in(value));
    if (schema.arguments()[i].name() == "process_group")
      n_ranks = value.toCustomClass<c10d::ProcessGroup>()->getSize();
    if (schema.arguments()[i].name() == "async_op") is_apart = value.toBool();
  }
  const double seconds = seconds_of(schema.name(), double(n_bytes), n_ranks);
  clocks[current_device].collectives += int64_t(seconds * 1e9);
  timelines[current_device].pass_on_host(host.operator_seconds);
  timelines[current_device].exchange(seconds, is_apart);
  if (are_few_integers((*stack)[begin])) return exchange_on_cpu(op, stack);
  c10::IValue first = (*stack)[begin];
  const bool returns_first = schema.returns().size() == 2;
  stack->resize(begin);
  if (returns_first) stack->push_back(first);
  c10::IValue result = first;
  if (!first.isTensorList()) {
    c10::List<at::Tensor> one;
    if (first.isTensor()) one.push_back(first.toTensor());
    result = std::move(one);
  }
  c10::intrusive_ptr<c10d::Work> work = c10::make_intrusive<Done>(std::move(result));
  stack->push_back(c10::IValue(std::move(work)));
}

class Quiet final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

// In place of torch's own kernels, which would find the process group's backend and give
// it every collective; torch warns of that.
void register_collectives() {
  static bool is_done = false;
  if (is_done) return;
  is_done = true;
  static Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "c10d",
                                c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "_allgather_base_", "allgather_",
        "allgather_into_tensor_coalesced_", "_reduce_scatter_base_", "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_", "alltoall_base_", "alltoall_", "broadcast_",
        "reduce_", "gather_", "scatter_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&exchange>());
}

}  // namespace sim
