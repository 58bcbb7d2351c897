#include "cuda/products.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "cuda/device.h"
#include "cuda/few_row_products.h"
#include "leeway/error.h"

namespace leeway::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr int kMostAlignment = 256;  // bytes; more makes no difference
constexpr int kCandidates = 16;
// The least that algorithms are tried for: either of them.
constexpr int64_t kTriedRows = 2048, kTriedOutputs = 32768;
constexpr size_t kMostTried = 8;

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(fmt::format("cuBLASLt: {}: {}", what, cublasGetStatusString(status)));
}

cudaDataType_t type_of(Dtype type) { return type == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

int64_t stride_of(const Projection& p) { return p.y_stride > 0 ? p.y_stride : p.outputs; }

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address == 0) return kMostAlignment;
  return std::min(kMostAlignment, 1 << std::min(8, std::countr_zero(address)));
}

template <class T>
T attribute_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t name) {
  T value{};
  size_t written = 0;
  check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, name, &value, sizeof value, &written),
        "an algorithm's attribute");
  return value;
}

// Whether the inputs are summed by one block, in order.
bool keeps_order(const cublasLtMatmulAlgo_t& algorithm) {
  return attribute_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
         attribute_of<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) ==
             CUBLASLT_REDUCTION_SCHEME_NONE;
}

struct Event {
  Event() { check_cuda(cudaEventCreate(&event), "an event"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

}  // namespace

struct Products::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (const cublasLtMatrixLayout_t layout : {weight, x, y}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }
};

Products::Products() {
  check(cublasLtCreate(&handle_), "start");
  const cudaError_t status = cudaMalloc(&workspace_, kWorkspaceBytes);
  if (status != cudaSuccess) cublasLtDestroy(handle_);
  check_cuda(status, "a workspace for products");
}

Products::~Products() {
  plans_.clear();
  cudaFree(pair_);
  cudaFree(workspace_);
  cublasLtDestroy(handle_);
}

// cuBLAS counts columns first: y^T [outputs, rows] = weight [outputs, inputs] x^T.
const Products::Plan& Products::plan_of(const Projection& p, cudaStream_t stream) {
  const int aligned[4] = {alignment_of(p.weight), alignment_of(p.x), alignment_of(p.y),
                          alignment_of(p.bias)};
  const Key key{static_cast<int>(p.type),
                static_cast<int>(p.y_type),
                p.rows,
                p.inputs,
                p.outputs,
                stride_of(p),
                p.bias != nullptr,
                p.weight_by_inputs,
                aligned[0],
                aligned[1],
                aligned[2],
                aligned[3]};
  const auto [at, is_new] = plans_.try_emplace(key);
  Plan& plan = at->second;
  if (!is_new) return plan;
  try {
    check(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product");
    const auto set = [&](cublasLtMatmulDescAttributes_t name, const auto& value) {
      check(cublasLtMatmulDescSetAttribute(plan.operation, name, &value, sizeof value),
            "a product's attribute");
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.weight_by_inputs ? CUBLAS_OP_N : CUBLAS_OP_T);
    if (p.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.y_type));
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    }
    const auto layout = [](cublasLtMatrixLayout_t* to, Dtype type, int64_t height, int64_t width,
                           int64_t stride) {
      check(cublasLtMatrixLayoutCreate(to, type_of(type), static_cast<uint64_t>(height),
                                       static_cast<uint64_t>(width), stride),
            "a matrix");
    };
    if (p.weight_by_inputs) {
      layout(&plan.weight, p.type, p.outputs, p.inputs, p.outputs);
    } else {
      layout(&plan.weight, p.type, p.inputs, p.outputs, p.inputs);
    }
    layout(&plan.x, p.type, p.inputs, p.rows, p.inputs);
    layout(&plan.y, p.y_type, p.outputs, p.rows, stride_of(p));
    if (choose_tried(key, p, plan)) return plan;

    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "a preference");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, const auto& value) {
      return cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof value);
    };
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const auto keep = [&](cublasStatus_t next) {
      if (status == CUBLAS_STATUS_SUCCESS) status = next;
    };
    keep(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes));
    keep(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE)));
    keep(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(aligned[0])));
    keep(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(aligned[1])));
    keep(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(aligned[2])));
    keep(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(aligned[2])));
    std::vector<cublasLtMatmulHeuristicResult_t> found(kCandidates);
    int count = 0;
    if (status == CUBLAS_STATUS_SUCCESS) {
      status =
          cublasLtMatmulAlgoGetHeuristic(handle_, plan.operation, plan.weight, plan.x, plan.y,
                                         plan.y, preference, kCandidates, found.data(), &count);
    }
    cublasLtMatmulPreferenceDestroy(preference);
    check(status, "algorithms for a product");
    found.resize(static_cast<size_t>(count));
    std::vector<cublasLtMatmulAlgo_t> in_order;
    for (const auto& candidate : found) {
      if (candidate.state == CUBLAS_STATUS_SUCCESS && keeps_order(candidate.algo)) {
        in_order.push_back(candidate.algo);
      }
    }
    if (in_order.empty()) {
      throw Error(fmt::format(
          "cuBLASLt has no algorithm for a product of [{}, {}] and [{}, {}] that keeps the order "
          "of its sums",
          p.rows, p.inputs, p.inputs, p.outputs));
    }
    plan.algorithm = in_order.front();
    try_algorithms(key, in_order, p, plan, stream);
  } catch (...) {
    plans_.erase(at);
    throw;
  }
  return plan;
}

namespace {

bool is_tried(const Projection& p) { return p.rows >= kTriedRows || p.outputs >= kTriedOutputs; }

// The same key for all rows that share a trial.
template <class Key>
Key key_of_trial(Key key) {
  auto& rows = std::get<2>(key);
  rows = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(rows)));
  return key;
}

}  // namespace

bool Products::choose_tried(const Key& key, const Projection& p, Plan& plan) {
  const auto known = tried_.find(key_of_trial(key));
  if (known == tried_.end() || !is_tried(p)) return false;
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(
      handle_, plan.operation, plan.weight, plan.x, plan.y, plan.y, &known->second, &result);
  if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > kWorkspaceBytes) return false;
  plan.algorithm = known->second;
  return true;
}

// Each of them makes the product, with the same bits. Not while a graph is captured.
void Products::try_algorithms(const Key& key, const std::vector<cublasLtMatmulAlgo_t>& algorithms,
                              const Projection& p, Plan& plan, cudaStream_t stream) {
  constexpr int kRounds = 2;
  constexpr float kGain = 0.98f;  // less is noise
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "a stream");
  if (!is_tried(p) || capture != cudaStreamCaptureStatusNone) return;
  const Event begin, end;
  float least = 0.0f;
  for (size_t i = 0; i < std::min(kMostTried, algorithms.size()); ++i) {
    run(plan, algorithms[i], p, stream);
    check_cuda(cudaEventRecord(begin.event, stream), "an event");
    for (int round = 0; round < kRounds; ++round) run(plan, algorithms[i], p, stream);
    check_cuda(cudaEventRecord(end.event, stream), "an event");
    check_cuda(cudaEventSynchronize(end.event), "products on trial");
    float time = 0.0f;
    check_cuda(cudaEventElapsedTime(&time, begin.event, end.event), "an event");
    if (i > 0 && time >= kGain * least) continue;
    least = time;
    plan.algorithm = algorithms[i];
  }
  tried_[key_of_trial(key)] = plan.algorithm;
}

// For a single row cuBLAS may sum in another order than for more, so it is computed as one of two.
void Products::project(const Projection& p, cudaStream_t stream) {
  if (p.rows == 0 || p.outputs == 0) return;
  if (has_few_row_kernel(p)) return project_few_rows(p, stream);
  if (p.rows > 1) return multiply(p, stream);
  const auto x_bytes = static_cast<size_t>(p.inputs * bytes_of(p.type));
  const auto y_bytes = static_cast<size_t>(p.outputs * bytes_of(p.y_type));
  const size_t y_place = (2 * x_bytes + 255) / 256 * 256, wanted = y_place + 2 * y_bytes;
  if (wanted > pair_bytes_) {
    check_cuda(cudaStreamSynchronize(stream), "a row's place");  // the old one may be in use
    check_cuda(cudaFree(pair_), "a row's place");
    pair_ = nullptr, pair_bytes_ = 0;
    check_cuda(cudaMalloc(&pair_, 2 * wanted), "a row's place");
    pair_bytes_ = 2 * wanted;
    check_cuda(cudaMemsetAsync(pair_, 0, pair_bytes_, stream), "a row's place");
  }
  Projection two = p;
  two.rows = 2, two.y_stride = 0;
  two.x = pair_;
  two.y = static_cast<char*>(pair_) + y_place;
  check_cuda(cudaMemcpyAsync(pair_, p.x, x_bytes, cudaMemcpyDeviceToDevice, stream), "a row");
  multiply(two, stream);
  check_cuda(cudaMemcpyAsync(p.y, two.y, y_bytes, cudaMemcpyDeviceToDevice, stream), "a row");
}

void Products::multiply(const Projection& p, cudaStream_t stream) {
  const Plan& plan = plan_of(p, stream);
  run(plan, plan.algorithm, p, stream);
}

void Products::run(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Projection& p,
                   cudaStream_t stream) {
  if (p.bias != nullptr) {
    check(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias,
                                         sizeof p.bias),
          "a bias");
  }
  const float one = 1.0f, zero = 0.0f;
  const cublasStatus_t status =
      cublasLtMatmul(handle_, plan.operation, &one, p.weight, plan.weight, p.x, plan.x, &zero, p.y,
                     plan.y, p.y, plan.y, &algorithm, workspace_, kWorkspaceBytes, stream);
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(fmt::format("cuBLASLt: a product of [{}, {}] and [{}, {}]: {}", p.rows, p.inputs,
                            p.inputs, p.outputs, cublasGetStatusString(status)));
  }
}

}  // namespace leeway::cuda
