// The tile for matrices in 8 bits: their numbers are widened in registers, and memory gives half as many bytes.
//
// For up to 12 rows inputs become 16-bit numbers, 64 of them at a time with a scale of their own: 32767 steps to the
// largest, finer than bfloat16 near it. Products are exact integers, and float32 sums go over groups in one order, as
// in `tile.h`. For more rows integers would be slower: matrices become bfloat16, a chunk at a time, and the usual tile
// takes them. So with int8 a row depends, in its last bits, on whether more than 12 rows ran.

#pragma once

#include "tile.h"

namespace {

constexpr int64_t GROUP = 64;  // inputs with one scale: their products stay below 2 ** 31

// Rows of inputs as 16-bit numbers, and what each group's stand for.
struct Quantized {
  std::vector<int16_t> numbers;
  std::vector<float> scales;
  int64_t groups = 0;

  void fill(const bf16* inputs, int64_t num_rows, int64_t num_inputs, int64_t stride) {
    groups = (num_inputs + GROUP - 1) / GROUP;
    numbers.resize(num_rows * num_inputs), scales.resize(num_rows * groups);
    for (int64_t row = 0; row < num_rows; row++)
      for (int64_t from = 0; from < num_inputs; from += GROUP) {
        const bf16* in = inputs + row * stride + from;
        const int64_t num = std::min(GROUP, num_inputs - from);
        float most = 1e-30f;
        bool is_broken = false;  // an infinity or a NaN has all bits of its exponent set, and must not become a number
        for (int64_t i = 0; i < num; i++) {
          most = std::max(most, std::fabs(widen(in[i])));
          is_broken |= (in[i] & 0x7f80) == 0x7f80;
        }
        const float steps = 32767 / most;
        for (int64_t i = 0; i < num; i++)
          numbers[row * num_inputs + from + i] = int16_t(std::nearbyint(widen(in[i]) * steps));
        scales[row * groups + from / GROUP] = is_broken ? widen(0x7fc0) : most / 32767;
      }
  }
};

// See `tile`; `scales` lie `scale_stride` apart for two rows.
template <int NUM, int PANELS>
void tile_int8(const int16_t* inputs, int64_t stride, const float* scales, int64_t scale_stride, const int8_t* panel,
               int64_t apart, float* sums, int64_t sums_apart) {
  for (int64_t from = 0; from < stride; from += GROUP) {
    __m512i low[PANELS][NUM], high[PANELS][NUM];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 12
      for (int row = 0; row < NUM; row++) low[p][row] = high[p][row] = _mm512_setzero_si512();
    const int64_t end = std::min(GROUP, stride - from) / 2;
    for (int64_t pair = 0; pair < end; pair++) {
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) {
        const __m256i* at = (const __m256i*)(panel + p * apart + (from / 2 + pair) * 2 * PANEL);
        const __m512i left = _mm512_cvtepi8_epi16(_mm256_loadu_si256(at));
        const __m512i right = _mm512_cvtepi8_epi16(_mm256_loadu_si256(at + 1));
#pragma GCC unroll 12
        for (int row = 0; row < NUM; row++) {
          int32_t two;
          memcpy(&two, inputs + row * stride + from + 2 * pair, 4);
          const __m512i input = _mm512_set1_epi32(two);
          low[p][row] = _mm512_dpwssd_epi32(low[p][row], left, input);
          high[p][row] = _mm512_dpwssd_epi32(high[p][row], right, input);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 12
      for (int row = 0; row < NUM; row++) {
        const __m512 scale = _mm512_set1_ps(scales[row * scale_stride + from / GROUP]);
        float* sum = sums + p * sums_apart + row * PANEL;
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(low[p][row]), scale, _mm512_loadu_ps(sum)));
        _mm512_storeu_ps(sum + 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[p][row]), scale, _mm512_loadu_ps(sum + 16)));
      }
  }
}

void widen_int8(const int8_t* from, bf16* to, int64_t num) {
  for (int64_t i = 0; i < num; i += 16) {
    const __m512i numbers = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i)));
    _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(numbers)));
  }
}

using TileInt8 = void (*)(const int16_t*, int64_t, const float*, int64_t, const int8_t*, int64_t, float*, int64_t);
const TileInt8 TILES_INT8[] = {nullptr,         tile_int8<1, 1>, tile_int8<2, 1>,  tile_int8<3, 1>,  tile_int8<4, 1>,
                               tile_int8<5, 1>, tile_int8<6, 1>, tile_int8<7, 1>,  tile_int8<8, 1>,  tile_int8<9, 1>,
                               tile_int8<10, 1>, tile_int8<11, 1>, tile_int8<12, 1>};
const TileInt8 STREAMS_INT8[] = {nullptr, tile_int8<1, 4>, tile_int8<2, 4>, tile_int8<3, 4>};

}  // namespace
