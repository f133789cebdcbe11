// Joins what attend.cu leaves of several chunks: x [B * H, chunks, D + 2], y [B * H, D].
#include "common.cuh"

KERNEL(256) hob_join_chunks(const float* x, T* y, int chunks) {
  const int D = blockDim.x, d = threadIdx.x;
  const float* at = x + static_cast<long long>(blockIdx.x) * chunks * (D + 2);
  float highest = __int_as_float(0xff800000);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    highest = fmaxf(highest, at[chunk * (D + 2) + D + 1]);
  }
  float joined = 0, whole = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const float* part = at + chunk * (D + 2);
    const float fade = exp2f(part[D + 1] - highest);
    joined += part[d] * fade;
    whole += part[D] * fade;
  }
  y[static_cast<long long>(blockIdx.x) * D + d] = static_cast<T>(joined / whole);
}
