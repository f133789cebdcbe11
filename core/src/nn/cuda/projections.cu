// q = n qw^T + qb, and k and v alike, where n is x [rows, width], with NORM divided by its root mean square and multiplied by `scales`;
// q_columns and kv_columns are multiples of sixteen.
#include "few_rows.cuh"

KERNEL(512) hob_projections(
    const T* x, const T* scales, const T* qw, const T* kw, const T* vw, const T* qb, const T* kb, const T* vb, T* q, T* k, T* v, int rows,
    int width, int q_columns, int kv_columns, int biased, float eps) {
  int unit = blockIdx.x / hob::tiles_of(rows);
  const int q_units = q_columns / 16, kv_units = kv_columns / 16;
  const bool is_q = unit < q_units, is_k = !is_q && unit < q_units + kv_units;
  unit -= is_q ? 0 : is_k ? q_units : q_units + kv_units;
  const T* w = is_q ? qw : is_k ? kw : vw;
  const T* bias = is_q ? qb : is_k ? kb : vb;
  T* y = is_q ? q : is_k ? k : v;
  const int first = unit * 16, columns = is_q ? q_columns : kv_columns;
  auto put = [&](int row, int column, float sum) {
    y[static_cast<long long>(row) * columns + column] = static_cast<T>(biased ? sum + static_cast<float>(bias[column]) : sum);
  };
  hob::few_rows<NORM>(
      x, scales, eps, rows, width,
      [&](int pair) { return w + static_cast<long long>(first + pair) * width; },
      [&](int pair) { return w + static_cast<long long>(first + 8 + pair) * width; },
      [&](int row, int pair, float low, float high) {
        put(row, first + pair, low);
        put(row, first + 8 + pair, high);
      });
}
