// Torch as this layer uses it, 1.13 and 2.x alike: what differs between them is settled here.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <utility>

namespace leeway {

using at::Tensor;

// c10::optional in torch 1.13, std::optional since: whatever torch itself hands out.
using OptionalTensor = decltype(std::declval<const c10::IValue&>().toOptional<Tensor>());

}  // namespace leeway
