// Which operators make a host wait for its device, on CUDA.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

// Count the waits of an operator whose arguments begin at a place of the stack.
void count_waits(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                 size_t begin);

// Count the wait of a copy between host and device: there is none only where the host's
// side is pinned and the copy may be behind.
void count_wait_of_copy(const at::Tensor& from, const at::Tensor& to,
                        bool non_blocking);

}  // namespace sim
