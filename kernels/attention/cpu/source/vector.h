// Vectors as the compiler offers them (GCC and Clang vector extensions): no intrinsics, so one source serves AVX-512,
// AVX2, NEON and plain SSE. Loops left to the auto-vectoriser kept their accumulators in memory in GCC 12.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Vector __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t Bits __attribute__((vector_size(kVectorBytes)));

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }  // aligned
inline void store(float* p, Vector x) { *reinterpret_cast<Vector*>(p) = x; }

// A NaN in `b` is kept, one in `a` is not: accumulate as maximum(x, so_far)... callers count on NaN reaching the sum.
inline Vector maximum(Vector a, Vector b) { return a > b ? a : b; }

// 2^x for x ≤ 0, relative error below 2e-7; 0 from x ≤ -126 down to -infinity, NaN for NaN.
inline Vector exp2_nonpositive(Vector x) {
  // Adding 1.5·2²³ leaves the nearest integer in the low bits of the mantissa.
  constexpr float kRound = 12582912.0f;
  x = x <= -126.0f ? Vector{} - 127.0f : x;
  const Vector shifted = x + kRound;
  const Vector fraction = x - (shifted - kRound);
  // Minimax on [-1/2, 1/2] for the relative error, with p(0) = 1 exactly: -127 above then gives bits 0, which is 0.
  Vector p = fraction * 1.3264727e-3f + 9.671513e-3f;
  p = p * fraction + 5.5507336e-2f;
  p = p * fraction + 2.4022242e-1f;
  p = p * fraction + 6.93147e-1f;
  p = p * fraction + 1.0f;
  return reinterpret_cast<Vector>(reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 23));
}
