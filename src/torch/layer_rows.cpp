#include "torch/layer_rows.h"

#include <torch/csrc/autograd/custom_function.h>

#include "torch/decoder_compat.h"
#ifdef LEEWAY_CUDA
#include <ATen/cuda/CUDAContext.h>

#include "cuda/training_rows.h"
#endif

namespace leeway {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

Tensor turn(const Tensor& x, const Tensor& cosines, const Tensor& sines, bool back) {
  const std::vector<Tensor> halves = x.to(wide_type(x)).chunk(2, -1);
  const Tensor &a = halves[0], &b = halves[1], s = back ? -sines : sines;
  return at::cat({a * cosines - b * s, b * cosines + a * s}, -1).to(x.scalar_type());
}

#ifdef LEEWAY_CUDA

bool has_kernels(const Tensor& x) {
  return x.is_cuda() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}
cuda::Number number_of(const Tensor& x) {
  return x.scalar_type() == at::kFloat ? cuda::Number::float32 : cuda::Number::bf16;
}
cudaStream_t stream() { return at::cuda::getCurrentCUDAStream(); }

struct Norm : torch::autograd::Function<Norm> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& weight,
                        double eps) {
    const Tensor x = input.contiguous(), y = at::empty_like(x);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = 1;
    const Tensor inverse = at::empty(sizes, x.options().dtype(at::kFloat));
    cuda::norm_rows(number_of(x), x.data_ptr(), inverse.numel(), x.size(-1), weight.data_ptr(),
                    static_cast<float>(eps), y.data_ptr(), inverse.data_ptr<float>(), stream());
    context->save_for_backward({x, weight, inverse});
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::vector<Tensor> saved = context->get_saved_variables();
    const auto [d_x, d_weight] =
        rms_norm_backward(gradients[0].contiguous(), saved[0], saved[1], saved[2]);
    return {d_x, d_weight, Tensor()};
  }
};

Tensor turn_by_kernel(const Tensor& input, const Tensor& cosines, const Tensor& sines, bool back) {
  const Tensor x = input.contiguous(), y = at::empty_like(x);
  cuda::turn_rows(number_of(x), x.data_ptr(), x.size(0), x.size(1), x.size(2),
                  cosines.data_ptr<float>(), sines.data_ptr<float>(), back, y.data_ptr(), stream());
  return y;
}

struct Gate : torch::autograd::Function<Gate> {
  static Tensor forward(AutogradContext* context, const Tensor& gate_input,
                        const Tensor& up_input) {
    const Tensor gate = gate_input.contiguous(), up = up_input.contiguous();
    const Tensor s = at::empty_like(gate);
    cuda::gate_forward(number_of(gate), gate.data_ptr(), up.data_ptr(), gate.numel(), s.data_ptr(),
                       stream());
    context->save_for_backward({gate, up});
    return s;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::vector<Tensor> saved = context->get_saved_variables();
    const Tensor &gate = saved[0], &up = saved[1], d_s = gradients[0].contiguous();
    const Tensor d_gate = at::empty_like(gate), d_up = at::empty_like(up);
    cuda::gate_backward(number_of(gate), gate.data_ptr(), up.data_ptr(), d_s.data_ptr(),
                        gate.numel(), d_gate.data_ptr(), d_up.data_ptr(), stream());
    return {d_gate, d_up};
  }
};

#endif

// The gradient is rotated back.
struct Turn : torch::autograd::Function<Turn> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& cosines,
                        const Tensor& sines) {
    context->save_for_backward({cosines, sines});
    return by_device(x, cosines, sines, false);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::vector<Tensor> saved = context->get_saved_variables();
    return {by_device(gradients[0], saved[0], saved[1], true), Tensor(), Tensor()};
  }
  static Tensor by_device(const Tensor& x, const Tensor& cosines, const Tensor& sines, bool back) {
#ifdef LEEWAY_CUDA
    if (has_kernels(x)) return turn_by_kernel(x, cosines, sines, back);
#endif
    return turn(x, cosines, sines, back);
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
#ifdef LEEWAY_CUDA
  if (has_kernels(x)) return Norm::apply(x, weight, eps);
#endif
  const Tensor wide = x.to(wide_type(x));
  const Tensor normed = wide * at::rsqrt(wide.square().mean(-1, true) + eps);
  return normed.to(x.scalar_type()) * weight;
}

Tensor turned(const Tensor& x, const Tensor& cosines, const Tensor& sines) {
  return Turn::apply(x, cosines, sines);
}

Tensor gated(const Tensor& gate, const Tensor& up) {
#ifdef LEEWAY_CUDA
  if (has_kernels(gate)) return Gate::apply(gate, up);
#endif
  return at::silu(gate) * up;
}

}  // namespace leeway
