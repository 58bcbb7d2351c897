#include "cuda/policy_head.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/device_part.h"
#include "cuda/products.h"
#include "leeway/error.h"

namespace leeway::cuda {
namespace {

constexpr int64_t kDefaultChunkBytes = int64_t{1} << 30;
constexpr int64_t kInvariantRows = 1024;
constexpr int64_t kTileRows = 128;  // of the GEMM kernels: chunks are whole tiles

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// How the rows are cut.
struct Cut {
  Dtype logit_type;
  int64_t stride;  // of a row of logits, in elements
  int64_t rows;    // of a chunk
};

Cut cut_of(const HeadProblem& problem, const HeadOptions& options) {
  Cut cut;
  cut.logit_type = options.float32_logits ? Dtype::float32 : problem.type;
  cut.stride = round_up(problem.vocabulary, 64);
  if (options.invariant) {
    cut.rows = kInvariantRows;
    return cut;
  }
  const int64_t bytes = options.chunk_bytes > 0 ? options.chunk_bytes : kDefaultChunkBytes;
  const int64_t row_bytes =
      cut.stride * bytes_of(cut.logit_type) + 2 * problem.hidden_size * bytes_of(problem.type);
  const int64_t most = std::max<int64_t>(1, bytes / row_bytes);
  const int64_t chunks = std::max<int64_t>(1, (problem.row_count + most - 1) / most);
  cut.rows = std::max<int64_t>(1, (problem.row_count + chunks - 1) / chunks);
  cut.rows = std::min(round_up(cut.rows, kTileRows), most);
  return cut;
}

struct Workspace {
  void *logits, *hidden, *d_hidden;
  float *log_sums, *entropy, *g, *target_logits;  // [N]
  LossWorkspace loss;
};

Workspace lay_out(const HeadProblem& problem, const Cut& cut, const LossPlan* plan,
                  int64_t sequences, Arena& arena) {
  Workspace work{};
  work.logits = arena.take<char>(cut.rows * cut.stride * bytes_of(cut.logit_type));
  work.hidden = arena.take<char>(cut.rows * problem.hidden_size * bytes_of(problem.type));
  work.d_hidden = arena.take<char>(cut.rows * problem.hidden_size * bytes_of(problem.type));
  work.log_sums = arena.take<float>(problem.tokens);
  work.entropy = arena.take<float>(problem.tokens);
  work.g = arena.take<float>(problem.tokens);
  if (cut.logit_type == Dtype::bf16) work.target_logits = arena.take<float>(problem.tokens);
  if (plan != nullptr) {
    char* const place = arena.take<char>(loss_workspace_bytes(*plan, problem.tokens, sequences));
    if (place != nullptr) work.loss = lay_out_loss(*plan, problem.tokens, sequences, place);
  }
  return work;
}

cudaDataType_t blas_type(Dtype type) { return type == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// One call's chunks, one after the other.
class Head {
 public:
  Head(cublasHandle_t blas, cudaStream_t stream, const HeadProblem& problem,
       const HeadOptions& options, const Workspace& work, float* logprobs, float* entropy)
      : blas_(blas),
        stream_(stream),
        problem_(problem),
        options_(options),
        cut_(cut_of(problem, options)),
        work_(work) {
    cublasSetSmCountTarget(blas, multiprocessors_of(stream));
    chunk_.rows = problem.rows;
    chunk_.targets = problem.targets;
    chunk_.temperature = problem.temperature;
    chunk_.temperature_per_token = problem.temperature_per_token;
    chunk_.logprobs = logprobs;
    chunk_.entropy = entropy;
    chunk_.log_sums = work.log_sums;
    chunk_.target_logits = work.target_logits;
  }

  const RowChunk& chunk() const { return chunk_; }
  LogitRows logits() const {
    return {work_.logits, cut_.stride, problem_.vocabulary, cut_.logit_type};
  }

  template <class Each>
  void for_each_chunk(Each each) {
    for (int64_t first = 0; first < problem_.row_count; first += cut_.rows) go_to(first), each();
  }

  // The way back after a forward pass over all chunks: the last one's logits are still there; those
  // of the others are recomputed before `each`.
  template <class Each>
  void for_each_chunk_again(Each each) {
    chunk_.log_sums_known = true;
    const int64_t last = (problem_.row_count - 1) / cut_.rows * cut_.rows;
    for (int64_t first = last; first >= 0 && problem_.row_count > 0; first -= cut_.rows) {
      go_to(first);
      if (first != last) make_logits();
      each();
    }
  }

  // Z = h W^T.
  void make_logits() {
    const int64_t rows = product_rows();
    gather_rows(problem_.hidden, problem_.hidden_stride, problem_.hidden_size, problem_.type,
                chunk_, rows, work_.hidden, stream_);
    if (options_.products != nullptr && problem_.type == Dtype::bf16) {
      Projection projection;
      projection.y_type = cut_.logit_type;
      projection.rows = rows;
      projection.inputs = problem_.hidden_size, projection.outputs = problem_.vocabulary;
      projection.x = work_.hidden, projection.weight = problem_.weight;
      projection.y = work_.logits, projection.y_stride = cut_.stride;
      options_.products->project(projection, stream_);
    } else {
      product(CUBLAS_OP_T, CUBLAS_OP_N, problem_.vocabulary, rows, problem_.hidden_size,
              problem_.weight, problem_.hidden_size, work_.hidden, problem_.hidden_size,
              work_.logits, cut_.logit_type, cut_.stride, 0.0f);
    }
    if (chunk_.target_logits != nullptr && !chunk_.log_sums_known) {
      find_target_logits(work_.hidden, problem_.weight, problem_.hidden_size, problem_.vocabulary,
                         problem_.type, chunk_, stream_);
    }
  }

  // dh = Z W and dW += Z^T h, Z holding the gradient.
  void make_gradients(const HeadGradients& gradients, const float* g, const float* g_entropy) {
    const int64_t H = problem_.hidden_size, V = problem_.vocabulary, rows = chunk_.count;
    // A bf16 gradient in the memory of float32 logits has rows with twice the stride.
    const int64_t stride = cut_.stride * bytes_of(cut_.logit_type) / bytes_of(problem_.type);
    if (gradients.d_hidden != nullptr) {
      const bool in_place = problem_.rows == nullptr;
      void* const to = in_place ? static_cast<char*>(gradients.d_hidden) +
                                      chunk_.first * H * bytes_of(problem_.type)
                                : work_.d_hidden;
      product(CUBLAS_OP_N, CUBLAS_OP_N, H, rows, V, problem_.weight, H, work_.logits, stride, to,
              problem_.type, H, 0.0f);
      if (!in_place) {
        scatter_rows(to, H, problem_.type, chunk_, gradients.d_hidden, stream_);
      }
    }
    if (gradients.d_weight != nullptr) {
      clear_rows(work_.hidden, H, problem_.type, chunk_, g, g_entropy, stream_);
      product(CUBLAS_OP_N, CUBLAS_OP_T, H, V, rows, work_.hidden, H, work_.logits, stride,
              gradients.d_weight, gradients.d_weight_type, H,
              gradients.d_weight_is_new && !d_weight_begun_ ? 0.0f : 1.0f);
      d_weight_begun_ = true;
    }
  }

 private:
  void go_to(int64_t first) {
    chunk_.first = first;
    chunk_.count = std::min(cut_.rows, problem_.row_count - first);
  }
  int64_t product_rows() const { return options_.invariant ? cut_.rows : chunk_.count; }

  // Column-major: C [m, n] = A B (+ C), inputs of the problem's type.
  void product(cublasOperation_t a_op, cublasOperation_t b_op, int64_t m, int64_t n, int64_t k,
               const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* c,
               Dtype c_type, int64_t c_stride, float beta) {
    const float alpha = 1.0f;
    const cudaDataType_t type = blas_type(problem_.type);
    const cublasStatus_t status = cublasGemmEx_64(
        blas_, a_op, b_op, m, n, k, &alpha, a, type, a_stride, b, type, b_stride, &beta, c,
        blas_type(c_type), c_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) {
      throw Error(fmt::format("cuBLAS: a product of [{}, {}] and [{}, {}]: {}", m, k, k, n,
                              cublasGetStatusString(status)));
    }
  }

  cublasHandle_t blas_;
  cudaStream_t stream_;
  const HeadProblem& problem_;
  const HeadOptions& options_;
  const Cut cut_;
  const Workspace& work_;
  RowChunk chunk_;
  bool d_weight_begun_ = false;
};

void clear(void* memory, int64_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream), "clearing memory");
}

// Rows that are not listed have no gradient.
void clear_unlisted(const HeadProblem& problem, const HeadGradients& gradients,
                    cudaStream_t stream) {
  const int64_t H = problem.hidden_size;
  if (gradients.d_hidden != nullptr && problem.rows != nullptr) {
    clear(gradients.d_hidden, problem.tokens * H * bytes_of(problem.type), stream);
  }
  if (gradients.d_weight != nullptr && gradients.d_weight_is_new && problem.row_count == 0) {
    clear(gradients.d_weight, problem.vocabulary * H * bytes_of(gradients.d_weight_type), stream);
  }
}

Workspace workspace_of(const HeadProblem& problem, const HeadOptions& options, const LossPlan* plan,
                       int64_t sequences, void* memory) {
  Arena arena(memory);
  return lay_out(problem, cut_of(problem, options), plan, sequences, arena);
}

}  // namespace

void check_head(const HeadProblem& problem, const HeadOptions& options) {
  const Dtype type = options.float32_logits ? Dtype::float32 : problem.type;
  if (problem.vocabulary <= most_vocabulary(type)) return;
  throw Error(fmt::format("a vocabulary of {} does not fit: the CUDA head supports at most {}{}",
                          problem.vocabulary, most_vocabulary(type),
                          type == Dtype::float32 ? ", twice that with bf16 logits" : ""));
}

int64_t head_workspace_bytes(const HeadProblem& problem, const HeadOptions& options,
                             const LossPlan* plan, int64_t sequences) {
  Arena arena(nullptr);
  lay_out(problem, cut_of(problem, options), plan, sequences, arena);
  return arena.used();
}

void head_logprobs(cublasHandle_t blas, cudaStream_t stream, const HeadProblem& problem,
                   const HeadOptions& options, void* workspace, float* logprobs, float* entropy) {
  const Workspace work = workspace_of(problem, options, nullptr, 0, workspace);
  if (problem.rows != nullptr) {
    clear(logprobs, problem.tokens * 4, stream);
    if (entropy != nullptr) clear(entropy, problem.tokens * 4, stream);
  }
  Head head(blas, stream, problem, options, work, logprobs, entropy);
  head.for_each_chunk([&] {
    head.make_logits();
    forward_rows(head.logits(), head.chunk(), stream);
  });
}

void head_backward(cublasHandle_t blas, cudaStream_t stream, const HeadProblem& problem,
                   const HeadOptions& options, void* workspace, const float* g,
                   const float* g_entropy, const HeadGradients& gradients) {
  const Workspace work = workspace_of(problem, options, nullptr, 0, workspace);
  clear_unlisted(problem, gradients, stream);
  Head head(blas, stream, problem, options, work, nullptr, nullptr);
  head.for_each_chunk([&] {
    head.make_logits();
    gradient_rows(head.logits(), head.chunk(), problem.type, g, g_entropy, stream);
    head.make_gradients(gradients, g, g_entropy);
  });
}

void policy_head(cublasHandle_t blas, cudaStream_t stream, const HeadProblem& problem,
                 const HeadOptions& options, void* workspace, const LossPlan& plan,
                 const LossBatch& batch, double denominator, float* loss, float* logprobs,
                 float* entropy, double* metrics, const HeadGradients& gradients) {
  const Workspace work = workspace_of(problem, options, &plan, batch.sequences, workspace);
  LossBatch scored = batch;
  scored.streams[static_cast<int>(Stream::pi)] = logprobs;
  if (batch.prox_is_pi) scored.streams[static_cast<int>(Stream::prox)] = logprobs;
  if (problem.rows != nullptr) {
    mark_not_computed(logprobs, problem.tokens, stream);
    clear(entropy, problem.tokens * 4, stream);
    clear(work.g, problem.tokens * 4, stream);
  }
  const bool wants_gradient = gradients.d_hidden != nullptr || gradients.d_weight != nullptr;
  Head head(blas, stream, problem, options, work, logprobs, entropy);
  const bool once = wants_gradient && plan.token_level;
  if (once) {
    clear_unlisted(problem, gradients, stream);
    prepare_scales(plan, scored, denominator, work.loss, stream);
  }
  head.for_each_chunk([&] {
    head.make_logits();
    if (!once) return forward_rows(head.logits(), head.chunk(), stream);
    loss_rows(head.logits(), head.chunk(), problem.type, plan, scored, work.loss, work.g, stream);
    head.make_gradients(gradients, work.g, nullptr);
  });
  policy_loss(plan, scored, denominator, work.g, loss, metrics, work.loss, once, stream);
  if (wants_gradient && !once) {
    clear_unlisted(problem, gradients, stream);
    head.for_each_chunk_again([&] {
      gradient_rows(head.logits(), head.chunk(), problem.type, work.g, nullptr, stream);
      head.make_gradients(gradients, work.g, nullptr);
    });
  }
  if (problem.rows != nullptr) clear_not_computed(logprobs, problem.tokens, stream);
}

}  // namespace leeway::cuda
