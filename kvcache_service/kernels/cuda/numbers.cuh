// Stored numbers as float32 and back, and the KV that kernels read. No toolkit header is needed: NVRTC and a host compiler read
// the same source. KV_TYPE names the dtype of the model's KV: 0 float32, 1 bfloat16, 2 float16.

typedef long long Int;  // every integer parameter, so that a launch is a list of 64-bit words

struct Single { float bits; };
struct Bfloat { unsigned short bits; };
struct Half { unsigned short bits; };
struct Byte { signed char bits; };         // int8 code
struct Eighth { unsigned char bits; };     // fp8 (e4m3) code; none is NaN

#if KV_TYPE == 0
typedef Single KV;
#elif KV_TYPE == 1
typedef Bfloat KV;
#else
typedef Half KV;
#endif

union Word { float number; unsigned bits; };

__device__ inline float half_to_float(unsigned short bits) {
#ifdef __CUDACC__
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
  return number;
#else
  _Float16 number;
  __builtin_memcpy(&number, &bits, 2);
  return number;
#endif
}

__device__ inline float widen(Single stored) { return stored.bits; }
__device__ inline float widen(Bfloat stored) { Word word; word.bits = (unsigned)stored.bits << 16; return word.number; }
__device__ inline float widen(Half stored) { return half_to_float(stored.bits); }
__device__ inline float widen(Byte stored) { return stored.bits; }
// e4m3 has a float16's layout with one exponent bit less, whose bias is 8 smaller.
__device__ inline float widen(Eighth stored) {
  return 256.0f * half_to_float((unsigned short)(((int)(signed char)stored.bits << 7) & 0xBFFF));
}

// Rounded to nearest, ties to even.
__device__ inline void narrow(float number, Single &stored) { stored.bits = number; }
__device__ inline void narrow(float number, Bfloat &stored) {
  Word word;
  word.number = number;
  unsigned rounded = word.bits + 0x7FFF + ((word.bits >> 16) & 1);
  stored.bits = (unsigned short)((number != number ? 0x7FC00000u : rounded) >> 16);
}
__device__ inline void narrow(float number, Half &stored) {
#ifdef __CUDACC__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored.bits) : "f"(number));
#else
  _Float16 rounded = (_Float16)number;
  __builtin_memcpy(&stored.bits, &rounded, 2);
#endif
}

// N numbers that are loaded or stored at once; N is 1 or fills 16 bytes of KV.
template <class Stored, int N> struct alignas(N * sizeof(Stored)) Pack { Stored at[N]; };
constexpr int WIDE = 16 / sizeof(KV);

template <class Stored, int N> __device__ inline void load(const Stored *from, float *numbers) {
  Pack<Stored, N> pack = *(const Pack<Stored, N> *)from;
#pragma unroll
  for (int i = 0; i < N; ++i) numbers[i] = widen(pack.at[i]);
}

template <int N> __device__ inline void store(const float *numbers, KV *to) {
  Pack<KV, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) narrow(numbers[i], pack.at[i]);
  *(Pack<KV, N> *)to = pack;
}

// KV [layers, 2 (K, V), tokens, kv_heads, head_dim] in device memory, one plane [tokens, kv_heads, head_dim] contiguous.
// launch.py packs it: eight words.
struct Term {
  const void *numbers;
  const float *key_scales;    // [layers, kv_heads, head_dim]; coded KV only
  const float *value_scales;  // [layers, tokens, kv_heads]; coded KV only
  Int kind;                   // 0: the dtype of KV, 1: int8, 2: fp8
  Int tokens;
  Int layer_step;             // elements from one layer to the next
  Int part_step;              // elements from K to V
  double weight;
};

// N numbers of one row (token · kv_heads + head) from `column` on.
template <int N>
__device__ inline void read(const Term &term, int layer, int part, int row, int heads, int dim, int column, float *numbers) {
  Int at = layer * term.layer_step + part * term.part_step + (Int)row * dim + column;
  if (term.kind == 0) return load<KV, N>((const KV *)term.numbers + at, numbers);
  if (term.kind == 1) load<Byte, N>((const Byte *)term.numbers + at, numbers);
  else load<Eighth, N>((const Eighth *)term.numbers + at, numbers);
  if (part) {
    float scale = term.value_scales[layer * term.tokens * heads + row];
#pragma unroll
    for (int i = 0; i < N; ++i) numbers[i] *= scale;
  } else {
    const float *scales = term.key_scales + ((Int)layer * heads + row % heads) * dim + column;
#pragma unroll
    for (int i = 0; i < N; ++i) numbers[i] *= scales[i];
  }
}
