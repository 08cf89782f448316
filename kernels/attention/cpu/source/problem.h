// One call's sizes, and how its tensors lie in memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

using Index = std::int64_t;

// ../build.py has the same fields in the same order. key_heads: heads of keys and values; heads is a multiple of it.
// br, bc: tile sizes, queries by keys. is_causal: 0 or 1; query i sees keys 0 … i.
struct Problem {
  Index batch, heads, key_heads, queries, keys, head_dim, br, bc, is_causal, threads;

  // How many keys query i sees; they are the first ones.
  Index visible(Index i) const { return is_causal ? std::min(i + 1, keys) : keys; }

  // How many heads of queries share one of keys and values.
  Index group() const { return heads / key_heads; }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
};

// A contiguous (batch, heads, rows, columns) tensor, and the one place that makes an offset of four indices.
template <typename T>
struct Tensor4 {
  T* data;
  Index heads, rows, columns;

  T& operator()(Index b, Index h, Index i, Index j) const { return data[((b * heads + h) * rows + i) * columns + j]; }
};

template <typename T>
Tensor4<T> query_side(const Problem& p, T* data) {
  return {data, p.heads, p.queries, p.head_dim};
}

template <typename T>
Tensor4<T> key_side(const Problem& p, T* data) {
  return {data, p.key_heads, p.keys, p.head_dim};
}

// One number for each query.
template <typename T>
Tensor4<T> per_query(const Problem& p, T* data) {
  return {data, p.heads, p.queries, 1};
}

inline Index divide_up(Index a, Index b) { return (a + b - 1) / b; }
