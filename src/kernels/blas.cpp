#include "kernels/blas.h"

#include <dlfcn.h>

#include <algorithm>

#include "leeway/error.h"

namespace leeway {
namespace {

using Sgemm = void(const char*, const char*, const int*, const int*, const int*, const float*,
                   const float*, const int*, const float*, const int*, const float*, float*,
                   const int*);

// The Fortran entry point, which every BLAS exports. Each call runs on one thread: our threads
// share the work.
Sgemm* find_sgemm() {
  for (const char* name : {"libopenblas.so.0", "libmkl_rt.so.2", "libblis.so.4", "libblas.so.3"}) {
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    using SetThreads = void(int);
    for (const char* setter :
         {"openblas_set_num_threads", "MKL_Set_Num_Threads", "bli_thread_set_num_threads"}) {
      if (auto* set = reinterpret_cast<SetThreads*>(dlsym(library, setter))) set(1);
    }
    if (auto* sgemm = reinterpret_cast<Sgemm*>(dlsym(library, "sgemm_"))) return sgemm;
  }
  return nullptr;
}

Sgemm* sgemm() {
  static Sgemm* const found = find_sgemm();
  return found;
}

}  // namespace

void require_blas() {
  if (sgemm() == nullptr) {
    throw Error(
        "numerics = \"fast\" needs a BLAS and none was found: install libopenblas0-pthread, or use "
        "numerics = \"exact\"");
  }
}

void multiply(Team& team, Numerics numerics, int64_t m, int64_t n, int64_t k, const Operand& a,
              const Operand& b, float* c, int64_t ldc, Start start) {
  if (numerics == Numerics::exact) return gemm(team, m, n, k, a, b, c, ldc, start);
  LEEWAY_CHECK(sgemm() != nullptr, "require_blas must be called first");
  LEEWAY_CHECK(!a.bf16 && !b.bf16, "operands are float32");
  // Row-major C = A B is column-major C^T = B^T A^T. Each team member computes a slice of rows.
  const int64_t slice = (m + team.size() - 1) / team.size();
  team.for_each(team.size(), [&](int64_t part) {
    const int64_t first = part * slice, rows = std::min(slice, m - first);
    if (rows <= 0 || n == 0) return;
    const auto leading = [](const Operand& x) {
      return static_cast<int>(x.column_stride == 1 ? x.row_stride : x.column_stride);
    };
    const auto flag = [](const Operand& x) { return x.column_stride == 1 ? "N" : "T"; };
    const int columns = static_cast<int>(n), row_count = static_cast<int>(rows);
    const int depth = static_cast<int>(k), lda = leading(a), ldb = leading(b);
    const int ldc_int = static_cast<int>(ldc);
    const float one = 1.0f, beta = start == Start::zero ? 0.0f : 1.0f;
    sgemm()(flag(b), flag(a), &columns, &row_count, &depth, &one, static_cast<const float*>(b.data),
            &ldb, static_cast<const float*>(a.data) + first * a.row_stride, &lda, &beta,
            c + first * ldc, &ldc_int);
  });
}

}  // namespace leeway
