// The trunk with a low-rank adapter against autograd over matrices that include it: W + s B A.

#include <gtest/gtest.h>

#include <algorithm>

#include "leeway/error.h"
#include "torch/low_rank.h"
#include "torch/torch_decoder_test_support.h"
#include "torch/trunk.h"

namespace leeway {
namespace {

using testing::any_gradient;
using testing::describe;
using testing::devices;
using testing::kFamilies;
using testing::kLengths;
using testing::offsets_of;
using testing::random_parameters;
using testing::random_tokens;
using testing::relative_difference;
using testing::small_config;
using torch::Tensor;

const std::vector<std::string> kAll(kLoraTargets.begin(), kLoraTargets.end());

Parameters adapter_over(Parameters base, const std::vector<std::string>& targets) {
  Parameters adapter(std::make_shared<const Parameters>(std::move(base)),
                     {.rank = 8, .alpha = 12.0, .targets = targets, .base_path = ""});
  Rng rng(4);
  for (float& value : adapter.flat()) value = static_cast<float>(0.2 * rng.normal());
  return adapter;
}

Tensor matrix_of(const Parameters& parameters, const std::string& name,
                 const std::vector<int64_t>& shape) {
  return at::from_blob(const_cast<float*>(parameters.find(name)), shape, at::kFloat)
      .to(at::kDouble);
}

struct Module {
  std::string name;  // without ".weight"
  int64_t outputs, inputs;
};
std::vector<Module> modules_of(const Parameters& adapter) {
  std::vector<Module> modules;
  for (const ParameterInfo& info : adapter.base()->table()) {
    const std::string name = info.name.substr(0, info.name.rfind('.'));
    if (info.shape.size() != 2 || adapter.find(lora_a_name(name)) == nullptr) continue;
    modules.push_back({name, info.shape[0], info.shape[1]});
  }
  return modules;
}

Tensor a_of(const Parameters& adapter, const Module& m) {
  return matrix_of(adapter, lora_a_name(m.name), {adapter.lora()->rank, m.inputs});
}
Tensor b_of(const Parameters& adapter, const Module& m) {
  return matrix_of(adapter, lora_b_name(m.name), {m.outputs, adapter.lora()->rank});
}

Parameters merged(const Parameters& adapter) {
  Parameters all = *adapter.base();
  for (const Module& m : modules_of(adapter)) {
    const Tensor to =
        at::from_blob(all.find(m.name + ".weight"), {m.outputs, m.inputs}, at::kFloat);
    to.add_((adapter.lora()->scale() * at::mm(b_of(adapter, m), a_of(adapter, m))).to(at::kFloat));
  }
  return all;
}

// Hidden states, and the gradients of A and B of every module.
struct Found {
  Tensor hidden;
  std::vector<Tensor> gradients;
};

Found by_autograd(const Parameters& adapter, torch::Device device, at::ScalarType type,
                  const Tensor& tokens) {
  const Parameters all = merged(adapter);
  const TorchDecoder decoder(all, device, type);
  const Tensor hidden = decoder.forward(tokens, offsets_of(kLengths), false);
  const std::vector<Tensor> of_all = torch::autograd::grad(
      {hidden}, decoder.parameters(), {any_gradient(hidden)}, /*retain_graph=*/false, false, true);
  Found found{hidden.detach().cpu().to(at::kDouble), {}};
  const double scale = adapter.lora()->scale();
  for (const Module& m : modules_of(adapter)) {
    for (size_t i = 0; i < of_all.size(); ++i) {
      if (all.table()[i].name != m.name + ".weight") continue;
      const Tensor d_w = of_all[i].cpu().to(at::kDouble);
      found.gradients.push_back(scale * at::mm(b_of(adapter, m).t(), d_w));
      found.gradients.push_back(scale * at::mm(d_w, a_of(adapter, m).t()));
    }
  }
  return found;
}

Found by_trunk(const Parameters& adapter, torch::Device device, at::ScalarType type,
               const Tensor& tokens, Recompute recompute, bool are_new) {
  const FlatLayout base(adapter.config()), layout(adapter);
  const at::TensorOptions options = at::TensorOptions(device).dtype(type);
  const Tensor weights = at::zeros({base.size}, options), low = at::zeros({layout.size}, options);
  copy_to_flat(base, *adapter.base(), weights);
  copy_to_flat(layout, adapter, low);
  const Trunk trunk(adapter.config(), network_views(base, weights),
                    TorchRopeTable(adapter.config(), device), adapter_views(layout, low));
  const Tensor flat = at::full({layout.size}, are_new ? 7.0 : 0.0,
                               options.dtype(type == at::kDouble ? at::kDouble : at::kFloat));
  NetworkTensors frozen;
  frozen.layers.resize(static_cast<size_t>(adapter.config().num_hidden_layers));
  TrunkRecord record;
  const Tensor hidden = trunk.forward(tokens, offsets_of(kLengths), recompute, &record);
  trunk.backward(std::move(record), any_gradient(hidden), frozen, are_new,
                 adapter_views(layout, flat));
  Found found{hidden.cpu().to(at::kDouble), {}};
  for (const Tensor& gradient : parameter_views(layout, flat)) {
    found.gradients.push_back(gradient.cpu().to(at::kDouble));
  }
  return found;
}

const std::vector<std::vector<std::string>> kTargets = {
    kAll,          {"q_proj"},    {"k_proj"},
    {"v_proj"},    {"o_proj"},    {"up_proj"},
    {"gate_proj"}, {"down_proj"}, {"q_proj", "v_proj", "down_proj"}};

std::string where(const torch::Device& device, Family family, Recompute recompute,
                  const std::vector<std::string>& targets) {
  return device.str() + ", " + describe(family) + ", recompute " + name_of(recompute) + ", " +
         targets.front() + " and " + std::to_string(targets.size() - 1) + " more";
}

TEST(TrunkAdapter, HasTheGradientsOfMatricesThatIncludeIt) {
  for (const torch::Device& device : devices()) {
    const at::ScalarType type = device.is_cpu() ? at::kDouble : at::kFloat;
    // The merged matrices are float32.
    const double tolerance = device.is_cpu() ? 1e-5 : 1e-3;
    for (const Family family : kFamilies) {
      const ModelConfig config = small_config(family);
      const Tensor tokens = random_tokens(config, offsets_of(kLengths).back(), 6).to(device);
      for (const std::vector<std::string>& targets : kTargets) {
        const Parameters adapter = adapter_over(random_parameters(config, 5), targets);
        const Found expected = by_autograd(adapter, device, type, tokens);
        for (const Recompute recompute : {Recompute::off, Recompute::selective, Recompute::layer}) {
          const std::string at = where(device, family, recompute, targets);
          const Found got =
              by_trunk(adapter, device, type, tokens, recompute, recompute == Recompute::selective);
          EXPECT_LT(relative_difference(got.hidden, expected.hidden), tolerance) << at;
          ASSERT_EQ(got.gradients.size(), expected.gradients.size()) << at;
          for (size_t i = 0; i < got.gradients.size(); ++i) {
            EXPECT_LT(relative_difference(got.gradients[i], expected.gradients[i]), tolerance)
                << at << ", " << adapter.table()[i].name;
          }
        }
      }
    }
  }
}

Tensor all_of(const Found& found) {
  std::vector<Tensor> flat;
  for (const Tensor& gradient : found.gradients) flat.push_back(gradient.flatten());
  return at::cat(flat);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// In bf16 both round, each in its own places, and a random model may blow up the rounding of one of
// them: medians over many models are compared, of the errors against float32.
TEST(TrunkAdapter, IsInHalfPrecisionAsCloseAsMergedMatrices) {
  for (const torch::Device& device : devices()) {
    for (const Family family : kFamilies) {
      const ModelConfig config = small_config(family);
      for (const Recompute recompute : {Recompute::off, Recompute::layer}) {
        std::vector<double> hidden, gradients, merged_hidden, merged_gradients;
        for (uint64_t seed = 5; seed < 17; ++seed) {
          const Tensor tokens =
              random_tokens(config, offsets_of(kLengths).back(), seed + 1).to(device);
          const Parameters adapter = adapter_over(random_parameters(config, seed), kAll);
          const Found expected = by_autograd(adapter, device, at::kFloat, tokens);
          const Found merged = by_autograd(adapter, device, at::kBFloat16, tokens);
          const Found got = by_trunk(adapter, device, at::kBFloat16, tokens, recompute, true);
          hidden.push_back(relative_difference(got.hidden, expected.hidden));
          merged_hidden.push_back(relative_difference(merged.hidden, expected.hidden));
          gradients.push_back(relative_difference(all_of(got), all_of(expected)));
          merged_gradients.push_back(relative_difference(all_of(merged), all_of(expected)));
        }
        const std::string at = where(device, family, recompute, kAll);
        EXPECT_LT(median(hidden), 1.5 * median(merged_hidden)) << at;
        EXPECT_LT(median(gradients), 1.5 * median(merged_gradients)) << at;
      }
    }
  }
}

TEST(TrunkAdapter, RefusesARankThatProductsOnCudaHaveNoOrderFor) {
  EXPECT_NO_THROW(check_rank(6, at::kCPU));
  EXPECT_NO_THROW(check_rank(24, torch::Device(at::kCUDA, 0)));
  try {
    check_rank(6, torch::Device(at::kCUDA, 0));
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("multiple of 8, as 8"), std::string::npos);
  }
}

}  // namespace
}  // namespace leeway
