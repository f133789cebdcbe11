// y = x w^T, plus `onto` where there is one: x [rows, width], w [columns, width], onto and y [rows, columns].
#include "few_rows.cuh"

KERNEL(512) hob_product(const T* x, const T* w, const T* onto, T* y, int rows, int width, int columns, int with_onto) {
  const int first = blockIdx.x / hob::tiles_of(rows) * 16;
  // What lies beyond the last column is that column again, and is not written.
  auto weights = [&](int column) { return w + static_cast<long long>(min(column, columns - 1)) * width; };
  auto put = [&](int row, int column, float sum) {
    if (column < columns) {
      const long long at = static_cast<long long>(row) * columns + column;
      y[at] = static_cast<T>(with_onto ? rounded(sum) + static_cast<float>(onto[at]) : sum);
    }
  };
  hob::few_rows<false>(
      x, x, 0, rows, width,
      [&](int pair) { return weights(first + pair); },
      [&](int pair) { return weights(first + 8 + pair); },
      [&](int row, int pair, float low, float high) {
        put(row, first + pair, low);
        put(row, first + 8 + pair, high);
      });
}
