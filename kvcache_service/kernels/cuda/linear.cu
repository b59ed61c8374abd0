#include "numbers.cuh"

// out = R (base + base·W + bias + lead of the leading tokens), a linear map per (layer, K or V, head); float32 sums, rounded once.
//
// weight [layers, 2, kv_heads, dim, dim], bias [layers, 2, kv_heads, dim], lead [layers, 2, leads, kv_heads, dim]: float16, or
// float32 where `full`. Grid: y is (layer, K or V, head); x strides over tiles of TILE tokens and the columns that turn together:
// threads side by side share their tokens, so base is broadcast and a row of W is read as it lies.
constexpr int TILE = 8;

__device__ inline float weight_at(const void *weights, Int at, int full) {
  return full ? ((const float *)weights)[at] : widen(((const Half *)weights)[at]);
}

template <int N>
__device__ void linear(KV *out, Int out_layer_step, Int out_part_step, const Term *base, const void *weight, const void *bias,
                       const void *lead, int leads, int full, int first_layer, int tokens, int heads, int dim,
                       const float *cos, const float *sin, int pairs, int interleaved) {
  int head = blockIdx.y % heads, plane = blockIdx.y / heads, part = plane & 1, layer = first_layer + (plane >> 1);
  KV *target = out + (plane >> 1) * out_layer_step + part * out_part_step;
  Int matrix = ((Int)layer * 2 + part) * heads + head;
  unsigned lanes = (dim + 1) / 2, all = lanes * ((tokens + TILE - 1) / TILE);
  for (unsigned index = blockIdx.x * blockDim.x + threadIdx.x; index < all; index += gridDim.x * blockDim.x) {
    int lane = index % lanes, start = index / lanes * TILE;
    bool turned = !part && lane < pairs, apart = turned && !interleaved;
    int a = apart ? lane : 2 * lane, b = apart ? lane + pairs : 2 * lane + 1;
    bool both = b < dim;
    int other = both ? b : a;
    float left[TILE] = {}, right[TILE] = {};
    for (int k = 0; k < dim; k += N) {
      float rows[TILE][N];
#pragma unroll
      for (int t = 0; t < TILE; ++t) {
        int token = start + t < tokens ? start + t : tokens - 1;
        read<N>(*base, layer, part, token * heads + head, heads, dim, k, rows[t]);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Int row = (matrix * dim + k + i) * dim;
        float x = weight_at(weight, row + a, full), y = weight_at(weight, row + other, full);
#pragma unroll
        for (int t = 0; t < TILE; ++t) {
          left[t] += rows[t][i] * x;
          right[t] += rows[t][i] * y;
        }
      }
    }
    float bias_a = weight_at(bias, matrix * dim + a, full), bias_b = weight_at(bias, matrix * dim + other, full);
#pragma unroll
    for (int t = 0; t < TILE; ++t) {
      int token = start + t, row = token * heads + head;
      if (token < tokens) {
        float x, y;
        read<1>(*base, layer, part, row, heads, dim, a, &x);
        read<1>(*base, layer, part, row, heads, dim, other, &y);
        x += left[t] + bias_a;
        y += right[t] + bias_b;
        if (token < leads) {
          Int place = ((((Int)layer * 2 + part) * leads + token) * heads + head) * dim;
          x += weight_at(lead, place + a, full);
          y += weight_at(lead, place + other, full);
        }
        if (turned) {
          float c = cos[(Int)token * pairs + lane], s = sin[(Int)token * pairs + lane], before = x;
          x = before * c - y * s;
          y = y * c + before * s;
        }
        store<1>(&x, target + (Int)row * dim + a);
        if (both) store<1>(&y, target + (Int)row * dim + b);
      }
    }
  }
}

#define LINEAR(NAME, N)                                                                                                       \
  extern "C" __global__ void NAME(KV *out, Int out_layer_step, Int out_part_step, const Term *base, const void *weight,       \
                                  const void *bias, const void *lead, Int leads, Int full, Int first_layer,                   \
                                  Int tokens, Int heads, Int dim, const float *cos, const float *sin, Int pairs,              \
                                  Int interleaved) {                                                                          \
    linear<N>(out, out_layer_step, out_part_step, base, weight, bias, lead, (int)leads, (int)full,                           \
              (int)first_layer, (int)tokens, (int)heads, (int)dim, cos, sin, (int)pairs, (int)interleaved);                   \
  }
LINEAR(linear_one, 1)
LINEAR(linear_wide, WIDE)
