// Tiles: small row-major matrices of `lanes` columns, aligned, where a column belongs to one query (or one key) and a
// vector holds as many of them as it has lanes. A softmax is then plain vertical arithmetic, without sums across lanes.
#pragma once

#include "vector.h"

// Tiles are this many floats wide, or a multiple: 64 bytes, a cache line and the widest vector.
constexpr Index kWidth = 16;
inline Index lanes_for(Index columns) { return divide_up(columns, kWidth) * kWidth; }

// A matrix that is read in place, element by element, through any strides: keys and values as they lie, or transposed.
struct Strided {
  const float* data;
  Index row, column;

  Strided from(Index r) const { return {data + r * row, row, column}; }
};

namespace detail {

// The product's sums that stay in registers: 24 of 32 vector registers, or 12 of 16.
constexpr int kRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif

// All loops over ROWS and VECTORS are unrolled by order: left to itself, GCC 12 keeps some of the sums in memory.
template <int ROWS, int VECTORS, bool ADD>
void block(Index inner, Strided a, const float* b, float* c, Index lanes) {
  Vector sum[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) sum[r][v] = ADD ? load(c + r * lanes + v * kLanes) : Vector{};
  for (Index k = 0; k < inner; ++k) {
    Vector row[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) row[v] = load(b + k * lanes + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const float x = a.data[r * a.row + k * a.column];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sum[r][v] += x * row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(c + r * lanes + v * kLanes, sum[r][v]);
}

// As many blocks of ROWS rows as there are, then one of what is left.
template <int ROWS, int VECTORS, bool ADD>
void rows_of_blocks(Index rows, Index inner, Strided a, const float* b, float* c, Index lanes) {
  Index r = 0;
  for (; r + ROWS <= rows; r += ROWS) block<ROWS, VECTORS, ADD>(inner, a.from(r), b, c + r * lanes, lanes);
  if constexpr (ROWS > 1)
    if (r < rows) rows_of_blocks<ROWS - 1, VECTORS, ADD>(rows - r, inner, a.from(r), b, c + r * lanes, lanes);
}

template <int VECTORS, bool ADD>
void columns_of_blocks(Index rows, Index inner, Strided a, const float* b, float* c, Index lanes, Index columns) {
  for (; columns >= VECTORS * kLanes; columns -= VECTORS * kLanes, b += VECTORS * kLanes, c += VECTORS * kLanes)
    rows_of_blocks<kRows, VECTORS, ADD>(rows, inner, a, b, c, lanes);
  if constexpr (VECTORS > 1)
    if (columns > 0) columns_of_blocks<VECTORS - 1, ADD>(rows, inner, a, b, c, lanes, columns);
}

}  // namespace detail

// C = A B, for A (rows, inner) and tiles B (inner, lanes) and C (rows, lanes).
inline void multiply(Index rows, Index inner, Strided a, const float* b, float* c, Index lanes) {
  detail::columns_of_blocks<detail::kVectors, false>(rows, inner, a, b, c, lanes, lanes);
}

// C += A B
inline void multiply_add(Index rows, Index inner, Strided a, const float* b, float* c, Index lanes) {
  detail::columns_of_blocks<detail::kVectors, true>(rows, inner, a, b, c, lanes, lanes);
}

// Transposes rows (count, columns) into a tile (columns, lanes), times `factor`; the lanes beyond `count` become 0.
inline void pack(const float* rows, Index count, Index columns, float factor, float* tile, Index lanes) {
  for (Index c = 0; c < columns; ++c) {
    for (Index i = 0; i < count; ++i) tile[c * lanes + i] = rows[i * columns + c] * factor;
    std::fill(tile + c * lanes + count, tile + (c + 1) * lanes, 0.0f);
  }
}

// The way back: row i is lane i of the tile, times factors[i].
inline void unpack(const float* tile, Index lanes, const float* factors, float* rows, Index count, Index columns) {
  for (Index i = 0; i < count; ++i)
    for (Index c = 0; c < columns; ++c) rows[i * columns + c] = tile[c * lanes + i] * factors[i];
}
