// Random numbers of a device.
#pragma once

#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace sim {

// As CUDA's: its state is a seed and an offset, which grows with every operator that
// draws. The numbers are the CPU's engine's, begun anew from both for each operator.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device);

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // The engine that the next operator draws from.
  at::mt19937 next_engine();

  // As if an operator had drawn.
  void skip();

 private:
  Generator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(int device);

// While it lives, the CPU's default generator draws from a given engine: where the
// CPU's kernels get their numbers from.
class DrawScope {
 public:
  explicit DrawScope(const at::mt19937& engine);
  ~DrawScope();
  DrawScope(const DrawScope&) = delete;
  DrawScope& operator=(const DrawScope&) = delete;

 private:
  at::CPUGeneratorImpl* cpu_;
  at::mt19937 engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
};

}  // namespace sim
