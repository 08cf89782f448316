// The naive version with its two matrix products done tile by tile (br == bc), so that what a tile needs stays in cache
// and its innermost loops run over contiguous numbers. Still a whole matrix of scores. One thread.
#include "problem.h"

namespace {

// scores += scale · Q Kᵀ for queries i0 … i1, keys j0 … j1 and columns c0 … c1 of head h, whose keys are those of `shared`
void add_scores(const Tensor4<const float>& q, const Tensor4<const float>& k, const Tensor4<float>& scores, float scale,
                Index b, Index h, Index shared, Index i0, Index i1, Index j0, Index j1, Index c0, Index c1) {
  for (Index i = i0; i < i1; ++i)
    for (Index j = j0; j < j1; ++j) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (Index c = c0; c < c1; ++c) sum += q(b, h, i, c) * k(b, shared, j, c);
      scores(0, 0, i, j) += sum * scale;
    }
}

// out += weights V for the same
void add_values(const Tensor4<float>& weights, const Tensor4<const float>& v, const Tensor4<float>& out, Index b,
                Index h, Index shared, Index i0, Index i1, Index j0, Index j1, Index c0, Index c1) {
  for (Index i = i0; i < i1; ++i)
    for (Index j = j0; j < j1; ++j) {
      const float weight = weights(0, 0, i, j);
#pragma omp simd
      for (Index c = c0; c < c1; ++c) out(b, h, i, c) += weight * v(b, shared, j, c);
    }
}

// Rows of scores to rows of weights; what a query does not see gets weight 0.
void softmax(const Problem& p, const Tensor4<float>& scores) {
  for (Index i = 0; i < p.queries; ++i) {
    float top = -INFINITY, total = 0;
    for (Index j = 0; j < p.visible(i); ++j) top = std::max(top, scores(0, 0, i, j));
    for (Index j = 0; j < p.visible(i); ++j) total += scores(0, 0, i, j) = std::exp(scores(0, 0, i, j) - top);
    for (Index j = 0; j < p.visible(i); ++j) scores(0, 0, i, j) /= total;
    for (Index j = p.visible(i); j < p.keys; ++j) scores(0, 0, i, j) = 0;
  }
}

}  // namespace

// The scores of one head; the next head uses them again.
extern "C" Index blocked_scratch(const Problem* p) { return p->queries * p->keys; }

extern "C" void blocked(const Problem* problem, const float* q_, const float* k_, const float* v_, float* out_,
                        float* scores_) {
  const Problem& p = *problem;
  const auto q = query_side(p, q_), k = key_side(p, k_), v = key_side(p, v_);
  const auto out = query_side(p, out_);
  const Tensor4<float> scores{scores_, 1, p.queries, p.keys};
  const auto tiles = [&p](Index size, auto&& body) {
    for (Index start = 0; start < size; start += p.br) body(start, std::min(start + p.br, size));
  };

  std::fill_n(out_, p.batch * p.heads * p.queries * p.head_dim, 0.0f);
  for (Index b = 0; b < p.batch; ++b)
    for (Index h = 0; h < p.heads; ++h) {
      const Index shared = h / p.group();
      std::fill_n(scores_, p.queries * p.keys, 0.0f);
      tiles(p.queries, [&](Index i0, Index i1) {
        tiles(p.visible(i1 - 1), [&](Index j0, Index j1) {
          tiles(p.head_dim, [&](Index c0, Index c1) {
            add_scores(q, k, scores, p.scale(), b, h, shared, i0, i1, j0, j1, c0, c1);
          });
        });
      });
      softmax(p, scores);
      tiles(p.queries, [&](Index i0, Index i1) {
        tiles(p.visible(i1 - 1), [&](Index j0, Index j1) {
          tiles(p.head_dim, [&](Index c0, Index c1) { add_values(scores, v, out, b, h, shared, i0, i1, j0, j1, c0, c1); });
        });
      });
    }
}
