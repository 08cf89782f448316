// Attention as it is written on paper: three nests per head, over a whole matrix of scores. One thread.
#include "problem.h"

// The scores of one head; the next head uses them again.
extern "C" Index naive_scratch(const Problem* p) { return p->queries * p->keys; }

extern "C" void naive(const Problem* problem, const float* q_, const float* k_, const float* v_, float* out_,
                      float* scores_) {
  const Problem& p = *problem;
  const auto q = query_side(p, q_), k = key_side(p, k_), v = key_side(p, v_);
  const auto out = query_side(p, out_);
  const Tensor4<float> scores{scores_, 1, p.queries, p.keys};
  const float scale = p.scale();

  for (Index b = 0; b < p.batch; ++b)
    for (Index h = 0; h < p.heads; ++h) {
      const Index shared = h / p.group();
      for (Index i = 0; i < p.queries; ++i)
        for (Index j = 0; j < p.visible(i); ++j) {
          float sum = 0;
          for (Index c = 0; c < p.head_dim; ++c) sum += q(b, h, i, c) * k(b, shared, j, c);
          scores(0, 0, i, j) = sum * scale;
        }

      for (Index i = 0; i < p.queries; ++i) {
        float top = -INFINITY, total = 0;
        for (Index j = 0; j < p.visible(i); ++j) top = std::max(top, scores(0, 0, i, j));
        for (Index j = 0; j < p.visible(i); ++j) total += scores(0, 0, i, j) = std::exp(scores(0, 0, i, j) - top);
        for (Index j = 0; j < p.visible(i); ++j) scores(0, 0, i, j) /= total;
      }

      for (Index i = 0; i < p.queries; ++i)
        for (Index c = 0; c < p.head_dim; ++c) {
          float sum = 0;
          for (Index j = 0; j < p.visible(i); ++j) sum += scores(0, 0, i, j) * v(b, shared, j, c);
          out(b, h, i, c) = sum;
        }
    }
}
