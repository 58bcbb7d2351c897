#include "torch/layer_rows.h"

#include <torch/csrc/autograd/custom_function.h>

#include "torch/compat.h"
#ifdef LEEWAY_CUDA
#include "cuda/norm_rope_swiglu.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

#ifdef LEEWAY_CUDA

bool has_kernels(const Tensor& x) {
  return x.is_cuda() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}

struct Norm : torch::autograd::Function<Norm> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& weight,
                        double eps) {
    const Tensor x = input.contiguous(), y = at::empty_like(x);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = 1;
    const Tensor inverse = at::empty(sizes, x.options().dtype(at::kFloat));
    cuda::RmsNorm norm;
    norm.rows = inverse.numel(), norm.width = x.size(-1);
    norm.x = data_of(x), norm.weight = data_of(weight), norm.eps = static_cast<float>(eps);
    norm.y = data_of(y), norm.inverse = inverse.data_ptr<float>();
    cuda::rms_norm(dtype_of(x), norm, stream_of(x));
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

Tensor rope_by_kernel(const Tensor& input, const Tensor& positions, const Tensor& cosines,
                      const Tensor& sines, bool back) {
  const Tensor x = input.contiguous(), y = at::empty_like(x);
  cuda::rope(dtype_of(x), data_of(x), x.size(0), x.size(1), x.size(2),
             positions.data_ptr<int32_t>(), {cosines.data_ptr<float>(), sines.data_ptr<float>()},
             back, data_of(y), stream_of(x));
  return y;
}

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static Tensor forward(AutogradContext* context, const Tensor& gate_input,
                        const Tensor& up_input) {
    const Tensor gate = gate_input.contiguous(), up = up_input.contiguous();
    const Tensor s = at::empty_like(gate);
    const int64_t width = gate.size(-1), rows = width == 0 ? 0 : gate.numel() / width;
    cuda::swiglu(dtype_of(gate), data_of(gate), data_of(up), width, rows, width, data_of(s),
                 stream_of(gate));
    context->save_for_backward({gate, up});
    return s;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::vector<Tensor> saved = context->get_saved_variables();
    const Tensor &gate = saved[0], &up = saved[1], d_s = gradients[0].contiguous();
    const Tensor d_gate = at::empty_like(gate), d_up = at::empty_like(up);
    cuda::swiglu_backward(dtype_of(gate), data_of(gate), data_of(up), data_of(d_s), gate.numel(),
                          data_of(d_gate), data_of(d_up), stream_of(gate));
    return {d_gate, d_up};
  }
};

#endif

// The gradient is turned back.
struct Rope : torch::autograd::Function<Rope> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& positions,
                        const Tensor& cosines, const Tensor& sines) {
    context->save_for_backward({positions, cosines, sines});
    return by_device(x, positions, cosines, sines, false);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::vector<Tensor> saved = context->get_saved_variables();
    return {by_device(gradients[0], saved[0], saved[1], saved[2], true), Tensor(), Tensor(),
            Tensor()};
  }
  static Tensor by_device(const Tensor& x, const Tensor& positions, const Tensor& cosines,
                          const Tensor& sines, bool back) {
#ifdef LEEWAY_CUDA
    if (has_kernels(x)) return rope_by_kernel(x, positions, cosines, sines, back);
#endif
    return plain_rope(x, positions, cosines, sines, back);
  }
};

}  // namespace

Tensor plain_rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor wide = x.to(wide_type(x));
  const Tensor normed = wide * at::rsqrt(wide.square().mean(-1, true) + eps);
  return normed.to(x.scalar_type()) * weight;
}

Tensor plain_rope(const Tensor& x, const Tensor& positions, const Tensor& cosines,
                  const Tensor& sines, bool back) {
  const auto of_rows = [&](const Tensor& table) {  // [N, 1, head_dim / 2]
    return table.index_select(0, positions).to(wide_type(x)).unsqueeze(1);
  };
  const std::vector<Tensor> halves = x.to(wide_type(x)).chunk(2, -1);
  const Tensor &a = halves[0], &b = halves[1], c = of_rows(cosines);
  const Tensor s = back ? -of_rows(sines) : of_rows(sines);
  return at::cat({a * c - b * s, b * c + a * s}, -1).to(x.scalar_type());
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
#ifdef LEEWAY_CUDA
  if (has_kernels(x)) return Norm::apply(x, weight, eps);
#endif
  return plain_rms_norm(x, weight, eps);
}

Tensor rope(const Tensor& x, const Tensor& positions, const TorchRopeTable& table) {
  return Rope::apply(x, positions, table.cosines, table.sines);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
#ifdef LEEWAY_CUDA
  if (has_kernels(gate)) return SwiGlu::apply(gate, up);
#endif
  return at::silu(gate) * up;
}

}  // namespace leeway
