// Attention row by row: one query's scores are made, turned into weights and used before the next query's, so all that
// is kept is one vector of scores per thread. OpenMP over batch, heads and rows.
#include <omp.h>

#include "problem.h"

namespace {

// A whole number of cache lines, so that no two threads write to one.
Index vector_floats(const Problem& p) { return divide_up(p.keys, 16) * 16; }

void attend(const Problem& p, const float* __restrict q, const float* __restrict k, const float* __restrict v,
            float* __restrict out, float* __restrict scores, Index keys) {
  const Index d = p.head_dim;
  const float scale = p.scale();
  float top = -INFINITY, total = 0;
  for (Index j = 0; j < keys; ++j) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Index c = 0; c < d; ++c) sum += q[c] * k[j * d + c];
    scores[j] = sum * scale;
    top = std::max(top, scores[j]);
  }
  for (Index j = 0; j < keys; ++j) total += scores[j] = std::exp(scores[j] - top);
  std::fill_n(out, d, 0.0f);
  for (Index j = 0; j < keys; ++j) {
    const float weight = scores[j] / total;
#pragma omp simd
    for (Index c = 0; c < d; ++c) out[c] += weight * v[j * d + c];
  }
}

}  // namespace

extern "C" Index fused_scratch(const Problem* p) { return p->threads * vector_floats(*p); }

extern "C" void fused(const Problem* problem, const float* q_, const float* k_, const float* v_, float* out_,
                      float* scratch) {
  const Problem& p = *problem;
  const auto q = query_side(p, q_), k = key_side(p, k_), v = key_side(p, v_);
  const auto out = query_side(p, out_);
#pragma omp parallel for collapse(3) schedule(dynamic, 16) num_threads(p.threads)
  for (Index b = 0; b < p.batch; ++b)
    for (Index h = 0; h < p.heads; ++h)
      for (Index i = 0; i < p.queries; ++i)
        attend(p, &q(b, h, i, 0), &k(b, h / p.group(), 0, 0), &v(b, h / p.group(), 0, 0), &out(b, h, i, 0),
               scratch + omp_get_thread_num() * vector_floats(p), p.visible(i));
}
