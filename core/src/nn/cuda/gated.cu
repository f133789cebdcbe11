// y = silu(n gw^T) * (n uw^T), where n is x [rows, width], with NORM divided by its root mean square and multiplied by `scales`; gw and
// uw [columns, width], a multiple of eight columns.
#include "few_rows.cuh"

KERNEL(512) hob_gated(
    const T* x, const T* scales, const T* gw, const T* uw, T* y, int rows, int width, int columns, float eps) {
  const int first = blockIdx.x / hob::tiles_of(rows) * 8;
  hob::few_rows<NORM>(
      x, scales, eps, rows, width,
      [&](int pair) { return gw + static_cast<long long>(first + pair) * width; },
      [&](int pair) { return uw + static_cast<long long>(first + pair) * width; },
      [&](int row, int pair, float gate, float up) {
        const float g = rounded(gate);
        y[static_cast<long long>(row) * columns + first + pair] = static_cast<T>(rounded(g / (1 + expf(-g))) * rounded(up));
      });
}
