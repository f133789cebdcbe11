// A step of attention for each row's newest token: q [B, 1, H * D], k and v [B, 1, KV * D] as they are projected, keys and values
// [slots, KV, room, D] of which row b has used lens[b] places. Normalises q and k of each head (NORM), rotates them (RATES: angles per
// position of each pair), puts k and v into their place in keys and values, and attends to all of the row's keys.
//
// A block serves one head of one row over CHUNK keys, and its warps take turns at them; each keeps a running softmax (Milakov and
// Gimelshein 2018), and these are joined at the end. The new key is the last warp's. One chunk: y is the result, [B, 1, H * D]. Several: y
// is float32 [B, H, chunks, D + 2], a chunk's weighted sum, its sum of weights and its highest score, for join_chunks.cu. What a row
// gets does not depend on the others, nor on how many chunks longer rows need. SCALE, MAGNITUDE and EPS hold the bits of floats.
constexpr int WARPS = 16, KEYS = 4, PER = D / 32;
constexpr bool WHOLE = (PER & (PER - 1)) == 0 && PER * sizeof(T) <= 16;
struct alignas(WHOLE ? PER * sizeof(T) : sizeof(T)) Part {
  T at[PER];
};
__shared__ float tops[WARPS], totals[WARPS], parts[WARPS][D];

const int heads = q_shape[2] / D, row = blockIdx.x / heads, head = blockIdx.x % heads;
const int kv_heads = keys_shape[1], group = heads / kv_heads, kv_head = head / group;
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
const int used = lens[row], old = ::min(used, static_cast<int>(blockIdx.y + 1) * CHUNK);
const float minus_infinity = __int_as_float(0xff800000);
// Powers of two are what the hardware has.
const float scale = __int_as_float(SCALE) * 1.4426950408889634f;

// A lane's part of a head, made ready: normalised, rotated, rounded as it would be in between.
auto ready = [&](const T* from, const T* scales, float* part) {
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    part[i] = static_cast<float>(from[lane * PER + i]);
  }
  if (NORM) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      square += part[i] * part[i];
    }
#pragma unroll
    for (int span = 16; span > 0; span /= 2) {
      square += __shfl_xor_sync(0xffffffff, square, span);
    }
    const float by = rsqrtf(square / D + __int_as_float(EPS));
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      part[i] = static_cast<float>(static_cast<T>(part[i] * by * static_cast<float>(scales[lane * PER + i])));
    }
  }
  float other[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    // Neighbours are a pair, or a head's two halves are pairs; a lane holds PER neighbours.
    other[i] = INTERLEAVED && PER > 1 ? part[i ^ 1] : __shfl_xor_sync(0xffffffff, part[i], INTERLEAVED ? 1 : 16);
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = lane * PER + i;
    const int pair = INTERLEAVED ? at / 2 : at % (D / 2);
    const bool second = INTERLEAVED ? at % 2 : at >= D / 2;
    float sine, cosine;
    sincosf(static_cast<float>(used) * rates[pair], &sine, &cosine);
    const float turned = part[i] * cosine + (second ? other[i] : -other[i]) * sine;
    part[i] = static_cast<float>(static_cast<T>(turned));
    if (MAGNITUDE != 0x3f800000) {
      part[i] = static_cast<float>(static_cast<T>(part[i] * __int_as_float(MAGNITUDE)));
    }
  }
};

const T* k_at = keys + row * keys_strides[0] + kv_head * keys_strides[1] + lane * PER;
const T* v_at = values + row * values_strides[0] + kv_head * values_strides[1] + lane * PER;
float query[PER], sum[PER] = {};
ready(q + static_cast<long long>(blockIdx.x) * D, q_scales, query);
#pragma unroll
for (int i = 0; i < PER; ++i) {
  query[i] *= scale;
}
float top = minus_infinity, total = 0;
for (int first = blockIdx.y * CHUNK + warp; first < old; first += WARPS * KEYS) {
  float score[KEYS];
  Part part[KEYS];
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
    const int key = ::min(first + j * WARPS, old - 1);
    const Part read = *reinterpret_cast<const Part*>(k_at + key * keys_strides[2]);
    part[j] = *reinterpret_cast<const Part*>(v_at + key * values_strides[2]);
    score[j] = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      score[j] += query[i] * static_cast<float>(read.at[i]);
    }
  }
  float higher = top;
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
#pragma unroll
    for (int span = 16; span > 0; span /= 2) {
      score[j] += __shfl_xor_sync(0xffffffff, score[j], span);
    }
    score[j] = first + j * WARPS < old ? score[j] : minus_infinity;
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
      sum[i] += weight * static_cast<float>(part[j].at[i]);
    }
  }
}

if (blockIdx.y == used / CHUNK && warp == WARPS - 1) {
  const long long from = (static_cast<long long>(row) * kv_heads + kv_head) * D;
  float key[PER];
  ready(k + from, k_scales, key);
  Part key_part, value_part;
  float score = 0;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    key_part.at[i] = static_cast<T>(key[i]);
    value_part.at[i] = v[from + lane * PER + i];
    score += query[i] * key[i];
  }
  if (head % group == 0) {
    // No block reads this place: the caches are declared as inputs, but this part of them is written.
    *reinterpret_cast<Part*>(const_cast<T*>(k_at) + used * keys_strides[2]) = key_part;
    *reinterpret_cast<Part*>(const_cast<T*>(v_at) + used * values_strides[2]) = value_part;
  }
#pragma unroll
  for (int span = 16; span > 0; span /= 2) {
    score += __shfl_xor_sync(0xffffffff, score, span);
  }
  const float higher = fmaxf(top, score), fade = exp2f(top - higher), weight = exp2f(score - higher);
  top = higher;
  total = total * fade + weight;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    sum[i] = sum[i] * fade + weight * static_cast<float>(value_part.at[i]);
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
