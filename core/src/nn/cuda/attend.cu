// A step of attention for each row's newest token: q [B, 1, H * D], k and v [B, 1, KV * D] as they are projected, keys and values
// [slots, KV, room, D] of which row b has used lens[b] places. Normalises q and k of each head where `normalises`, rotates them by
// angles whose cosines and sines are [B, D / 2], puts k and v into their place in keys and values, and attends to all of the row's keys.
//
// A block serves one head of one row over `chunk` keys, and its warps take turns at them; each keeps a running softmax (Milakov and
// Gimelshein 2018), and these are joined at the end. The new key is the last warp's. One chunk: y is the result, [B, 1, H * D]. Several:
// y is float32 [B, H, chunks, D + 2], a chunk's weighted sum, its sum of weights and its highest score, for join_chunks.cu. What a row
// gets does not depend on the others, nor on how many chunks longer rows need.
#include "common.cuh"

enum { WARPS = 16, KEYS = 4, PER = D / 32, WHOLE = (PER & (PER - 1)) == 0 && PER * sizeof(T) <= 16 };
struct alignas(WHOLE ? PER * sizeof(T) : sizeof(T)) Part {
  T at[PER];
};

KERNEL(512) hob_attend(
    const T* q, const T* k, const T* v, const T* keys, const T* values, const int* lens, const float* cosines, const float* sines,
    const T* q_scales, const T* k_scales, void* y, int heads, int kv_heads, int room, int chunk, int normalises, int interleaved, float scores_by,
    float magnitude, float eps) {
  __shared__ float tops[WARPS], totals[WARPS], parts[WARPS][D];

  const int row = blockIdx.x / heads, head = blockIdx.x % heads, group = heads / kv_heads, kv_head = head / group;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int used = lens[row], old = min(used, static_cast<int>(blockIdx.y + 1) * chunk);
  const float minus_infinity = __int_as_float(0xff800000);
  // Powers of two are what the hardware has.
  const float scale = scores_by * 1.4426950408889634f;

  // The lane's part of the head's query, made ready, and first that of the new key: normalised, rotated, rounded as it would be in between.
  const bool serves_new = blockIdx.y == used / chunk && warp == WARPS - 1;
  const long long new_at = (static_cast<long long>(row) * kv_heads + kv_head) * D;
  float query[PER], key[PER];
#pragma unroll 1
  for (int is_key = serves_new; is_key >= 0; --is_key) {
    const T* from = is_key ? k + new_at : q + static_cast<long long>(blockIdx.x) * D;
    const T* scales = is_key ? k_scales : q_scales;
    float square = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      query[i] = static_cast<float>(from[lane * PER + i]);
      square += query[i] * query[i];
    }
    if (normalises) {
#pragma unroll
      for (int span = 16; span > 0; span /= 2) {
        square += __shfl_xor_sync(0xffffffff, square, span);
      }
      const float by = rsqrtf(square / D + eps);
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        query[i] = rounded(query[i] * by * static_cast<float>(scales[lane * PER + i]));
      }
    }
    float other[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      // Neighbours are a pair, or a head's two halves are pairs; a lane holds PER neighbours.
      other[i] = __shfl_xor_sync(0xffffffff, query[i], interleaved ? 1 : 16);
      other[i] = interleaved && PER % 2 == 0 ? query[(i ^ 1) % PER] : other[i];
    }
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int at = lane * PER + i, angle = row * (D / 2) + (interleaved ? at / 2 : at % (D / 2));
      const bool second = interleaved ? at % 2 : at >= D / 2;
      query[i] = rounded(query[i] * cosines[angle] + (second ? other[i] : -other[i]) * sines[angle]);
      query[i] = magnitude == 1 ? query[i] : rounded(query[i] * magnitude);
      if (is_key) {
        key[i] = query[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    query[i] *= scale;
  }

  const long long cache = (static_cast<long long>(row) * kv_heads + kv_head) * room * D + lane * PER;
  const T* k_at = keys + cache;
  const T* v_at = values + cache;
  float sum[PER] = {};
  float top = minus_infinity, total = 0;
  for (int first = blockIdx.y * chunk + warp; first < old; first += WARPS * KEYS) {
    float score[KEYS];
    Part part[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      const int key = min(first + j * WARPS, old - 1);
      const Part read = *reinterpret_cast<const Part*>(k_at + static_cast<long long>(key) * D);
      part[j] = *reinterpret_cast<const Part*>(v_at + static_cast<long long>(key) * D);
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

  if (serves_new) {
    Part key_part, value_part;
    float score = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      key_part.at[i] = static_cast<T>(key[i]);
      value_part.at[i] = v[new_at + lane * PER + i];
      score += query[i] * key[i];
    }
    if (head % group == 0) {
      // No block reads this place: the caches are declared as inputs, but this part of them is written.
      *reinterpret_cast<Part*>(const_cast<T*>(k_at) + static_cast<long long>(used) * D) = key_part;
      *reinterpret_cast<Part*>(const_cast<T*>(v_at) + static_cast<long long>(used) * D) = value_part;
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
#pragma unroll 4
  for (int i = 0; i < WARPS; ++i) {
    highest = fmaxf(highest, tops[i]);
  }
  const bool empty = highest == minus_infinity;
  const long long place = static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y;
  for (int d = threadIdx.x; d < D; d += WARPS * 32) {
    float joined = 0, whole = 0;
#pragma unroll 4
    for (int i = 0; i < WARPS; ++i) {
      const float fade = empty ? 0 : exp2f(tops[i] - highest);
      joined += parts[i][d] * fade;
      whole += totals[i] * fade;
    }
    if (gridDim.y == 1) {
      static_cast<T*>(y)[place * D + d] = static_cast<T>(joined / whole);
    } else {
      float* part = static_cast<float*>(y) + place * (D + 2);
      part[d] = joined;
      if (d == 0) {
        part[D] = whole;
        part[D + 1] = highest;
      }
    }
  }
}
