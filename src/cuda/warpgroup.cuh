// Hopper's instructions that have no other spelling: matrix products of a warpgroup (four warps,
// 64 rows), which run while its warps go on, barriers in shared memory, and registers that move
// from one warpgroup to another. They need code for sm_90a; what includes this is compiled for
// nothing else.
#pragma once

#include <cstdint>

namespace leeway::cuda::warpgroup {

inline constexpr int kThreads = 128;
inline constexpr int kRows = 64;

// ---------------------------------------------------------------------------------------------
// Products. Of the 64 rows each warp has 16, and a lane holds of them what it holds in
// mma.m16n8k16: of c rows lane / 4 and 8 further, columns 8 n + 2 (lane % 4) and the next.

// Rows of 128 bytes whose pieces of 16 bytes are permuted: piece p of row r lies at p ^ r % 8.
// Eight rows are contiguous and begin at a multiple of 1024 bytes. A wider matrix continues
// `next_columns` bytes further.
__device__ __forceinline__ uint64_t matrix(uint32_t address, uint32_t next_columns) {
  constexpr uint64_t kPermuted = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kPermuted | kEightRows | uint64_t{next_columns / 16} << 16 | (address & 0x3ffff) / 16;
}

// Before products whose registers other instructions have written.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a group of products.
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The operands of 16 and 32 registers: rows n .. of c.
#define LEEWAY_FOUR(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define LEEWAY_SIXTEEN(c, n) \
  LEEWAY_FOUR(c, n), LEEWAY_FOUR(c, n + 1), LEEWAY_FOUR(c, n + 2), LEEWAY_FOUR(c, n + 3)
#define LEEWAY_THIRTY_TWO(c, n) LEEWAY_SIXTEEN(c, n), LEEWAY_SIXTEEN(c, n + 4)

// c [64, 64] (+)= a [64, 16] b [16, 64]. `a` is in registers, as mma.m16n8k16 has it; `b` is a
// matrix of columns or, turned, of rows. With `keep` 0 c begins with nothing.
template <bool kTurned>
__device__ __forceinline__ void multiply_add(float (&c)[8][4], const uint32_t* a, uint64_t b,
                                             int keep) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, keep, 1, 1, %38;\n}"
      : LEEWAY_THIRTY_TWO(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(kTurned ? 1 : 0));
}
// The same with b [16, 128].
template <bool kTurned>
__device__ __forceinline__ void multiply_add(float (&c)[16][4], const uint32_t* a, uint64_t b,
                                             int keep) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, keep, 1, 1, %70;\n}"
      : LEEWAY_THIRTY_TWO(c, 0), LEEWAY_THIRTY_TWO(c, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(kTurned ? 1 : 0));
}

// Waits until at most kLater ended groups of products run. `c` is what is read next: naming it
// keeps its use behind the wait.
template <int kLater>
__device__ __forceinline__ void wait_for_products(float (&c)[8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;"
               : LEEWAY_THIRTY_TWO(c, 0)
               : "n"(kLater)
               : "memory");
}
template <int kLater>
__device__ __forceinline__ void wait_for_products(float (&c)[16][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;"
               : LEEWAY_THIRTY_TWO(c, 0), LEEWAY_THIRTY_TWO(c, 8)
               : "n"(kLater)
               : "memory");
}
#undef LEEWAY_THIRTY_TWO
#undef LEEWAY_SIXTEEN
#undef LEEWAY_FOUR

// Keeps what computes the numbers before a wait for products that follows: the assembler would wait
// first and compute then, while no product runs. It does not know that the numbers are not
// negative, so that nothing is ever written to `memory`.
__device__ __forceinline__ void finish_before_wait(float x, float y, uint32_t memory) {
  asm volatile(
      "{\n.reg .pred negative;\n"
      "setp.lt.f32 negative, %0, 0f00000000;\n@negative st.shared.f32 [%2], %0;\n"
      "setp.lt.f32 negative, %1, 0f00000000;\n@negative st.shared.f32 [%2], %1;\n}" ::"f"(x),
      "f"(y), "r"(memory)
      : "memory");
}

// ---------------------------------------------------------------------------------------------
// Barriers

__device__ __forceinline__ void make_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of a phase of this parity.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Waits until kCount threads have come to one of the block's numbered barriers, or have announced
// that they need not wait there.
template <int kCount>
__device__ __forceinline__ void synchronize(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kCount) : "memory");
}
template <int kCount>
__device__ __forceinline__ void announce(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kCount) : "memory");
}
// What this thread has written to shared memory is there for the products of others, once they
// know.
__device__ __forceinline__ void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---------------------------------------------------------------------------------------------
// Registers

// From now on each thread of the warpgroup has kCount registers, which are fewer than before.
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
// The same with more, as soon as others have given them.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace leeway::cuda::warpgroup
