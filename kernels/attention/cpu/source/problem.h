// The sizes of one call, and how its tensors lie in memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

// Mirrored by `_Problem` in ../build.py, field by field.
struct Problem {
  std::int64_t batch, heads, queries, keys, head_dim;
  std::int64_t is_causal;  // query i sees keys 0 … i
  std::int64_t threads;

  // How many keys query i sees; they are the first ones.
  std::int64_t visible(std::int64_t i) const { return is_causal ? std::min(i + 1, keys) : keys; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
};

// A contiguous (batch, heads, rows, columns) tensor; the one place that computes an offset from four indices.
template <typename T>
struct Tensor4 {
  T* data;
  std::int64_t heads, rows, columns;

  T& operator()(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return data[((b * heads + h) * rows + i) * columns + j];
  }
};

template <typename T>
Tensor4<T> query_side(const Problem& p, T* data) {
  return {data, p.heads, p.queries, p.head_dim};
}

template <typename T>
Tensor4<T> key_side(const Problem& p, T* data) {
  return {data, p.heads, p.keys, p.head_dim};
}
