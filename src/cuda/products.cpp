#include "cuda/products.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "cuda/coded_products.h"
#include "cuda/coded_rows.h"
#include "cuda/device.h"
#include "cuda/device_part.h"
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
// Of codes: what the algorithm for all numbers of rows is chosen for, and what is asked of arrays.
constexpr int64_t kRowsOfCodes = 256;
constexpr int kAlignmentOfCodes = 16;

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(fmt::format("cuBLASLt: {}: {}", what, cublasGetStatusString(status)));
}

cudaDataType_t type_of(Dtype type) { return type == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

bool is_coded(const Projection& p) { return p.x_scales != nullptr; }
cudaDataType_t input_type(const Projection& p) {
  return is_coded(p) ? CUDA_R_8F_E4M3 : type_of(p.type);
}
int64_t input_bytes(const Projection& p) { return is_coded(p) ? 1 : bytes_of(p.type); }

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
  for (void* place : old_places_) cudaFree(place);
  cudaFree(wide_);
  cudaFree(pair_);
  cudaFree(workspace_);
  cublasLtDestroy(handle_);
}

Products::Key Products::key_of(const Projection& p) const {
  const auto alignment = [&](const void* pointer) {
    return is_coded(p) ? kAlignmentOfCodes : alignment_of(pointer);
  };
  constexpr int kCoded = 2;  // beside the types of numbers
  const int type = is_coded(p) ? kCoded : static_cast<int>(p.type);
  return {type,
          static_cast<int>(p.y_type),
          p.rows,
          p.inputs,
          p.outputs,
          stride_of(p),
          p.bias != nullptr,
          p.weight_by_inputs,
          alignment(p.weight),
          alignment(p.x),
          alignment(p.y),
          alignment(p.bias)};
}

// cuBLAS counts columns first: y^T [outputs, rows] = weight [outputs, inputs] x^T.
void Products::describe(const Projection& p, Plan& plan) const {
  check(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product");
  const auto set = [&](cublasLtMatmulDescAttributes_t name, const auto& value) {
    check(cublasLtMatmulDescSetAttribute(plan.operation, name, &value, sizeof value),
          "a product's attribute");
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.weight_by_inputs ? CUBLAS_OP_N : CUBLAS_OP_T);
  if (multiprocessors_ > 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, multiprocessors_);
  if (is_coded(p)) {
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
    if (scales_ == Scales::by_library) {
      constexpr int32_t kOfEachRow = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
      set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, kOfEachRow);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, kOfEachRow);
      set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.weight_scales);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.x_scales);
    }
  }
  if (p.bias != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.y_type));
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
  const auto layout = [](cublasLtMatrixLayout_t* to, cudaDataType_t type, int64_t height,
                         int64_t width, int64_t stride) {
    check(cublasLtMatrixLayoutCreate(to, type, static_cast<uint64_t>(height),
                                     static_cast<uint64_t>(width), stride),
          "a matrix");
  };
  if (p.weight_by_inputs) {
    layout(&plan.weight, input_type(p), p.outputs, p.inputs, p.outputs);
  } else {
    layout(&plan.weight, input_type(p), p.inputs, p.outputs, p.inputs);
  }
  layout(&plan.x, input_type(p), p.inputs, p.rows, p.inputs);
  layout(&plan.y, type_of(p.y_type), p.outputs, p.rows, stride_of(p));
}

// Those that keep the order of sums, the best first.
std::vector<cublasLtMatmulAlgo_t> Products::algorithms_of(const Key& key, const Plan& plan) {
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
  const auto weight = static_cast<uint32_t>(std::get<8>(key));
  const auto x = static_cast<uint32_t>(std::get<9>(key));
  const auto y = static_cast<uint32_t>(std::get<10>(key));
  keep(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, weight));
  keep(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x));
  keep(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, y));
  keep(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, y));
  std::vector<cublasLtMatmulHeuristicResult_t> found(kCandidates);
  int count = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasLtMatmulAlgoGetHeuristic(handle_, plan.operation, plan.weight, plan.x, plan.y,
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
        "cuBLASLt has no algorithm for a product of [{0}, {1}] and [{1}, {2}] that keeps the order "
        "of its sums",
        std::get<2>(key), std::get<3>(key), std::get<4>(key)));
  }
  return in_order;
}

const Products::Plan& Products::plan_of(const Projection& p, cudaStream_t stream) {
  const Key key = key_of(p);
  const auto [at, is_new] = plans_.try_emplace(key);
  Plan& plan = at->second;
  if (!is_new) return plan;
  multiprocessors_ = multiprocessors_of(stream);
  try {
    describe(p, plan);
    if (is_coded(p)) {
      choose_for_codes(key, p, plan);
    } else if (!choose_tried(key, p, plan)) {
      const std::vector<cublasLtMatmulAlgo_t> in_order = algorithms_of(key, plan);
      plan.algorithm = in_order.front();
      try_algorithms(key, in_order, p, plan, stream);
    }
  } catch (...) {
    plans_.erase(at);
    throw;
  }
  return plan;
}

// Algorithms may differ in how many inputs the tensor cores sum before float32 does, so that a
// number of rows must not decide between them.
void Products::choose_for_codes(const Key& key, const Projection& p, Plan& plan) {
  Projection usual = p;
  usual.rows = kRowsOfCodes;
  Plan other;
  describe(usual, other);
  for (const cublasLtMatmulAlgo_t& algorithm : algorithms_of(key, other)) {
    plan.algorithm = algorithm;
    if (accepts(plan, algorithm)) return;
  }
  throw Error(fmt::format("cuBLASLt has no algorithm for a product of codes of {} rows", p.rows));
}

bool Products::accepts(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm) {
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(
      handle_, plan.operation, plan.weight, plan.x, plan.y, plan.y, &algorithm, &result);
  return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kWorkspaceBytes;
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
  if (!accepts(plan, known->second)) return false;
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

void Products::reserve(void*& place, size_t& bytes, size_t wanted, cudaStream_t stream) {
  if (wanted <= bytes) return;
  // Work that is queued and captured graphs may use the old one. Sizes double, so that all old ones
  // together are no more than the new one.
  if (place != nullptr) old_places_.push_back(place);
  place = nullptr, bytes = 0;
  check_cuda(cudaMalloc(&place, 2 * wanted), "a place for rows");
  bytes = 2 * wanted;
  check_cuda(cudaMemsetAsync(place, 0, bytes, stream), "a place for rows");
}

void Products::change_stream() {
  plans_.clear();
  tried_.clear();
}

void Products::project(const Projection& p, cudaStream_t stream) {
  if (p.rows == 0 || p.outputs == 0) return;
  if (is_coded(p)) {
    if (has_coded_kernel(p)) return project_coded(p, stream);
    return project_codes_by_library(p, stream);
  }
  if (has_few_row_kernel(p)) return project_few_rows(p, stream);
  p.rows > 1 ? multiply(p, stream) : multiply_one_row(p, stream);
}

// For a single row cuBLAS may sum in another order than for more, so it is computed as one of two.
void Products::multiply_one_row(const Projection& p, cudaStream_t stream) {
  const auto part = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  const auto x_bytes = static_cast<size_t>(p.inputs * input_bytes(p));
  const auto y_bytes = static_cast<size_t>(p.outputs * bytes_of(p.y_type));
  const size_t scales_place = part(2 * x_bytes), y_place = scales_place + 256;
  reserve(pair_, pair_bytes_, y_place + 2 * y_bytes, stream);
  char* const pair = static_cast<char*>(pair_);
  Projection two = p;
  two.rows = 2, two.y_stride = 0;
  two.x = pair;
  two.y = pair + y_place;
  const auto copy = [&](void* to, const void* from, size_t bytes) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "a row");
  };
  copy(pair, p.x, x_bytes);
  if (is_coded(p)) {
    two.x_scales = reinterpret_cast<float*>(pair + scales_place);
    copy(pair + scales_place, p.x_scales, sizeof(float));
  }
  multiply(two, stream);
  copy(p.y, two.y, y_bytes);
}

// Tries it with few numbers. Not while a graph is captured: the first product of codes is not.
bool Products::library_scales(cudaStream_t stream) {
  if (scales_ != Scales::unknown) return scales_ == Scales::by_library;
  constexpr int64_t kRows = 32, kInputs = 128, kOutputs = 128;
  constexpr size_t kBytes = (kRows + kOutputs) * (kInputs + sizeof(float)) + 2 * kRows * kOutputs;
  reserve(wide_, wide_bytes_, kBytes, stream);
  char* place = static_cast<char*>(wide_);
  const auto take = [&](size_t bytes) { return std::exchange(place, place + bytes); };
  Projection trial;
  trial.rows = kRows, trial.inputs = kInputs, trial.outputs = kOutputs;
  trial.x = take(kRows * kInputs), trial.weight = take(kOutputs * kInputs);
  trial.x_scales = reinterpret_cast<float*>(take(kRows * sizeof(float)));
  trial.weight_scales = reinterpret_cast<float*>(take(kOutputs * sizeof(float)));
  trial.y = place;
  scales_ = Scales::by_library;
  try {
    multiply(trial, stream);
    check_cuda(cudaStreamSynchronize(stream), "a product on trial");
  } catch (const Error&) {
    plans_.erase(key_of(trial));
    scales_ = Scales::apart;
  }
  return scales_ == Scales::by_library;
}

void Products::project_codes_by_library(const Projection& p, cudaStream_t stream) {
  if (p.rows == 0 || p.outputs == 0) return;
  if (library_scales(stream)) {
    return p.rows > 1 ? multiply(p, stream) : multiply_one_row(p, stream);
  }
  const int64_t numbers = p.rows * p.outputs;
  reserve(wide_, wide_bytes_, static_cast<size_t>(numbers) * sizeof(float), stream);
  Projection wide = p;
  wide.y = wide_, wide.y_type = Dtype::float32, wide.y_stride = 0, wide.bias = nullptr;
  p.rows > 1 ? multiply(wide, stream) : multiply_one_row(wide, stream);
  scale_products({p.rows, p.outputs, static_cast<const float*>(wide_), p.x_scales, p.weight_scales,
                  p.bias, p.y, stride_of(p)},
                 stream);
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
  if (is_coded(p) && scales_ == Scales::by_library) {
    const auto set = [&](cublasLtMatmulDescAttributes_t name, const float* scales) {
      check(cublasLtMatmulDescSetAttribute(plan.operation, name, &scales, sizeof scales), "scales");
    };
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.weight_scales);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.x_scales);
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
