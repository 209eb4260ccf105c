#include "random.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstring>
#include <vector>

namespace sim {

namespace {

constexpr uint64_t kOffsetPerOperator = 4;  // as Philox's, which counts in fours

// The finalizer of splitmix64: neighbouring inputs, unrelated outputs.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

at::mt19937 engine_from(uint64_t seed, uint64_t offset) {
  at::mt19937_data_pod data{};
  data.seed_ = seed;
  data.seeded_ = true;
  data.left_ = 1;  // all numbers are made before the first is drawn
  uint64_t x = mixed(seed) ^ mixed(~offset);
  for (auto& word : data.state_) word = uint32_t(mixed(x += 0x9e3779b97f4a7c15));
  at::mt19937 engine;
  engine.set_data(data);
  return engine;
}

}  // namespace

Generator::Generator(int device)
    : GeneratorImpl(device_at(device),
                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  rng_copies++;
  at::Tensor state = at::detail::empty_cpu({2 * int64_t(sizeof(uint64_t))}, c10::kByte);
  auto* to = static_cast<char*>(state.mutable_data_ptr());
  std::memcpy(to, &seed_, sizeof(seed_));
  std::memcpy(to + sizeof(seed_), &offset_, sizeof(offset_));
  return state.getIntrusivePtr();
}

void Generator::set_state(const c10::TensorImpl& state) {
  bool fits = state.device_type() == c10::kCPU && state.is_contiguous() &&
              state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
              state.numel() == 2 * int64_t(sizeof(uint64_t));
  TORCH_CHECK(fits, "A random state of the simulated accelerator is 16 contiguous "
              "bytes on the CPU, as get_rng_state() returns them.");
  auto* from = static_cast<const char*>(state.data());
  std::memcpy(&seed_, from, sizeof(seed_));
  std::memcpy(&offset_, from + sizeof(seed_), sizeof(offset_));
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device_.index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::mt19937 Generator::next_engine() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto engine = engine_from(seed_, offset_);
  offset_ += kOffsetPerOperator;
  return engine;
}

void Generator::skip() {
  std::lock_guard<std::mutex> lock(mutex_);
  offset_ += kOffsetPerOperator;
}

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kDevices; index++)
      made->push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return all->at(device < 0 ? current_device : device);
}

DrawScope::DrawScope(const at::mt19937& engine)
    : cpu_(at::check_generator<at::CPUGeneratorImpl>(
          at::detail::getDefaultCPUGenerator())),
      engine_(cpu_->engine()),
      next_float_(cpu_->next_float_normal_sample()),
      next_double_(cpu_->next_double_normal_sample()) {
  cpu_->set_engine(engine);
  cpu_->set_next_float_normal_sample(std::nullopt);
  cpu_->set_next_double_normal_sample(std::nullopt);
}

DrawScope::~DrawScope() {
  cpu_->set_engine(engine_);
  cpu_->set_next_float_normal_sample(next_float_);
  cpu_->set_next_double_normal_sample(next_double_);
}

}  // namespace sim
