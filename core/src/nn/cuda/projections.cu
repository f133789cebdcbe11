// q = n qw^T + qb, and k and v alike, where n is x [.., K], with NORM divided by its root mean square and multiplied by `scales`.
const int width = qw_shape[1], rows = hob::rows_of(x_shape, x_ndim);
int unit = blockIdx.x / hob::tiles_of(rows);
const int q_units = qw_shape[0] / 16, k_units = kw_shape[0] / 16;
const bool is_q = unit < q_units, is_k = !is_q && unit < q_units + k_units;
unit -= is_q ? 0 : is_k ? q_units : q_units + k_units;
const T* w = is_q ? qw : is_k ? kw : vw;
const T* bias = is_q ? qb : is_k ? kb : vb;
T* y = is_q ? q : is_k ? k : v;
const int first = unit * 16, outs = is_q ? qw_shape[0] : kw_shape[0];
auto put = [&](int row, int column, float sum) {
  y[static_cast<long long>(row) * outs + column] = static_cast<T>(BIAS ? sum + static_cast<float>(bias[column]) : sum);
};
hob::few_rows<T, NORM>(
    x, scales, __int_as_float(EPS), rows, width,
    [&](int pair) { return w + static_cast<long long>(first + pair) * width; },
    [&](int pair) { return w + static_cast<long long>(first + 8 + pair) * width; },
    [&](int row, int pair, float low, float high) {
      put(row, first + pair, low);
      put(row, first + 8 + pair, high);
    });
