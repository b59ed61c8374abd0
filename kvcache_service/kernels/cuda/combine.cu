#include "numbers.cuh"

// out = R Σ w·term: keys rotated by cos and sin, values as they are, float32 sums, rounded once.
//
// terms[0] is the base; model layer 0 depends on token and position only and takes the base alone.
// cos, sin: float32 [tokens, pairs]. Grid: y is the plane (layer, K or V), x strides over its units of 2·N numbers:
//
//   half-split keys    [a . . . | b . . . | rest]   a turns with b, `pairs` columns apart
//   everything else    [a b a b . . . . . .]        a and b lie side by side; interleaved keys turn within them
template <int N>
__device__ void combine(KV *out, Int out_layer_step, Int out_part_step, const Term *terms, int count, int first_layer, int tokens,
                        int heads, int dim, const float *cos, const float *sin, int pairs, int interleaved) {
  int part = blockIdx.y & 1, layer = first_layer + (blockIdx.y >> 1);
  KV *plane = out + (blockIdx.y >> 1) * out_layer_step + part * out_part_step;
  unsigned units = (dim + 2 * N - 1) / (2 * N), all = units * heads * tokens;
  int used = layer == 0 ? 1 : count;
  for (unsigned index = blockIdx.x * blockDim.x + threadIdx.x; index < all; index += gridDim.x * blockDim.x) {
    int row = index / units, unit = index % units, token = row / heads;
    bool turned = !part && unit * N < pairs, apart = turned && !interleaved;
    int a = apart ? unit * N : 2 * unit * N, b = apart ? a + pairs : a + N;
    bool both = b < dim;  // an odd row ends with a lone number
    float left[N] = {}, right[N] = {}, numbers[N];
    for (int n = 0; n < used; ++n) {
      float weight = (float)terms[n].weight;
      read<N>(terms[n], layer, part, row, heads, dim, a, numbers);
#pragma unroll
      for (int i = 0; i < N; ++i) left[i] += weight * numbers[i];
      if (both) {
        read<N>(terms[n], layer, part, row, heads, dim, b, numbers);
#pragma unroll
        for (int i = 0; i < N; ++i) right[i] += weight * numbers[i];
      }
    }
    if (turned) {
      const float *c = cos + (Int)token * pairs + unit * N, *s = sin + (Int)token * pairs + unit * N;
      if (apart) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float x = left[i], y = right[i];
          left[i] = x * c[i] - y * s[i];
          right[i] = y * c[i] + x * s[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {  // pair i is the numbers 2i and 2i + 1 of left and right, one after the other
          float &first = 2 * i < N ? left[2 * i] : right[2 * i - N], &second = 2 * i + 1 < N ? left[2 * i + 1] : right[2 * i + 1 - N];
          float x = first, y = second;
          first = x * c[i] - y * s[i];
          second = y * c[i] + x * s[i];
        }
      }
    }
    store<N>(left, plane + (Int)row * dim + a);
    if (both) store<N>(right, plane + (Int)row * dim + b);
  }
}

#define COMBINE(NAME, N)                                                                                                      \
  extern "C" __global__ void NAME(KV *out, Int out_layer_step, Int out_part_step, const Term *terms, Int count,               \
                                  Int first_layer, Int tokens, Int heads, Int dim, const float *cos, const float *sin,        \
                                  Int pairs, Int interleaved) {                                                               \
    combine<N>(out, out_layer_step, out_part_step, terms, (int)count, (int)first_layer, (int)tokens, (int)heads, (int)dim,    \
               cos, sin, (int)pairs, (int)interleaved);                                                                       \
  }
COMBINE(combine_one, 1)
COMBINE(combine_wide, WIDE)
