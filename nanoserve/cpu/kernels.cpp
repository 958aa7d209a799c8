// The operations of ops.py for a CPU with AVX512-BF16: bfloat16 numbers, float32 sums, memory read once.
//
// Knows pointers, strides and threads. Refuses to know models, requests and Python: `run` executes a list of
// operations, each a kind, pointers and numbers, with one barrier between two of them; native.py writes the list.
//
// Every row comes out the same whatever stands beside it: sums go over inputs, and over positions, in one order, however
// many rows there are, so a request's tokens depend neither on its batch nor on how its prompt was cut into chunks.
//
// Matrices are packed in panels of 32 outputs: [outputs / 32][inputs / 2][32][2]. A panel is read as one stream, two
// inputs of 16 outputs to a register, as VDPBF16PS multiplies them. One tile of 1 to 12 rows and 32 outputs serves
// decode, which is as fast as memory, and prefill, which is as fast as the multipliers.

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
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
    if (op.n[4]) memcpy((float*)op.at[2] + place, sums, num * 4);
    else if (residual) for (int64_t i = 0; i < num; i++) out[i] = narrow(widen(narrow(sums[i])) + widen(residual[place + i]));
    else narrow_all(sums, out, num);
  }
}

// out [rows, outputs] = inputs x panels (+ bias) (+ residual).
// at: inputs, panels (bf16, or int8 with scales), out, bias, residual, scales. n: rows, inputs, outputs, input stride,
// whether out is float32.
void linear(const Op& op, Team team) {
  static thread_local std::vector<float> sums;
  static thread_local std::vector<bf16> wide;
  const int64_t num_rows = op.n[0], num_inputs = op.n[1], panels = (op.n[2] + PANEL - 1) / PANEL;
  const bool is_int8 = op.at[5];
  // A chunk of a few panels stays in the second cache while all rows pass; int8 for few rows in the first, once widened.
  const int64_t chunk = is_int8 && num_rows <= ROWS ? 512 : 2048, most = num_rows > 4 * ROWS ? 4 : 1;
  const int64_t padded = (num_rows + ROWS - 1) / ROWS * ROWS;
  sums.resize(most * padded * PANEL), wide.resize(is_int8 ? most * chunk * PANEL : 0);
  for (int64_t panel = team.begin(panels); panel < team.end(panels); panel += most) {
    const int64_t group = std::min(most, team.end(panels) - panel);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t from = 0; from < num_inputs; from += chunk) {
      const int64_t num = std::min(chunk, num_inputs - from);
      const bf16* at[4];
      for (int64_t i = 0; i < group; i++) {
        const int64_t place = ((panel + i) * num_inputs + from) * PANEL;
        at[i] = is_int8 ? &wide[i * chunk * PANEL] : (const bf16*)op.at[1] + place;
        if (is_int8) widen_int8((const int8_t*)op.at[1] + place, &wide[i * chunk * PANEL], num * PANEL);
      }
      for (int64_t row = 0; row < num_rows; row += ROWS)
        for (int64_t i = 0; i < group; i++)
          TILES[std::min(ROWS, num_rows - row)]((const bf16*)op.at[0] + row * op.n[3] + from, op.n[3], at[i], num / 2,
                                                &sums[(i * padded + row) * PANEL]);
    }
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

// out = inputs / rms(inputs) * weight. at: inputs, weight, out. n: rows, heads, width, row strides in and out.
void rms_norm(const Op& op, Team team) {
  const int64_t heads = op.n[1], width = op.n[2];
  for (int64_t item = team.begin(op.n[0] * heads); item < team.end(op.n[0] * heads); item++) {
    const bf16* in = (const bf16*)op.at[0] + item / heads * op.n[3] + item % heads * width;
    bf16* out = (bf16*)op.at[2] + item / heads * op.n[4] + item % heads * width;
    const bf16* weight = (const bf16*)op.at[1];
    float sum = 0;
    for (int64_t i = 0; i < width; i++) sum += widen(in[i]) * widen(in[i]);
    const float factor = 1 / std::sqrt(sum / width + float(op.scale));
    for (int64_t i = 0; i < width; i++) out[i] = narrow(widen(narrow(widen(in[i]) * factor)) * widen(weight[i]));
  }
}

// cosines and sines [rows, pairs] in float32. at: frequencies (float), positions (int64), cosines, sines. n: rows, pairs.
void angles(const Op& op, Team team) {
  for (int64_t row = team.begin(op.n[0]); row < team.end(op.n[0]); row++)
    for (int64_t i = 0; i < op.n[1]; i++) {
      const float angle = float(((const int64_t*)op.at[1])[row]) * ((const float*)op.at[0])[i];
      ((float*)op.at[2])[row * op.n[1] + i] = std::cos(angle);
      ((float*)op.at[3])[row * op.n[1] + i] = std::sin(angle);
    }
}

// Turn the pairs (i, i + pairs) of each head, in place. at: heads, cosines, sines. n: rows, heads, pairs, row stride.
void rotate(const Op& op, Team team) {
  const int64_t heads = op.n[1], pairs = op.n[2];
  for (int64_t row = team.begin(op.n[0]); row < team.end(op.n[0]); row++) {
    const float *cosine = (const float*)op.at[1] + row * pairs, *sine = (const float*)op.at[2] + row * pairs;
    for (int64_t head = 0; head < heads; head++) {
      bf16* first = (bf16*)op.at[0] + row * op.n[3] + head * 2 * pairs;
      bf16* second = first + pairs;
      for (int64_t i = 0; i < pairs; i++) {
        const float x = widen(first[i]), y = widen(second[i]);
        first[i] = narrow(x * cosine[i] - y * sine[i]);
        second[i] = narrow(y * cosine[i] + x * sine[i]);
      }
    }
  }
}

// out [rows, width] = silu(gate) * up. at: gate, up, out. n: rows, width, row stride of gate and up.
void gate(const Op& op, Team team) {
  const int64_t width = op.n[1], pieces = (width + 255) / 256;
  for (int64_t item = team.begin(op.n[0] * pieces); item < team.end(op.n[0] * pieces); item++) {
    const int64_t row = item / pieces, from = item % pieces * 256, to = std::min(width, from + 256);
    const bf16 *gates = (const bf16*)op.at[0] + row * op.n[2], *ups = (const bf16*)op.at[1] + row * op.n[2];
    bf16* out = (bf16*)op.at[2] + row * width;
    for (int64_t i = from; i < to; i++) {
      const float x = widen(gates[i]);
      out[i] = narrow(widen(narrow(x / (1 + std::exp(-x)))) * widen(ups[i]));
    }
  }
}

// lines[places[i]] = new[i]. at: lines, places (int64), new. n: rows, heads, width, row stride of new.
void store(const Op& op, Team team) {
  for (int64_t item = team.begin(op.n[0] * op.n[1]); item < team.end(op.n[0] * op.n[1]); item++)
    memcpy((bf16*)op.at[0] + ((const int64_t*)op.at[1])[item] * op.n[2],
           (const bf16*)op.at[2] + item / op.n[1] * op.n[3] + item % op.n[1] * op.n[2], op.n[2] * 2);
}

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
      auto place = [&](int64_t r) { return (first + (row + r) / group) * op.n[4] + (head * group + (row + r) % group) * dim; };
      for (int64_t r = 0; r < num; r++) memcpy(&queries[r * dim], (const bf16*)op.at[0] + place(r), dim * 2);
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

// Panels of a matrix [outputs, inputs] of 2 or 1 bytes a number; outputs beyond the last are zero.
// at: matrix, panels. n: outputs, inputs, bytes.
template <typename Number>
void pack(const Op& op, Team team) {
  const int64_t outputs = op.n[0], inputs = op.n[1], panels = (outputs + PANEL - 1) / PANEL;
  for (int64_t panel = team.begin(panels); panel < team.end(panels); panel++)
    for (int64_t lane = 0; lane < PANEL; lane++) {
      const int64_t output = panel * PANEL + lane;
      const Number* from = (const Number*)op.at[0] + output * inputs;
      Number* to = (Number*)op.at[1] + panel * PANEL * inputs + lane * 2;
      for (int64_t i = 0; i < inputs; i += 2, to += 2 * PANEL)
        to[0] = output < outputs ? from[i] : 0, to[1] = output < outputs ? from[i + 1] : 0;
    }
}

using Kernel = void (*)(const Op&, Team);
const Kernel KERNELS[] = {linear, embed, rms_norm, angles, rotate, gate, store, attend, pack<bf16>, pack<int8_t>};

// Wait until all threads have come here. OpenMP's own barrier spins on when a thread has lost its core to somebody else.
struct Barrier {
  std::atomic<int64_t> arrived{0}, rounds{0};

  void wait(int64_t num_threads) {
    const int64_t round = rounds.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived.store(0, std::memory_order_relaxed);
      rounds.fetch_add(1, std::memory_order_release);
    }
    for (int64_t spins = 0; rounds.load(std::memory_order_acquire) == round; spins++)
      spins < 4096 ? _mm_pause() : void(sched_yield());
  }
};

}  // namespace

extern "C" void nanoserve_run(const Op* ops, int64_t count, int64_t num_threads) {
  Barrier barrier;
#pragma omp parallel num_threads(num_threads)
  {
    const Team team{omp_get_thread_num(), omp_get_num_threads()};
    for (int64_t i = 0; i < count; i++) {
      KERNELS[ops[i].kind](ops[i], team);
      if (i + 1 < count) barrier.wait(team.num_threads);
    }
  }
}
