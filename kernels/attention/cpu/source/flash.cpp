// FlashAttention-2, forward: tiles of br queries by bc keys, an online softmax, and no matrix of scores.
//
// Queries lie in the lanes of vectors: a tile of queries is transposed once, and then each key and value is read where
// it lies, one number at a time, and multiplied with all the queries. OpenMP over batch, heads and tiles of queries.
#include <omp.h>

#include "tile.h"

namespace {

constexpr float kLog2E = 1.4426950408889634f;

// What one thread works in.
struct Tiles {
  Index lanes;
  float* queries;  // (head_dim, lanes)
  float* out;      // (head_dim, lanes), not yet divided by total
  float* weights;  // (bc, lanes); scores first
  float* top;      // (lanes): largest score so far
  float* total;    // (lanes): sum of the weights so far
  float* decay;    // (lanes): what the former tiles' weights are worth now that top has grown

  Tiles(const Problem& p, float* data)
      : lanes(lanes_for(p.br)),
        queries(data),
        out(queries + p.head_dim * lanes),
        weights(out + p.head_dim * lanes),
        top(weights + p.bc * lanes),
        total(top + lanes),
        decay(total + lanes) {}

  static Index floats(const Problem& p) { return (2 * p.head_dim + p.bc + 3) * lanes_for(p.br); }
};

// Query i0 + lane does not see the keys after its own.
void hide_later_keys(const Tiles& t, Index i0, Index j0, Index keys) {
  for (Index j = 0; j < keys; ++j)
    std::fill_n(t.weights + j * t.lanes, std::clamp(j0 + j - i0, Index{0}, t.lanes), -INFINITY);
}

// A weight is 2^((score - top) · to_exponent). The difference comes first: it is exact where it matters, near the top,
// while scores scaled before are as wrong as the largest of them.
void scores_to_weights(const Tiles& t, Index keys, float to_exponent) {
  for (Index lane = 0; lane < t.lanes; lane += kLanes) {
    const Vector former = load(t.top + lane);
    Vector top = former;
    for (Index j = 0; j < keys; ++j) top = maximum(load(t.weights + j * t.lanes + lane), top);
    store(t.top + lane, top);
    // As long as all scores were -infinity, subtract 0: their weights are 0, not exp(-infinity + infinity).
    const Vector base = top == -INFINITY ? Vector{} : top;
    const Vector decay = exp2((former - base) * to_exponent);
    store(t.decay + lane, decay);
    Vector total = load(t.total + lane) * decay;
    for (Index j = 0; j < keys; ++j) {
      const Vector weight = exp2((load(t.weights + j * t.lanes + lane) - base) * to_exponent);
      store(t.weights + j * t.lanes + lane, weight);
      total += weight;
    }
    store(t.total + lane, total);
  }
}

void decay_out(const Tiles& t, Index head_dim) {
  for (Index c = 0; c < head_dim; ++c)
    for (Index lane = 0; lane < t.lanes; lane += kLanes)
      store(t.out + c * t.lanes + lane, load(t.out + c * t.lanes + lane) * load(t.decay + lane));
}

// `rows` queries from i0 on; q, out and logsumexp point to the first of them, k and v to the head's first key.
void attend(const Problem& p, const Tiles& t, Index i0, Index rows, const float* q, const float* k, const float* v,
            float* out, float* logsumexp) {
  const Index d = p.head_dim;
  pack(q, rows, d, 1.0f, t.queries, t.lanes);
  std::fill_n(t.out, d * t.lanes, 0.0f);
  std::fill_n(t.top, t.lanes, -INFINITY);
  std::fill_n(t.total, t.lanes, 0.0f);
  const Index visible = p.visible(i0 + rows - 1);
  for (Index j0 = 0; j0 < visible; j0 += p.bc) {
    const Index keys = std::min(p.bc, visible - j0);
    multiply(keys, d, {k + j0 * d, d, 1}, t.queries, t.weights, t.lanes);
    if (p.is_causal) hide_later_keys(t, i0, j0, keys);
    scores_to_weights(t, keys, p.scale() * kLog2E);
    decay_out(t, d);
    multiply_add(d, keys, {v + j0 * d, 1, d}, t.weights, t.out, t.lanes);
  }
  for (Index i = 0; i < rows; ++i) logsumexp[i] = t.top[i] * p.scale() + std::log(t.total[i]);
  float* inverse = t.decay;
  for (Index i = 0; i < rows; ++i) inverse[i] = 1.0f / t.total[i];
  unpack(t.out, t.lanes, inverse, out, rows, d);
}

}  // namespace

extern "C" Index flash_scratch(const Problem* p) { return p->threads * Tiles::floats(*p); }

extern "C" void flash(const Problem* problem, const float* q_, const float* k_, const float* v_, float* out_,
                      float* logsumexp_, float* scratch) {
  const Problem& p = *problem;
  const auto q = query_side(p, q_), k = key_side(p, k_), v = key_side(p, v_);
  const auto out = query_side(p, out_), logsumexp = per_query(p, logsumexp_);
#pragma omp parallel num_threads(p.threads)
  {
    const Tiles tiles(p, scratch + omp_get_thread_num() * Tiles::floats(p));
#pragma omp for collapse(3) schedule(dynamic)
    for (Index b = 0; b < p.batch; ++b)
      for (Index h = 0; h < p.heads; ++h)
        for (Index i0 = 0; i0 < p.queries; i0 += p.br)
          attend(p, tiles, i0, std::min(p.br, p.queries - i0), &q(b, h, i0, 0), &k(b, h / p.group(), 0, 0),
                 &v(b, h / p.group(), 0, 0), &out(b, h, i0, 0), &logsumexp(b, h, i0, 0));
  }
}
