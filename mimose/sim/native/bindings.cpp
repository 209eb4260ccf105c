// What Python calls: torch.ops.sim.
#include "hollow.h"
#include "memory.h"
#include "random.h"

#include <c10/core/AllocatorConfig.h>
#include <torch/library.h>

#include <tuple>

namespace sim {

namespace {

using History = std::tuple<std::vector<std::string>, std::vector<int64_t>,
                           std::vector<int64_t>>;

Settings settings;  // the same for all devices

// As PYTORCH_ALLOC_CONF says.
Settings settings_of_environment() {
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  return {Config::use_expandable_segments(), Config::garbage_collection_threshold(),
          Config::max_split_size()};
}

void configure(const Settings& wanted) {
  for (int device = 0; device < kDevices; device++) memory_of(device).configure(wanted);
  settings = wanted;
}

void start() {
  register_kernels();
  register_hooks();
  wrap_host_allocator();
  configure(settings_of_environment());
}

void set_expandable_segments(bool enabled) {
  Settings wanted = settings;
  wanted.expandable_segments = enabled;
  configure(wanted);
}

void set_garbage_collection_threshold(double share) {
  Settings wanted = settings;
  wanted.garbage_collection_threshold = share;
  configure(wanted);
}

void set_max_split_bytes(std::optional<int64_t> n_bytes) {
  Settings wanted = settings;
  wanted.max_split_bytes = n_bytes ? size_t(*n_bytes) : Settings{}.max_split_bytes;
  configure(wanted);
}

void set_limit(int64_t device, std::optional<int64_t> n_bytes) {
  std::optional<size_t> limit;
  if (n_bytes) limit = size_t(*n_bytes);
  memory_of(device).set_limit(limit);
}

std::optional<int64_t> get_limit(int64_t device) {
  auto limit = memory_of(device).limit();
  return limit ? std::optional<int64_t>(*limit) : std::nullopt;
}

void record_history(int64_t device, bool enabled) {
  memory_of(device).record_history(enabled);
}

History history(int64_t device) {
  History all;
  for (const auto& entry : memory_of(device).history()) {
    std::get<0>(all).push_back(entry.kind);
    std::get<1>(all).push_back(int64_t(entry.address));
    std::get<2>(all).push_back(int64_t(entry.n_bytes));
  }
  return all;
}

// As after start, but for memory that is held, and settings where any is.
void reset() {
  bool held = false;
  is_hollow = false;
  host = {};
  link = {};
  reset_hollow();
  for (int device = 0; device < kDevices; device++) {
    auto& memory = memory_of(device);
    memory.empty_cache();
    memory.set_total(kDefaultTotalBytes);
    memory.set_others(0);
    memory.fail_allocation(0);
    memory.set_limit(std::nullopt);
    memory.record_history(false);
    memory.reset_peak_stats();
    memory.reset_accumulated_stats();
    default_generator(device).unsafeGetGeneratorImpl()->set_current_seed(
        c10::default_rng_seed_val);
    held = held || memory.reserved() > 0;
  }
  if (!held) configure(settings_of_environment());
  current_device = 0;
  waits = 0;
  rng_copies = 0;
}

void set_card(double half_flops, double single_flops, double conv_flops,
              double memory_bytes, double host_bytes, double blas_workspace, double launch, double segment,
              double segment_byte, double granule, double attention_plan) {
  card = {half_flops,     single_flops, conv_flops, memory_bytes, host_bytes,
          blas_workspace, launch,       segment,    segment_byte, granule,
          attention_plan};
}

void set_host(double operator_seconds, double listed) {
  host = {operator_seconds, listed};
}

void set_link(double node_bytes, double network_bytes, double node_hop,
              double network_hop, double start) {
  link = {node_bytes, network_bytes, node_hop, network_hop, start};
  register_collectives();
}

using Reading = std::tuple<double, double, int64_t, double, double, double, int64_t,
                           int64_t, int64_t, double>;

Reading clock_of(int64_t device) {
  auto& clock = clocks[device];
  auto& lines = timelines[device];
  return {1e-9 * double(clock.kernels), 1e-9 * double(clock.allocator),
          clock.n_kernels,              1e6 * double(clock.flops),
          1e-9 * double(lines.now()),   1e-9 * double(lines.host_spent()),
          clock.n_views,                clock.n_listed,
          clock.n_attention_plans,      1e-9 * double(clock.collectives)};
}

TORCH_LIBRARY(sim, m) {
  m.def("set_hollow(bool enabled) -> ()", [](bool enabled) { is_hollow = enabled; });
  m.def("set_card(float half_flops, float single_flops, float conv_flops, "
        "float memory_bytes, "
        "float host_bytes, float blas_workspace, float launch, float segment, "
        "float segment_byte, float granule, float attention_plan) -> ()",
        set_card);
  m.def("set_host(float operator_seconds, float listed) -> ()", set_host);
  m.def("set_link(float node_bytes, float network_bytes, float node_hop, "
        "float network_hop, float start) -> ()",
        set_link);
  m.def("forget_attention_plans() -> ()", forget_attention_plans);
  m.def("pass_on_host(int device, float seconds) -> ()",
        [](int64_t device, double seconds) { timelines[device].pass_on_host(seconds); });
  m.def("clock(int device) -> (float, float, int, float, float, float, int, int, int, float)",
        clock_of);
  m.def("start() -> ()", start);
  m.def("device_count() -> int", []() -> int64_t { return kDevices; });
  m.def("reset() -> ()", reset);
  m.def("waits() -> int", []() -> int64_t { return waits; });
  m.def("rng_copies() -> int", []() -> int64_t { return rng_copies; });
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) { return default_generator(int(device)); });
  m.def("set_total(int device, int n_bytes) -> ()",
        [](int64_t device, int64_t n_bytes) { memory_of(device).set_total(n_bytes); });
  m.def("set_others(int device, int n_bytes) -> ()", [](int64_t device, int64_t n_bytes) {
    memory_of(device).set_others(n_bytes);
  });
  m.def("fail_allocation(int device, int nth) -> ()", [](int64_t device, int64_t nth) {
    memory_of(device).fail_allocation(nth);
  });
  m.def("set_limit(int device, int? n_bytes) -> ()", set_limit);
  m.def("get_limit(int device) -> int?", get_limit);
  m.def("set_expandable_segments(bool enabled) -> ()", set_expandable_segments);
  m.def("set_garbage_collection_threshold(float share) -> ()",
        set_garbage_collection_threshold);
  m.def("set_max_split_bytes(int? n_bytes) -> ()", set_max_split_bytes);
  m.def("record_history(int device, bool enabled) -> ()", record_history);
  m.def("history(int device) -> (str[], int[], int[])", history);
}

}  // namespace

}  // namespace sim
