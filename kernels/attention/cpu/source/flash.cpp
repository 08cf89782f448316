#include <limits>
#include <cstdlib>
#include "problem.h"
#include "product.h"
namespace {
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Tile { float *q, *s, *o, *m, *l, *alpha; };

void hide(float* s, std::int64_t i0, std::int64_t j0, std::int64_t rows, std::int64_t lanes){
  for (std::int64_t j=0;j<rows;++j) for (std::int64_t i=0;i<lanes;++i) s[j*lanes+i] = i0+i < j0+j ? -kInf : s[j*lanes+i];
}
void softmax(std::int64_t rows, std::int64_t lanes, const Tile& t){
  for (std::int64_t i=0;i<lanes;i+=kLanes){
    Vector old=load(t.m+i), top=old;
    for (std::int64_t j=0;j<rows;++j) top = maximum(load(t.s+j*lanes+i), top);
    store(t.m+i, top);
    Vector base = top == -kInf ? Vector{} : top;
    Vector alpha = exp2_nonpositive(old-base);
    store(t.alpha+i, alpha);
    Vector l = load(t.l+i)*alpha;
    for (std::int64_t j=0;j<rows;++j){ Vector p=exp2_nonpositive(load(t.s+j*lanes+i)-base); store(t.s+j*lanes+i,p); l+=p; }
    store(t.l+i,l);
  }
}
}
extern "C" void flash(const Problem* problem, const float* q_, const float* k_, const float* v_, float* out_, float* lse, float* scratch, std::int64_t br, std::int64_t bc) {
  const Problem p=*problem; const auto q=query_side(p,q_), k=key_side(p,k_), v=key_side(p,v_); const auto out=query_side(p,out_);
  const std::int64_t d=p.head_dim, lanes=(br+15)/16*16, tiles=(p.queries+br-1)/br;
  const std::int64_t per=(2*d+bc+3)*lanes;
  const float scale=p.scale()*kLog2E;
#pragma omp parallel num_threads(p.threads)
  {
#ifdef _OPENMP
  int omp_get_thread_num();
#endif
  float* base=nullptr; base=(float*)aligned_alloc(64,per*4); (void)scratch;
  Tile t{base, base+d*lanes, base+(d+bc)*lanes, base+(2*d+bc)*lanes, base+(2*d+bc+1)*lanes, base+(2*d+bc+2)*lanes};
#pragma omp for collapse(3) schedule(dynamic)
  for (std::int64_t b=0;b<p.batch;++b) for (std::int64_t h=0;h<p.heads;++h) for (std::int64_t ti=0;ti<tiles;++ti){
    const std::int64_t i0=ti*br, rows=std::min(br,p.queries-i0);
    for (std::int64_t c=0;c<d;++c) for (std::int64_t i=0;i<lanes;++i) t.q[c*lanes+i]= i<rows ? q(b,h,i0+i,c)*scale : 0;
    for (std::int64_t i=0;i<d*lanes;++i) t.o[i]=0;
    for (std::int64_t i=0;i<lanes;++i) t.m[i]=-kInf, t.l[i]=0;
    const std::int64_t last=p.visible(i0+rows-1);
    for (std::int64_t j0=0;j0<last;j0+=bc){
      const std::int64_t n=std::min(bc,last-j0);
      multiply<false>(n,d,lanes,{&k(b,h,j0,0),d,1},t.q,t.s);
      if (p.is_causal && j0+n-1>i0) hide(t.s,i0,j0,n,lanes);
      softmax(n,lanes,t);
      for (std::int64_t c=0;c<d;++c) for (std::int64_t i=0;i<lanes;i+=kLanes) store(t.o+c*lanes+i, load(t.o+c*lanes+i)*load(t.alpha+i));
      multiply<true>(d,n,lanes,{&v(b,h,j0,0),1,d},t.s,t.o);
    }
    for (std::int64_t i=0;i<rows;++i){ float inv=1/t.l[i]; for (std::int64_t c=0;c<d;++c) out(b,h,i0+i,c)=t.o[c*lanes+i]*inv;
      lse[(b*p.heads+h)*p.queries+i0+i]=(t.m[i]+std::log2(t.l[i]))*kLn2; }
  }
  free(base);
  }
}
