// Attention of new positions over stored ones, in blocks or not, for decode and prefill alike.

#pragma once

#include "tile.h"

namespace {

// One KV head of one request, packed as `tile` reads it: keys as panels of 32 positions, values as panels of 32 dims.
struct Packed {
  std::vector<bf16> keys, values;

  // n: see `attend`. Position p lies in slot table[p / block] * block + p % block, without a table in slot p.
  void fill(const Op& op, int64_t request, int64_t head, int64_t context) {
    const int64_t dim = op.n[3], block = op.n[7], dims = (dim + PANEL - 1) / PANEL * PANEL;
    const int64_t padded = (context + PANEL - 1) / PANEL * PANEL;
    const int32_t* table = op.at[4] ? (const int32_t*)op.at[4] + request * op.n[8] : nullptr;
    keys.resize(padded * dim), values.resize(padded * dims);
    auto place = [&](int64_t position) {
      const int64_t slot = table ? table[position / block] * block + position % block : position;
      return head * op.n[5] + slot * op.n[6];
    };
    std::fill(keys.end() - PANEL * dim, keys.end(), 0);  // positions behind the context
    for (int64_t position = 0; position < context; position++) {
      uint32_t* to = (uint32_t*)&keys[position / PANEL * PANEL * dim] + position % PANEL;
      const char* key = (const char*)((const bf16*)op.at[1] + place(position));
      for (int64_t pair = 0; pair < dim / 2; pair++) memcpy(to + pair * PANEL, key + 4 * pair, 4);
    }
    for (int64_t position = 0; position < padded; position += 2) {
      const bf16* even = position < context ? (const bf16*)op.at[2] + place(position) : nullptr;
      const bf16* odd = position + 1 < context ? (const bf16*)op.at[2] + place(position + 1) : nullptr;
      for (int64_t from = 0; from < dims; from += PANEL) {
        uint32_t* to = (uint32_t*)&values[from * padded + position * PANEL];
        const int64_t num = std::min(PANEL, dim - from);
        if (!odd || num < PANEL) std::fill(to, to + PANEL, 0);
        if (odd) for (int64_t i = 0; i < num; i++) to[i] = even[from + i] | uint32_t(odd[from + i]) << 16;
        else if (even) for (int64_t i = 0; i < num; i++) to[i] = even[from + i];
      }
    }
  }
};

// weights [padded] in bfloat16 = softmax over the first `limit` scores, zero behind them; returns what to divide by.
// Scores lie in panels, [padded / 32][ROWS][32], of which `scores` is this row's first.
float softmax(float* scores, int64_t limit, int64_t padded, float scale, bf16* weights) {
  float best = -INFINITY, total = 0;
  for (int64_t from = 0; from < padded; from += PANEL) {
    float* panel = scores + from * ROWS;
    for (int64_t i = std::max<int64_t>(0, limit - from); i < PANEL; i++) panel[i] = -INFINITY;
    for (int64_t i = 0; i < PANEL; i++) best = std::max(best, panel[i]);
  }
  for (int64_t from = 0; from < padded; from += PANEL) {
    const float* panel = scores + from * ROWS;
    float raised[PANEL];
    for (int64_t i = 0; i < PANEL; i++) raised[i] = std::exp(std::max((panel[i] - best) * scale, -90.0f));
    for (int64_t i = std::max<int64_t>(0, limit - from); i < PANEL; i++) raised[i] = 0;
    for (int64_t i = 0; i < PANEL; i++) total += raised[i];
    narrow_all(raised, weights + from, PANEL);
  }
  return total;
}

// Each new position of a request over all positions up to its own; a request's new ones are its last ones.
// at: queries, keys, values, out, tables (int32, or none), contexts (int32), row starts (int32, none: a row each).
// n: requests, heads, KV heads, dim, query row stride, KV head stride, KV position stride, block, table stride.
void attend(const Op& op, Team team) {
  static thread_local Packed packed;
  static thread_local std::vector<float> scores;
  static thread_local std::vector<bf16> queries, weights;
  const int64_t heads = op.n[1], kv_heads = op.n[2], dim = op.n[3], group = heads / kv_heads;
  const int32_t *contexts = (const int32_t*)op.at[5], *starts = (const int32_t*)op.at[6];
  const int64_t stripes = starts ? 4 : 1, items = op.n[0] * kv_heads * stripes;
  queries.resize(ROWS * dim);
  for (int64_t item = team.thread; item < items; item += team.num_threads) {
    const int64_t request = item / stripes / kv_heads, head = item / stripes % kv_heads;
    const int64_t first = starts ? starts[request] : request, context = contexts[request];
    const int64_t num_new = starts ? starts[request + 1] - first : 1, num_rows = num_new * group;
    if (item % stripes * ROWS >= num_rows) continue;
    packed.fill(op, request, head, context);
    const int64_t whole = (context + PANEL - 1) / PANEL * PANEL;
    scores.resize(ROWS * whole), weights.resize(ROWS * whole);
    for (int64_t row = item % stripes * ROWS; row < num_rows; row += ROWS * stripes) {
      const int64_t num = std::min(ROWS, num_rows - row);
      const int64_t limit = context - num_new + (row + num - 1) / group + 1;
      const int64_t padded = (limit + PANEL - 1) / PANEL * PANEL;
      for (int64_t r = 0; r < num; r++) {
        const int64_t position = first + (row + r) / group, which = head * group + (row + r) % group;
        memcpy(&queries[r * dim], (const bf16*)op.at[0] + position * op.n[4] + which * dim, dim * 2);
      }
      std::fill(scores.begin(), scores.begin() + padded * ROWS, 0.0f);
      for (int64_t panel = 0; panel < padded / PANEL; panel++)
        TILES[num](queries.data(), dim, &packed.keys[panel * PANEL * dim], dim / 2, &scores[panel * ROWS * PANEL]);
      float totals[ROWS];
      for (int64_t r = 0; r < num; r++)
        totals[r] = softmax(&scores[r * PANEL], context - num_new + (row + r) / group + 1, padded, float(op.scale),
                            &weights[r * whole]);
      for (int64_t from = 0; from < dim; from += PANEL) {
        alignas(64) float sums[ROWS * PANEL] = {};
        TILES[num](weights.data(), whole, &packed.values[from * whole], padded / 2, sums);
        for (int64_t r = 0; r < num; r++) {
          const int64_t position = first + (row + r) / group, which = head * group + (row + r) % group;
          bf16* out = (bf16*)op.at[3] + (position * heads + which) * dim + from;
          for (int64_t i = 0; i < std::min(PANEL, dim - from); i++) out[i] = narrow(sums[r * PANEL + i] / totals[r]);
        }
      }
    }
  }
}

}  // namespace
