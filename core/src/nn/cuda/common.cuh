// What all kernels share.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The type of the numbers that a kernel works on: who compiles it says which.
using T = NUMBER;

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)

// As a number would be after it was stored and read again.
__device__ __forceinline__ float rounded(float value) {
  return static_cast<float>(static_cast<T>(value));
}
