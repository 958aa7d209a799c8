// A tile of a product, and what all kernels share: the list of operations, a thread's share, bfloat16 numbers.
//
// Matrices are packed in panels of 32 outputs: [outputs / 32][inputs / 2][32][2]. A panel is read as one stream, two
// inputs of 16 outputs to a register, as VDPBF16PS multiplies them. One tile of 1 to 12 rows and 32 outputs serves
// decode, which is as fast as memory, and prefill, which is as fast as the multipliers.
//
// Every row comes out the same whatever stands beside it: sums go over inputs, and over positions, in one order,
// however many rows there are. A request's tokens depend neither on its batch nor on how its prompt was cut.

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
  int64_t i = 0;
  for (; i + 16 <= num; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
  for (; i < num; i++) to[i] = narrow(from[i]);
}

// exp(numbers) for numbers up to 0: 2 to the whole part, and a polynomial for the rest.
__m512 exp_16(__m512 numbers) {
  const __m512 powers = _mm512_mul_ps(numbers, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(powers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(powers, whole);
  __m512 sum = _mm512_set1_ps(0.00133335581f);  // ln(2) ** k / k!, from k = 5 down
  for (const float term : {0.00961812911f, 0.0555041087f, 0.240226507f, 0.693147181f, 1.0f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
  return _mm512_scalef_ps(sum, whole);
}

// sums [panels][rows][32] += inputs [rows, 2 pairs] x panels [pairs][32][2], which lie `apart`, sums `sums_apart`.
// With few rows there is nothing but memory to wait for: it gives more when several panels are read at a time.
template <int NUM, int PANELS>
void tile(const bf16* inputs, int64_t stride, const bf16* panel, int64_t apart, int64_t pairs, float* sums,
          int64_t sums_apart) {
  __m512 low[PANELS][NUM], high[PANELS][NUM];
#pragma GCC unroll 4
  for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 12
    for (int row = 0; row < NUM; row++) {
      low[p][row] = _mm512_loadu_ps(sums + p * sums_apart + row * PANEL);
      high[p][row] = _mm512_loadu_ps(sums + p * sums_apart + row * PANEL + 16);
    }
  for (int64_t pair = 0; pair < pairs; pair++) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) {
      const bf16* at = panel + p * apart + pair * 2 * PANEL;
      const __m512bh left = (__m512bh)_mm512_loadu_si512(at), right = (__m512bh)_mm512_loadu_si512(at + PANEL);
#pragma GCC unroll 12
      for (int row = 0; row < NUM; row++) {
        int32_t two;
        memcpy(&two, inputs + row * stride + 2 * pair, 4);
        const __m512bh input = (__m512bh)_mm512_set1_epi32(two);
        low[p][row] = _mm512_dpbf16_ps(low[p][row], left, input);
        high[p][row] = _mm512_dpbf16_ps(high[p][row], right, input);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 12
    for (int row = 0; row < NUM; row++) {
      _mm512_storeu_ps(sums + p * sums_apart + row * PANEL, low[p][row]);
      _mm512_storeu_ps(sums + p * sums_apart + row * PANEL + 16, high[p][row]);
    }
}

using Tile = void (*)(const bf16*, int64_t, const bf16*, int64_t, int64_t, float*, int64_t);
const Tile TILES[] = {nullptr,    tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>,  tile<5, 1>, tile<6, 1>,
                      tile<7, 1>, tile<8, 1>, tile<9, 1>, tile<10, 1>, tile<11, 1>, tile<12, 1>};
const Tile STREAMS[] = {nullptr, tile<1, 4>, tile<2, 4>, tile<3, 4>};  // four panels at a time
constexpr int64_t MOST_STREAMED = 3;                                  // rows

}  // namespace
