// What the products of few rows share: y = x w^T for x [rows, width] and w [columns, width] of 16-bit numbers, added up in float32.
// The width is a multiple of 32.
//
// A block makes sixteen columns of eight rows: eight pairs of columns, which the caller chooses. Its warps share out the width, so that
// each weight is read once for all of them, by tensor cores: the weights are the left matrix of `mma.m16n8k16`, the rows of x the right
// one. Which of a row's numbers meet in one instruction is free as long as both matrices agree, so a thread reads eight neighbours at
// once. What a row gets does not depend on the others: a row is a column of the right matrix. Blocks of the same columns and other rows
// come next to each other, and find the weights in the second cache.
#include "common.cuh"

namespace hob {
enum { WARPS = 16, ROWS = 8, PAIRS = 8, ACROSS = 32 };

// How many blocks share the same columns.
__device__ __forceinline__ int tiles_of(int rows) {
  return (rows + ROWS - 1) / ROWS;
}

struct alignas(16) Pack {
  unsigned at[4];
};

__device__ __forceinline__ Pack kept(const void* at) {
  return *static_cast<const Pack*>(at);
}

// Weights are read once: they need no place in the first cache.
__device__ __forceinline__ Pack streamed(const void* at) {
  Pack pack;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(pack.at[0]), "=r"(pack.at[1]), "=r"(pack.at[2]), "=r"(pack.at[3])
      : "l"(at));
  return pack;
}

template <typename Two>
__device__ __forceinline__ Two& pair_at(unsigned& pair) {
  return *reinterpret_cast<Two*>(&pair);
}
__device__ __forceinline__ float2 numbers(unsigned pair, __nv_bfloat16) {
  return __bfloat1622float2(pair_at<__nv_bfloat162>(pair));
}
__device__ __forceinline__ float2 numbers(unsigned pair, __half) {
  return __half22float2(pair_at<__half2>(pair));
}
__device__ __forceinline__ void scale(unsigned& pair, unsigned by, __nv_bfloat16) {
  pair_at<__nv_bfloat162>(pair) = __hmul2(pair_at<__nv_bfloat162>(pair), pair_at<__nv_bfloat162>(by));
}
__device__ __forceinline__ void scale(unsigned& pair, unsigned by, __half) {
  pair_at<__half2>(pair) = __hmul2(pair_at<__half2>(pair), pair_at<__half2>(by));
}

#define HOB_MMA(TYPE)                                                                                                   \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                          \
      : "r"(low[0]), "r"(high[0]), "r"(low[1]), "r"(high[1]), "r"(x[0]), "r"(x[1]))
__device__ __forceinline__ void multiply(float* sum, const unsigned* low, const unsigned* high, const unsigned* x, __nv_bfloat16) {
  HOB_MMA("bf16");
}
__device__ __forceinline__ void multiply(float* sum, const unsigned* low, const unsigned* high, const unsigned* x, __half) {
  HOB_MMA("f16");
}
#undef HOB_MMA

// Calls done(row, pair, low, high) once for every row and pair of the block. low(pair) and high(pair) are the weights of its two
// columns. With NORMALISES the rows are divided by their root mean square and multiplied by `scales` on the way.
template <bool NORMALISES, typename Low, typename High, typename Done>
__device__ __forceinline__ void few_rows(
    const T* x, const T* scales, float eps, int rows, int width, Low low, High high, Done done) {
  __shared__ float sums[WARPS][ROWS][2 * PAIRS], squares[WARPS][ROWS];
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
  const int first = blockIdx.x % tiles_of(rows) * ROWS;
  const T* low_at = low(group) + member * 8;
  const T* high_at = high(group) + member * 8;
  // What lies beyond the last row is that row again, and is not written.
  const T* x_at = x + static_cast<long long>(min(first + group, rows - 1)) * width + member * 8;
  float sum[4] = {}, square = 0;

#pragma unroll 4
  for (int k = warp * ACROSS; k < width; k += WARPS * ACROSS) {
    const Pack a = streamed(low_at + k), b = streamed(high_at + k);
    Pack v = kept(x_at + k);
    if (NORMALISES) {
      const Pack by = kept(scales + k + member * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 value = numbers(v.at[i], T());
        square += value.x * value.x + value.y * value.y;
        scale(v.at[i], by.at[i], T());
      }
    }
    multiply(sum, a.at, b.at, v.at, T());
    multiply(sum, a.at + 2, b.at + 2, v.at + 2, T());
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums[warp][member * 2 + i % 2][group + i / 2 * PAIRS] = sum[i];
  }
  if (NORMALISES) {
    square += __shfl_xor_sync(0xffffffff, square, 1);
    square += __shfl_xor_sync(0xffffffff, square, 2);
    if (member == 0) {
      squares[warp][group] = square;
    }
  }
  __syncthreads();
  const int row = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS;
  if (row < ROWS && first + row < rows) {
    float a = 0, b = 0, all = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      a += sums[i][row][pair];
      b += sums[i][row][pair + PAIRS];
      all += NORMALISES ? squares[i][row] : 0;
    }
    const float by = NORMALISES ? rsqrtf(all / width + eps) : 1;
    done(first + row, pair, a * by, b * by);
  }
}
}  // namespace hob
