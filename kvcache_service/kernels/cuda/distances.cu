#include "numbers.cuh"

// Sums of squared differences, base against candidates. Every thread adds what lies a whole grid apart, then `fold` adds the
// threads' sums in a fixed order: the same KV always gives the same bits.
//
// sums: float32 [candidates, threads of a grid row]. terms[0] is the base, terms[1 + n] candidate n, which may be longer.
template <int N>
__device__ void squares(float *sums, const Term *terms, int layers, int tokens, int heads, int dim) {
  unsigned threads = gridDim.x * blockDim.x, self = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned units = dim / N, all = units * heads * tokens;
  float sum = 0.0f;
  for (int plane = 0; plane < 2 * layers; ++plane) {
    for (unsigned index = self; index < all; index += threads) {
      int row = index / units, column = index % units * N;
      float mine[N], other[N];
      read<N>(terms[0], plane >> 1, plane & 1, row, heads, dim, column, mine);
      read<N>(terms[1 + blockIdx.y], plane >> 1, plane & 1, row, heads, dim, column, other);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += (mine[i] - other[i]) * (mine[i] - other[i]);
    }
  }
  sums[(Int)blockIdx.y * threads + self] = sum;
}

extern "C" __global__ void squares_one(float *sums, const Term *terms, Int layers, Int tokens, Int heads, Int dim) {
  squares<1>(sums, terms, (int)layers, (int)tokens, (int)heads, (int)dim);
}
extern "C" __global__ void squares_wide(float *sums, const Term *terms, Int layers, Int tokens, Int heads, Int dim) {
  squares<WIDE>(sums, terms, (int)layers, (int)tokens, (int)heads, (int)dim);
}

// folded[candidate, thread] = the sum of sums[candidate, thread], sums[candidate, thread + threads], …
extern "C" __global__ void fold(float *folded, const float *sums, Int count) {
  unsigned threads = gridDim.x * blockDim.x, self = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0.0f;
  for (Int index = self; index < count; index += threads) sum += sums[blockIdx.y * count + index];
  folded[(Int)blockIdx.y * threads + self] = sum;
}
