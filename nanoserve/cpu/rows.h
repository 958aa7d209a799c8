// What is done to each row by itself: norms, rotations, gates, and storing keys and values.

#pragma once

#include "tile.h"

namespace {

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

// out = (inputs - mean) / deviation * weight + bias. at: inputs, weight, out, bias. n: rows, width.
void layer_norm(const Op& op, Team team) {
  const int64_t width = op.n[1];
  const bf16 *weight = (const bf16*)op.at[1], *bias = (const bf16*)op.at[3];
  for (int64_t row = team.begin(op.n[0]); row < team.end(op.n[0]); row++) {
    const bf16* in = (const bf16*)op.at[0] + row * width;
    bf16* out = (bf16*)op.at[2] + row * width;
    float sum = 0, squares = 0;
    for (int64_t i = 0; i < width; i++) sum += widen(in[i]);
    const float mean = sum / width;
    for (int64_t i = 0; i < width; i++) squares += (widen(in[i]) - mean) * (widen(in[i]) - mean);
    const float factor = 1 / std::sqrt(squares / width + float(op.scale));
    for (int64_t i = 0; i < width; i++)
      out[i] = narrow((widen(in[i]) - mean) * factor * widen(weight[i]) + widen(bias[i]));
  }
}

// left += right. at: left, right. n: rows, width.
void add(const Op& op, Team team) {
  bf16* left = (bf16*)op.at[0];
  const bf16* right = (const bf16*)op.at[1];
  for (int64_t i = team.begin(op.n[0]) * op.n[1]; i < team.end(op.n[0]) * op.n[1]; i++)
    left[i] = narrow(widen(left[i]) + widen(right[i]));
}

// x / (1 + exp(-power)). An infinite divisor would be a NaN: with -ffast-math a division begins with an estimate.
float sigmoid_times(float x, float power) { return x / (1 + std::exp(std::min(-power, 80.0f))); }

// out [rows, width] = gelu(inputs), by its tanh formula. at: inputs, out. n: rows, width.
void gelu(const Op& op, Team team) {
  const bf16* in = (const bf16*)op.at[0];
  bf16* out = (bf16*)op.at[1];
  for (int64_t i = team.begin(op.n[0]) * op.n[1]; i < team.end(op.n[0]) * op.n[1]; i++) {
    const float x = widen(in[i]);
    out[i] = narrow(sigmoid_times(x, 1.5957691216f * (x + 0.044715f * x * x * x)));
  }
}

// cosines and sines [rows, pairs]. at: frequencies (float), positions (int64), cosines, sines (float). n: rows, pairs.
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
      out[i] = narrow(widen(narrow(sigmoid_times(x, x))) * widen(ups[i]));
    }
  }
}

// lines[places[i]] = new[i]. at: lines, places (int64), new. n: rows, heads, width, row stride of new.
void store(const Op& op, Team team) {
  for (int64_t item = team.begin(op.n[0] * op.n[1]); item < team.end(op.n[0] * op.n[1]); item++)
    memcpy((bf16*)op.at[0] + ((const int64_t*)op.at[1])[item] * op.n[2],
           (const bf16*)op.at[2] + item / op.n[1] * op.n[3] + item % op.n[1] * op.n[2], op.n[2] * 2);
}

}  // namespace
