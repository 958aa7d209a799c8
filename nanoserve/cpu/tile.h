// A tile of a product, and what all kernels share: the list of operations, a thread's share, bfloat16 numbers.
//
// Matrices are packed in panels of 32 outputs: [outputs / 32][inputs / 2][32][2]. A panel is read as one stream, two
// inputs of 16 outputs to a register, as VDPBF16PS multiplies them. One tile of 1 to 12 rows and 32 outputs serves
// decode, which is as fast as memory, and prefill, which is as fast as the multipliers.
//
// Every row comes out the same whatever stands beside it: sums go over inputs, and over positions, in one order,
// however many rows there are. A request's tokens depend neither on its batch nor on how its prompt was cut into chunks.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;
constexpr int64_t PANEL = 32;  // outputs of a panel
constexpr int64_t ROWS = 12;   // rows of a tile: 24 sums, two registers of weights, one of inputs

struct Op {
  int64_t kind;
  double scale;
  void* at[8];
  int64_t n[10];
};

struct Team {
  int64_t thread, num_threads;
  // This thread's share of `num` things, in one piece.
  int64_t begin(int64_t num) const { return num * thread / num_threads; }
  int64_t end(int64_t num) const { return num * (thread + 1) / num_threads; }
};

float widen(bf16 number) {
  uint32_t bits = uint32_t(number) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

// To the nearest, ties to even; a NaN stays one.
bf16 narrow(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return bf16((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

void narrow_all(const float* from, bf16* to, int64_t num) {
  for (int64_t i = 0; i < num; i++) to[i] = narrow(from[i]);
}

// sums [rows][32] += inputs [rows, 2 pairs] x panel [pairs][32][2].
template <int NUM>
void tile(const bf16* inputs, int64_t stride, const bf16* panel, int64_t pairs, float* sums) {
  __m512 low[NUM], high[NUM];
#pragma GCC unroll 12
  for (int row = 0; row < NUM; row++) {
    low[row] = _mm512_loadu_ps(sums + row * PANEL);
    high[row] = _mm512_loadu_ps(sums + row * PANEL + 16);
  }
  for (int64_t pair = 0; pair < pairs; pair++) {
    __m512bh left = (__m512bh)_mm512_loadu_si512(panel + pair * 2 * PANEL);
    __m512bh right = (__m512bh)_mm512_loadu_si512(panel + pair * 2 * PANEL + PANEL);
    if (NUM <= 2) {  // nothing but memory to wait for
      _mm_prefetch((const char*)(panel + pair * 2 * PANEL + 2048), _MM_HINT_T0);
      _mm_prefetch((const char*)(panel + pair * 2 * PANEL + 2048 + PANEL), _MM_HINT_T0);
    }
#pragma GCC unroll 12
    for (int row = 0; row < NUM; row++) {
      int32_t two;
      memcpy(&two, inputs + row * stride + 2 * pair, 4);
      __m512bh input = (__m512bh)_mm512_set1_epi32(two);
      low[row] = _mm512_dpbf16_ps(low[row], left, input);
      high[row] = _mm512_dpbf16_ps(high[row], right, input);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < NUM; row++) {
    _mm512_storeu_ps(sums + row * PANEL, low[row]);
    _mm512_storeu_ps(sums + row * PANEL + 16, high[row]);
  }
}

using Tile = void (*)(const bf16*, int64_t, const bf16*, int64_t, float*);
const Tile TILES[] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>,
                      tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

void widen_int8(const int8_t* from, bf16* to, int64_t num) {
  for (int64_t i = 0; i < num; i += 32) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i))));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i + 16))));
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

}  // namespace
