// y = x w^T, plus `onto` if there is one: x [.., K], w [N, K], onto and y [.., N].
const int width = w_shape[1], outs = w_shape[0], rows = hob::rows_of(x_shape, x_ndim);
const int first = blockIdx.x / hob::tiles_of(rows) * 16;
// What lies beyond the last column is that column again, and is not written.
auto weights = [&](int column) { return w + static_cast<long long>(::min(column, outs - 1)) * width; };
auto put = [&](int row, int column, float sum) {
  if (column < outs) {
    const long long at = static_cast<long long>(row) * outs + column;
    y[at] = static_cast<T>(ONTO ? HOB_ROUND(T, sum) + static_cast<float>(onto[at]) : sum);
  }
};
hob::few_rows<T, false>(
    x, x, 0, rows, width,
    [&](int pair) { return weights(first + pair); },
    [&](int pair) { return weights(first + 8 + pair); },
    [&](int row, int pair, float low, float high) {
      put(row, first + pair, low);
      put(row, first + 8 + pair, high);
    });
