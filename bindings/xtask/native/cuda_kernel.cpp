// A kernel of Hob's own as an operation of MLX: mlx-c has no call for kernels that are compiled already. core/src/nn/cuda.rs calls it.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "mlx/mlx.h"

namespace mx = mlx::core;

extern "C" {

// As `Call` in core/src/nn/cuda.rs.
struct hob_cuda_call {
  const char* name;
  const char* code;  // PTX
  size_t code_size;
  void* const* inputs;  // the `ctx` of mlx_array
  size_t inputs_len;
  const int32_t* const* shapes;  // of the outputs
  const size_t* shapes_len;
  size_t outputs_len;
  int32_t float_bits;  // of the outputs: 32, 16, or -16 for bfloat16
  const int32_t* ints;
  size_t ints_len;
  const float* floats;
  size_t floats_len;
  int32_t blocks[2];
  int32_t threads;
  void* stream;  // the `ctx` of mlx_stream
};

// Puts a new array for each output into `outputs` (the `ctx` of mlx_array, for the caller to free). Returns 0, or 1 with the reason in
// `message`, which holds 256 bytes.
int hob_cuda_kernel(const hob_cuda_call* call, void** outputs, char* message) {
  std::string reason;
  try {
    std::vector<mx::array> inputs;
    for (size_t i = 0; i < call->inputs_len; ++i) {
      inputs.push_back(*static_cast<mx::array*>(call->inputs[i]));
    }
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < call->outputs_len; ++i) {
      shapes.emplace_back(call->shapes[i], call->shapes[i] + call->shapes_len[i]);
    }
    const mx::Dtype dtype = call->float_bits == 32 ? mx::float32 : call->float_bits == 16 ? mx::float16 : mx::bfloat16;
    std::vector<mx::fast::ScalarArg> scalars(call->ints, call->ints + call->ints_len);
    scalars.insert(scalars.end(), call->floats, call->floats + call->floats_len);
    // MLX counts the grid in threads.
    auto made = mx::fast::precompiled_cuda_kernel(
        call->name,
        std::string(call->code, call->code_size),
        inputs,
        shapes,
        std::vector<mx::Dtype>(call->outputs_len, dtype),
        scalars,
        {call->blocks[0] * call->threads, call->blocks[1], 1},
        {call->threads, 1, 1},
        0,
        std::nullopt,
        true,  // inputs that are not contiguous are copied
        *static_cast<mx::Stream*>(call->stream));
    for (size_t i = 0; i < made.size(); ++i) {
      outputs[i] = new mx::array(std::move(made[i]));
    }
    return 0;
  } catch (const std::exception& error) {
    reason = error.what();
  } catch (...) {
    reason = "unknown exception";
  }
  message[reason.copy(message, 255)] = 0;
  return 1;
}
}
