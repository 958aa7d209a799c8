// Products of rows with packed matrices, rows of such matrices, and how they are packed.

#pragma once

#include "tile.h"
#include "tile_int8.h"

namespace {

constexpr int64_t GROUP_PANELS = 4;  // panels that are summed together, one stream of memory each
constexpr int64_t CHUNK = 2048;      // inputs of theirs that stay in the second cache while all rows pass

int64_t whole_tiles(int64_t num_rows) { return (num_rows + ROWS - 1) / ROWS; }

// What `linear` adds to its sums, and how it writes them: one panel's, for all rows.
void finish(const Op& op, int64_t first, float* sums) {
  const bf16 *bias = (const bf16*)op.at[3], *residual = (const bf16*)op.at[4];
  const float* scales = (const float*)op.at[5];
  const int64_t num = std::min(PANEL, op.n[2] - first);
  for (int64_t row = 0; row < op.n[0]; row++, sums += PANEL) {
    const int64_t place = row * op.n[2] + first;
    bf16* out = (bf16*)op.at[2] + place;
    if (scales) for (int64_t i = 0; i < num; i++) sums[i] *= scales[first + i];
    if (bias) for (int64_t i = 0; i < num; i++) sums[i] += widen(bias[first + i]);
    if (residual) for (int64_t i = 0; i < num; i++) sums[i] = widen(narrow(sums[i])) + widen(residual[place + i]);
    if (op.n[4]) memcpy((float*)op.at[2] + place, sums, num * 4);
    else narrow_all(sums, out, num);
  }
}

// A product's sums for up to 12 rows and up to 4 panels, of integers.
void sum_int8(const Op& op, const Quantized& inputs, int64_t panel, int64_t group, float* sums) {
  const int64_t num_rows = op.n[0], num_inputs = op.n[1], apart = num_inputs * PANEL;
  const bool streams = num_rows <= MOST_STREAMED && group == GROUP_PANELS;
  for (int64_t i = 0; i < group; i += streams ? GROUP_PANELS : 1)
    (streams ? STREAMS_INT8 : TILES_INT8)[num_rows](
        inputs.numbers.data(), num_inputs, inputs.scales.data(), inputs.groups,
        (const int8_t*)op.at[1] + (panel + i) * apart, apart, sums + i * ROWS * PANEL, ROWS * PANEL);
}

// The same for any number of rows, of bfloat16, a chunk of inputs at a time.
void sum_bf16(const Op& op, std::vector<bf16>& wide, int64_t panel, int64_t group, float* sums) {
  const int64_t num_rows = op.n[0], num_inputs = op.n[1], tiles = whole_tiles(num_rows), padded = tiles * ROWS;
  const int64_t most = (num_rows + tiles - 1) / tiles;  // no tile of a row or two is left over
  const bool is_int8 = op.at[5];
  for (int64_t from = 0; from < num_inputs; from += CHUNK) {
    const int64_t num = std::min(CHUNK, num_inputs - from), place = (panel * num_inputs + from) * PANEL;
    const bf16* at = (const bf16*)op.at[1] + place;
    const int64_t apart = is_int8 ? num * PANEL : num_inputs * PANEL;
    if (is_int8) {
      at = wide.data();
      for (int64_t i = 0; i < group; i++)
        widen_int8((const int8_t*)op.at[1] + place + i * num_inputs * PANEL, &wide[i * apart], apart);
    }
    for (int64_t row = 0; row < num_rows; row += most) {
      const int64_t some = std::min(most, num_rows - row);
      const bool streams = some <= MOST_STREAMED && group == GROUP_PANELS;
      for (int64_t i = 0; i < group; i += streams ? GROUP_PANELS : 1)
        (streams ? STREAMS : TILES)[some]((const bf16*)op.at[0] + row * op.n[3] + from, op.n[3], at + i * apart, apart,
                                          num / 2, sums + (i * padded + row) * PANEL, padded * PANEL);
    }
  }
}

// out [rows, outputs] = inputs x panels (+ bias) (+ residual).
// at: inputs, panels (bf16, or int8 with scales), out, bias, residual, scales. n: rows, inputs, outputs, input stride,
// whether out is float32.
void linear(const Op& op, Team team) {
  static thread_local std::vector<float> sums;
  static thread_local std::vector<bf16> wide;
  static thread_local Quantized quantized;
  const int64_t panels = (op.n[2] + PANEL - 1) / PANEL, padded = whole_tiles(op.n[0]) * ROWS;
  const bool is_int8 = op.at[5], has_few_rows = op.n[0] <= ROWS;
  if (!op.n[0]) return;
  if (is_int8 && has_few_rows) quantized.fill((const bf16*)op.at[0], op.n[0], op.n[1], op.n[3]);
  else if (is_int8) wide.resize(GROUP_PANELS * CHUNK * PANEL);
  sums.resize(GROUP_PANELS * padded * PANEL);
  for (int64_t panel = team.begin(panels); panel < team.end(panels); panel += GROUP_PANELS) {
    const int64_t group = std::min(GROUP_PANELS, team.end(panels) - panel);
    std::fill(sums.begin(), sums.end(), 0.0f);
    if (is_int8 && has_few_rows) sum_int8(op, quantized, panel, group, sums.data());
    else sum_bf16(op, wide, panel, group, sums.data());
    for (int64_t i = 0; i < group; i++) finish(op, (panel + i) * PANEL, &sums[i * padded * PANEL]);
  }
}

// out [rows, inputs] = rows of packed panels. at: token ids (int64), panels, out, scales. n: rows, inputs.
void embed(const Op& op, Team team) {
  const int64_t* ids = (const int64_t*)op.at[0];
  const float* scales = (const float*)op.at[3];
  for (int64_t row = team.begin(op.n[0]); row < team.end(op.n[0]); row++) {
    const int64_t first = ids[row] / PANEL * PANEL * op.n[1], lane = ids[row] % PANEL;
    bf16* out = (bf16*)op.at[2] + row * op.n[1];
    for (int64_t i = 0; i < op.n[1]; i++) {
      const int64_t place = first + (i / 2) * 2 * PANEL + lane * 2 + i % 2;
      out[i] = scales ? narrow(((const int8_t*)op.at[1])[place] * scales[ids[row]]) : ((const bf16*)op.at[1])[place];
    }
  }
}

// Panels of a matrix [outputs, inputs] of 2 or 1 bytes a number; outputs beyond the last are zero.
// at: matrix, panels. n: outputs, inputs.
template <typename Number>
void pack(const Op& op, Team team) {
  const int64_t outputs = op.n[0], inputs = op.n[1], panels = (outputs + PANEL - 1) / PANEL;
  for (int64_t panel = team.begin(panels); panel < team.end(panels); panel++) {
    const int64_t lanes = std::min(PANEL, outputs - panel * PANEL);
    const Number* from = (const Number*)op.at[0] + panel * PANEL * inputs;
    Number* to = (Number*)op.at[1] + panel * PANEL * inputs;
    if (lanes < PANEL) std::fill(to, to + PANEL * inputs, 0);
    for (int64_t i = 0; i < inputs; i += 2, to += 2 * PANEL)
      for (int64_t lane = 0; lane < lanes; lane++) memcpy(to + 2 * lane, from + lane * inputs + i, 2 * sizeof(Number));
  }
}

}  // namespace
