// Attention of each row's newest token: q [B, H, 1, D], k and v [B, KV, room, D] of which row b has used lens[b] + 1 places.
// SCALE holds the bits of the float that scores are multiplied by.
//
// A block serves one head of one row over CHUNK keys, and its warps take turns at them; each keeps a running softmax (Milakov and
// Gimelshein 2018), and these are joined at the end. One chunk: y is the result, [B, H, 1, D]. Several: y is float32 [B, H, chunks,
// D + 2], a chunk's weighted sum, its sum of weights and its highest score, for join_chunks.cu. What a row gets does not depend on
// the others, nor on how many chunks longer rows need.
constexpr int WARPS = 16, KEYS = 4, PER = D / 32;
constexpr bool WHOLE = (PER & (PER - 1)) == 0 && PER * sizeof(T) <= 16;
struct alignas(WHOLE ? PER * sizeof(T) : sizeof(T)) Part {
  T at[PER];
};
__shared__ float tops[WARPS], totals[WARPS], parts[WARPS][D];

const int heads = q_shape[1], row = blockIdx.x / heads, head = blockIdx.x % heads;
const int kv_head = head / (heads / k_shape[1]);
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
const int seen = ::min(lens[row] + 1, static_cast<int>(blockIdx.y + 1) * CHUNK);
const float minus_infinity = __int_as_float(0xff800000);
// Powers of two are what the hardware has.
const float scale = __int_as_float(SCALE) * 1.4426950408889634f;

const T* q_at = q + row * q_strides[0] + head * q_strides[1] + lane * PER;
const T* k_at = k + row * k_strides[0] + kv_head * k_strides[1] + lane * PER;
const T* v_at = v + row * v_strides[0] + kv_head * v_strides[1] + lane * PER;

float query[PER], sum[PER] = {};
#pragma unroll
for (int i = 0; i < PER; ++i) {
  query[i] = static_cast<float>(q_at[i]) * scale;
}
float top = minus_infinity, total = 0;
for (int first = blockIdx.y * CHUNK + warp; first < seen; first += WARPS * KEYS) {
  float score[KEYS];
  Part values[KEYS];
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
    const int key = ::min(first + j * WARPS, seen - 1);
    const Part keys = *reinterpret_cast<const Part*>(k_at + key * k_strides[2]);
    values[j] = *reinterpret_cast<const Part*>(v_at + key * v_strides[2]);
    score[j] = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      score[j] += query[i] * static_cast<float>(keys.at[i]);
    }
  }
  float higher = top;
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
#pragma unroll
    for (int span = 16; span > 0; span /= 2) {
      score[j] += __shfl_xor_sync(0xffffffff, score[j], span);
    }
    score[j] = first + j * WARPS < seen ? score[j] : minus_infinity;
    higher = fmaxf(higher, score[j]);
  }
  const float fade = exp2f(top - higher);
  top = higher;
  total *= fade;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    sum[i] *= fade;
  }
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
    const float weight = exp2f(score[j] - top);
    total += weight;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      sum[i] += weight * static_cast<float>(values[j].at[i]);
    }
  }
}

if (lane == 0) {
  tops[warp] = top;
  totals[warp] = total;
}
#pragma unroll
for (int i = 0; i < PER; ++i) {
  parts[warp][lane * PER + i] = sum[i];
}
__syncthreads();
float highest = minus_infinity;
for (int i = 0; i < WARPS; ++i) {
  highest = fmaxf(highest, tops[i]);
}
const bool empty = highest == minus_infinity;
const long long place = static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y;
for (int d = threadIdx.x; d < D; d += WARPS * 32) {
  float joined = 0, whole = 0;
  for (int i = 0; i < WARPS; ++i) {
    const float fade = empty ? 0 : exp2f(tops[i] - highest);
    joined += parts[i][d] * fade;
    whole += totals[i] * fade;
  }
  if (gridDim.y == 1) {
    y[place * D + d] = static_cast<Y>(joined / whole);
  } else {
    y[place * (D + 2) + d] = static_cast<Y>(joined);
    if (d == 0) {
      y[place * (D + 2) + D] = static_cast<Y>(whole);
      y[place * (D + 2) + D + 1] = static_cast<Y>(highest);
    }
  }
}
