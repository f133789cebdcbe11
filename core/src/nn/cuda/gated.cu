// y = silu(n gw^T) * (n uw^T), where n is x [.., K], with NORM divided by its root mean square and multiplied by `scales`; gw and uw
// [N, K], N a multiple of eight.
const int width = gw_shape[1], outs = gw_shape[0], rows = hob::rows_of(x_shape, x_ndim);
const int first = blockIdx.x / hob::tiles_of(rows) * 8;
hob::few_rows<T, NORM>(
    x, scales, __int_as_float(EPS), rows, width,
    [&](int pair) { return gw + static_cast<long long>(first + pair) * width; },
    [&](int pair) { return uw + static_cast<long long>(first + pair) * width; },
    [&](int row, int pair, float gate, float up) {
      const float g = HOB_ROUND(T, gate);
      const float gated = HOB_ROUND(T, g / (1 + expf(-g)));
      y[static_cast<long long>(row) * outs + first + pair] = static_cast<T>(gated * HOB_ROUND(T, up));
    });
