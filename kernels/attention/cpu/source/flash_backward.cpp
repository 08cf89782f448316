// FlashAttention-2, backward: weights are computed again from the log-sum-exp, tile by tile.
//
// With P the weights, dP = dO Vᵀ and D = rowsum(dO ∘ O): dS = P ∘ (dP - D), dV = Pᵀ dO, dK = dSᵀ Q and dQ = dS K.
// Two passes, so that each sum has one owner: no atomics, and the same bits in every run with any number of threads. In
// the first, keys lie in the lanes and queries pass by (dK, dV); in the second the other way round (dQ). The price is
// that scores and dP are computed twice.
#include <omp.h>

#include "tile.h"

namespace {

constexpr float kLog2E = 1.4426950408889634f;

// What one thread works in. "Resident" rows lie in the lanes; "passing" rows are read where they lie.
struct Tiles {
  Index lanes;
  float* scored;    // (head_dim, lanes): resident keys or queries, times scale · log2 e
  float* other;     // (head_dim, lanes): resident values or dO
  float* scored_d;  // (head_dim, lanes): dK or dQ
  float* other_d;   // (head_dim, lanes): dV
  float* weights;   // (passing, lanes): scores, then P
  float* scores_d;  // (passing, lanes): dP, then dS
  float* factors;   // (lanes): log-sum-exp in base 2, later what a sum is multiplied with
  float* sums;      // (lanes): D

  Tiles(const Problem& p, Index resident, Index passing, float* data)
      : lanes(lanes_for(resident)),
        scored(data),
        other(scored + p.head_dim * lanes),
        scored_d(other + p.head_dim * lanes),
        other_d(scored_d + p.head_dim * lanes),
        weights(other_d + p.head_dim * lanes),
        scores_d(weights + passing * lanes),
        factors(scores_d + passing * lanes),
        sums(factors + lanes) {}

  static Index floats(const Problem& p, Index resident, Index passing) {
    return (4 * p.head_dim + 2 * passing + 2) * lanes_for(resident);
  }
  static Index floats(const Problem& p) { return std::max(floats(p, p.bc, p.br), floats(p, p.br, p.bc)); }
};

// One head's tensors. q, out, out_d, q_d: (queries, head_dim); k, v, k_d, v_d: (keys, head_dim); the rest: (queries).
struct Head {
  const float *q, *k, *v, *out_d, *logsumexp, *sums;
  float *q_d, *k_d, *v_d;
};

void weigh(float* weights, float* scores_d, Vector logsumexp2, Vector sum) {
  const Vector weight = exp2(load(weights) - logsumexp2);
  store(weights, weight);
  store(scores_d, weight * (load(scores_d) - sum));
}

// Lanes first … last of a row take no part.
void hide(const Tiles& t, Index row, Index first, Index last) {
  first = std::clamp(first, Index{0}, t.lanes), last = std::clamp(last, Index{0}, t.lanes);
  std::fill(t.weights + row * t.lanes + first, t.weights + row * t.lanes + last, 0.0f);
  std::fill(t.scores_d + row * t.lanes + first, t.scores_d + row * t.lanes + last, 0.0f);
}

void unpack_scaled(const Tiles& t, const float* tile, float factor, float* rows, Index count, Index head_dim) {
  std::fill_n(t.factors, t.lanes, factor);
  unpack(tile, t.lanes, t.factors, rows, count, head_dim);
}

// dK and dV of `keys` keys from j0 on.
void keys_pass(const Problem& p, const Tiles& t, const Head& head, Index j0, Index keys) {
  const Index d = p.head_dim;
  pack(head.k + j0 * d, keys, d, p.scale() * kLog2E, t.scored, t.lanes);
  pack(head.v + j0 * d, keys, d, 1.0f, t.other, t.lanes);
  std::fill_n(t.scored_d, d * t.lanes, 0.0f);
  std::fill_n(t.other_d, d * t.lanes, 0.0f);
  for (Index i0 = p.is_causal ? j0 : 0; i0 < p.queries; i0 += p.br) {  // earlier queries do not see these keys
    const Index rows = std::min(p.br, p.queries - i0);
    const float *q = head.q + i0 * d, *out_d = head.out_d + i0 * d;
    multiply(rows, d, {q, d, 1}, t.scored, t.weights, t.lanes);
    multiply(rows, d, {out_d, d, 1}, t.other, t.scores_d, t.lanes);
    for (Index i = 0; i < rows; ++i) {
      const Vector logsumexp2 = spread(head.logsumexp[i0 + i] * kLog2E), sum = spread(head.sums[i0 + i]);
      for (Index at = i * t.lanes; at < (i + 1) * t.lanes; at += kLanes)
        weigh(t.weights + at, t.scores_d + at, logsumexp2, sum);
      if (p.is_causal) hide(t, i, i0 + i + 1 - j0, t.lanes);
    }
    multiply_add(d, rows, {out_d, 1, d}, t.weights, t.other_d, t.lanes);
    multiply_add(d, rows, {q, 1, d}, t.scores_d, t.scored_d, t.lanes);
  }
  unpack_scaled(t, t.scored_d, p.scale(), head.k_d + j0 * d, keys, d);
  unpack_scaled(t, t.other_d, 1.0f, head.v_d + j0 * d, keys, d);
}

// dQ of `rows` queries from i0 on.
void queries_pass(const Problem& p, const Tiles& t, const Head& head, Index i0, Index rows) {
  const Index d = p.head_dim;
  pack(head.q + i0 * d, rows, d, p.scale() * kLog2E, t.scored, t.lanes);
  pack(head.out_d + i0 * d, rows, d, 1.0f, t.other, t.lanes);
  pack(head.logsumexp + i0, rows, 1, kLog2E, t.factors, t.lanes);
  pack(head.sums + i0, rows, 1, 1.0f, t.sums, t.lanes);
  std::fill_n(t.scored_d, d * t.lanes, 0.0f);
  const Index visible = p.visible(i0 + rows - 1);
  for (Index j0 = 0; j0 < visible; j0 += p.bc) {
    const Index keys = std::min(p.bc, visible - j0);
    const float *k = head.k + j0 * d, *v = head.v + j0 * d;
    multiply(keys, d, {k, d, 1}, t.scored, t.weights, t.lanes);
    multiply(keys, d, {v, d, 1}, t.other, t.scores_d, t.lanes);
    for (Index j = 0; j < keys; ++j) {
      for (Index lane = 0; lane < t.lanes; lane += kLanes)
        weigh(t.weights + j * t.lanes + lane, t.scores_d + j * t.lanes + lane, load(t.factors + lane),
              load(t.sums + lane));
      if (p.is_causal) hide(t, j, 0, j0 + j - i0);
    }
    multiply_add(d, keys, {k, 1, d}, t.scores_d, t.scored_d, t.lanes);
  }
  unpack_scaled(t, t.scored_d, p.scale(), head.q_d + i0 * d, rows, d);
}

// Whole cache lines, so that the tiles behind them are aligned.
Index sums_floats(const Problem& p) { return lanes_for(p.batch * p.heads * p.queries); }

}  // namespace

// D for every query, and tiles per thread.
extern "C" Index flash_backward_scratch(const Problem* p) { return sums_floats(*p) + p->threads * Tiles::floats(*p); }

extern "C" void flash_backward(const Problem* problem, const float* q, const float* k, const float* v, const float* out,
                               const float* logsumexp, const float* out_d, float* q_d, float* k_d, float* v_d,
                               float* scratch) {
  const Problem& p = *problem;
  float *sums = scratch, *tiles = scratch + sums_floats(p);
  const auto head = [&](Index b, Index h) {
    const Index at_query = &query_side(p, q)(b, h, 0, 0) - q, at_key = &key_side(p, k)(b, h, 0, 0) - k;
    const Index at_row = &per_query(p, sums)(b, h, 0, 0) - sums;
    return Head{q + at_query, k + at_key, v + at_key, out_d + at_query, logsumexp + at_row,
                sums + at_row, q_d + at_query, k_d + at_key, v_d + at_key};
  };
#pragma omp parallel num_threads(p.threads)
  {
    float* mine = tiles + omp_get_thread_num() * Tiles::floats(p);
#pragma omp for
    for (Index row = 0; row < p.batch * p.heads * p.queries; ++row) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (Index c = 0; c < p.head_dim; ++c) sum += out_d[row * p.head_dim + c] * out[row * p.head_dim + c];
      sums[row] = sum;
    }
#pragma omp for collapse(3) schedule(dynamic) nowait
    for (Index b = 0; b < p.batch; ++b)
      for (Index h = 0; h < p.heads; ++h)
        for (Index j0 = 0; j0 < p.keys; j0 += p.bc)
          keys_pass(p, Tiles(p, p.bc, p.br, mine), head(b, h), j0, std::min(p.bc, p.keys - j0));
#pragma omp for collapse(3) schedule(dynamic)
    for (Index b = 0; b < p.batch; ++b)
      for (Index h = 0; h < p.heads; ++h)
        for (Index i0 = 0; i0 < p.queries; i0 += p.br)
          queries_pass(p, Tiles(p, p.br, p.bc, mine), head(b, h), i0, std::min(p.br, p.queries - i0));
  }
}
