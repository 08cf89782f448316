// One small matrix product: C += A B, with C in registers.
//
// A is (rows, inner), read element by element in place, with any strides: keys and values are used as they lie, and
// transposing them costs nothing. B is (inner, columns) and C (rows, columns), row-major in a tile.
#pragma once

#include "vector.h"

struct Strided {
  const float* data;
  std::int64_t row, column;  // strides
};

namespace detail {

template <int ROWS, int VECTORS, bool ACCUMULATE>
inline void block(std::int64_t inner, Strided a, const float* b, float* c, std::int64_t ld) {
  Vector sum[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) sum[r][v] = ACCUMULATE ? load(c + r * ld + v * kLanes) : Vector{};
  for (std::int64_t k = 0; k < inner; ++k) {
    Vector row[VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) row[v] = load(b + k * ld + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const float x = a.data[r * a.row + k * a.column];
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v) sum[r][v] += x * row[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) store(c + r * ld + v * kLanes, sum[r][v]);
}

template <int ROWS, int VECTORS, bool ACCUMULATE>
inline void panel(std::int64_t rows, std::int64_t inner, Strided a, const float* b, float* c, std::int64_t ld) {
  std::int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) block<ROWS, VECTORS, ACCUMULATE>(inner, {a.data + r * a.row, a.row, a.column}, b, c + r * ld, ld);
  for (; r < rows; ++r) block<1, VECTORS, ACCUMULATE>(inner, {a.data + r * a.row, a.row, a.column}, b, c + r * ld, ld);
}

}  // namespace detail

template <bool ACCUMULATE>
inline void multiply(std::int64_t rows, std::int64_t inner, std::int64_t columns, Strided a, const float* b, float* c) {
  const std::int64_t ld = columns;
  std::int64_t j = 0;
  for (; j + 4 * kLanes <= columns; j += 4 * kLanes) detail::panel<KROWS, 4, ACCUMULATE>(rows, inner, a, b + j, c + j, ld);
  for (; j + 2 * kLanes <= columns; j += 2 * kLanes) detail::panel<KROWS, 2, ACCUMULATE>(rows, inner, a, b + j, c + j, ld);
  for (; j < columns; j += kLanes) detail::panel<KROWS, 1, ACCUMULATE>(rows, inner, a, b + j, c + j, ld);
}
