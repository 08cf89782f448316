// FlashAttention-2, backward: weights are computed again from the log-sum-exp, tile by tile.
//
// With P the weights, dP = dO Vᵀ and D = rowsum(dO ∘ O): dS = P ∘ (dP - D), dV = Pᵀ dO, dK = dSᵀ Q and dQ = dS K.
// One pass, five products: a tile of keys stays and lies in the lanes of vectors, while all queries that see it pass by.
// dK and dV are complete when they have passed. dQ is a sum over tiles of keys: each range of keys adds up one of its
// own, and at the end the ranges' are added in their order. The ranges depend on the shapes alone, so that the bits are
// the same in every run with any number of threads.
#include <omp.h>

#include "tile.h"

namespace {

constexpr float kLog2E = 1.4426950408889634f;

// Pieces of work there should be for the threads, and the most ranges that keys are cut into for them, each of which
// takes memory of dQ's size.
constexpr Index kPieces = 64, kRanges = 16;

// How the keys of a head are cut.
struct Ranges {
  Index keys, count;  // keys of a range: whole tiles

  explicit Ranges(const Problem& p) {
    const Index wanted = std::clamp(divide_up(kPieces, p.batch * p.key_heads), Index{1}, kRanges);
    keys = divide_up(divide_up(p.keys, p.bc), wanted) * p.bc;
    count = divide_up(p.keys, keys);
  }
};

// What one thread works in. Keys lie in the lanes; queries are read where they lie.
struct Tiles {
  Index lanes, width;  // keys of a tile and columns of a head, rounded up to whole cache lines
  float* keys;         // (head_dim, lanes), times scale · log2 e
  float* values;       // (head_dim, lanes)
  float* key_rows;     // (bc, width), times scale
  float* keys_d;       // (head_dim, lanes)
  float* values_d;     // (head_dim, lanes)
  float* weights;      // (br, lanes): scores, then P
  float* scores_d;     // (br, lanes): dP, then dS
  float* factors;      // (lanes)

  Tiles(const Problem& p, float* data)
      : lanes(lanes_for(p.bc)),
        width(lanes_for(p.head_dim)),
        keys(data),
        values(keys + p.head_dim * lanes),
        key_rows(values + p.head_dim * lanes),
        keys_d(key_rows + p.bc * width),
        values_d(keys_d + p.head_dim * lanes),
        weights(values_d + p.head_dim * lanes),
        scores_d(weights + p.br * lanes),
        factors(scores_d + p.br * lanes) {}

  static Index floats(const Problem& p) {
    return (4 * p.head_dim + 2 * p.br + 1) * lanes_for(p.bc) + p.bc * lanes_for(p.head_dim);
  }
};

// A head of queries. q, out_d: (queries, head_dim); logsumexp, sums: (queries); q_d: (queries, width), of one range.
struct Head {
  const float *q, *out_d, *logsumexp, *sums;
  float* q_d;
};

// P and dS of a query for the tile's keys; those from `visible` on do not count.
void weigh(const Tiles& t, Index row, float logsumexp, float sum_, Index visible) {
  const Vector logsumexp2 = spread(logsumexp * kLog2E), sum = spread(sum_);
  float *weights = t.weights + row * t.lanes, *scores_d = t.scores_d + row * t.lanes;
  for (Index lane = 0; lane < t.lanes; lane += kLanes) {
    const Vector weight = exp2(load(weights + lane) - logsumexp2);
    store(weights + lane, weight);
    store(scores_d + lane, weight * (load(scores_d + lane) - sum));
  }
  visible = std::clamp(visible, Index{0}, t.lanes);
  std::fill(weights + visible, weights + t.lanes, 0.0f);
  std::fill(scores_d + visible, scores_d + t.lanes, 0.0f);
}

// What the queries of one head add to dK and dV of the `keys` keys from j0 on, and these keys to the queries' dQ.
// `is_first`: no tile of this range has written to dQ yet.
void pass(const Problem& p, const Tiles& t, const Head& head, Index j0, Index keys, bool is_first) {
  const Index d = p.head_dim;
  for (Index i0 = p.is_causal ? j0 : 0; i0 < p.queries; i0 += p.br) {  // earlier queries do not see these keys
    const Index rows = std::min(p.br, p.queries - i0);
    const float *q = head.q + i0 * d, *out_d = head.out_d + i0 * d;
    multiply(rows, d, {q, d, 1}, t.keys, t.weights, t.lanes);
    multiply(rows, d, {out_d, d, 1}, t.values, t.scores_d, t.lanes);
    for (Index i = 0; i < rows; ++i)
      weigh(t, i, head.logsumexp[i0 + i], head.sums[i0 + i], std::min(keys, p.visible(i0 + i) - j0));
    multiply_add(d, rows, {out_d, 1, d}, t.weights, t.values_d, t.lanes);
    multiply_add(d, rows, {q, 1, d}, t.scores_d, t.keys_d, t.lanes);
    const auto product = is_first ? multiply : multiply_add;
    product(rows, keys, {t.scores_d, t.lanes, 1}, t.key_rows, head.q_d + i0 * t.width, t.width);
  }
}

void pack_rows(const float* rows, Index count, Index columns, float factor, float* tile, Index width) {
  for (Index i = 0; i < count; ++i) {
    for (Index c = 0; c < columns; ++c) tile[i * width + c] = rows[i * columns + c] * factor;
    std::fill(tile + i * width + columns, tile + (i + 1) * width, 0.0f);
  }
}

void unpack_scaled(const Tiles& t, const float* tile, float factor, float* rows, Index count, Index head_dim) {
  std::fill_n(t.factors, t.lanes, factor);
  unpack(tile, t.lanes, t.factors, rows, count, head_dim);
}

// Whole cache lines, so that what lies behind them is aligned.
Index sums_floats(const Problem& p) { return lanes_for(p.batch * p.heads * p.queries); }
Index queries_d_floats(const Problem& p) { return p.batch * p.heads * p.queries * lanes_for(p.head_dim); }

}  // namespace

// D for every query, dQ of every range of keys, and tiles per thread.
extern "C" Index flash_backward_scratch(const Problem* p) {
  return sums_floats(*p) + Ranges(*p).count * queries_d_floats(*p) + p->threads * Tiles::floats(*p);
}

extern "C" void flash_backward(const Problem* problem, const float* q_, const float* k_, const float* v_,
                               const float* out, const float* logsumexp_, const float* out_d_, float* q_d, float* k_d_,
                               float* v_d_, float* scratch) {
  const Problem& p = *problem;
  const Ranges ranges(p);
  const Index d = p.head_dim, width = lanes_for(d), all_rows = p.batch * p.heads * p.queries;
  float *sums_ = scratch, *queries_d_ = sums_ + sums_floats(p);
  float* tiles = queries_d_ + ranges.count * queries_d_floats(p);
  const auto q = query_side(p, q_), out_d = query_side(p, out_d_);
  const auto logsumexp = per_query(p, logsumexp_);
  const auto sums = per_query(p, sums_);
  const auto k = key_side(p, k_), v = key_side(p, v_);
  const auto k_d = key_side(p, k_d_), v_d = key_side(p, v_d_);
  const auto queries_d = [&](Index range) {
    return Tensor4<float>{queries_d_ + range * queries_d_floats(p), p.heads, p.queries, width};
  };
#pragma omp parallel num_threads(p.threads)
  {
    const Tiles t(p, tiles + omp_get_thread_num() * Tiles::floats(p));
#pragma omp for
    for (Index row = 0; row < all_rows; ++row) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (Index c = 0; c < d; ++c) sum += out_d_[row * d + c] * out[row * d + c];
      sums_[row] = sum;
    }
#pragma omp for collapse(3) schedule(dynamic)
    for (Index b = 0; b < p.batch; ++b)
      for (Index shared = 0; shared < p.key_heads; ++shared)
        for (Index range = 0; range < ranges.count; ++range) {
          const Index first = range * ranges.keys, end = std::min(first + ranges.keys, p.keys);
          for (Index j0 = first; j0 < end; j0 += p.bc) {
            const Index keys = std::min(p.bc, end - j0);
            pack(&k(b, shared, j0, 0), keys, d, p.scale() * kLog2E, t.keys, t.lanes);
            pack(&v(b, shared, j0, 0), keys, d, 1.0f, t.values, t.lanes);
            pack_rows(&k(b, shared, j0, 0), keys, d, p.scale(), t.key_rows, t.width);
            std::fill_n(t.keys_d, d * t.lanes, 0.0f);
            std::fill_n(t.values_d, d * t.lanes, 0.0f);
            for (Index h = shared * p.group(); h < (shared + 1) * p.group(); ++h)
              pass(p, t,
                   {&q(b, h, 0, 0), &out_d(b, h, 0, 0), &logsumexp(b, h, 0, 0), &sums(b, h, 0, 0),
                    &queries_d(range)(b, h, 0, 0)},
                   j0, keys, j0 == first);
            unpack_scaled(t, t.keys_d, p.scale(), &k_d(b, shared, j0, 0), keys, d);
            unpack_scaled(t, t.values_d, 1.0f, &v_d(b, shared, j0, 0), keys, d);
          }
        }
    // A causal mask hides the later ranges from a query: nothing wrote to their dQ.
#pragma omp for
    for (Index row = 0; row < all_rows; ++row) {
      const Index last = (p.visible(row % p.queries) - 1) / ranges.keys;
      for (Index c = 0; c < d; ++c) q_d[row * d + c] = queries_d_[row * width + c];
      for (Index range = 1; range <= last; ++range)
        for (Index c = 0; c < d; ++c) q_d[row * d + c] += queries_d(range).data[row * width + c];
    }
  }
}
