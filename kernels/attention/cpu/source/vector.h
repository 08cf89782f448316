// Vectors of floats through the compiler's vector extensions (GCC, Clang): one source for AVX-512, AVX2, NEON and SSE,
// and no intrinsics.
#pragma once

#include "problem.h"

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / sizeof(float);

typedef float Vector __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t Bits __attribute__((vector_size(kVectorBytes)));

// Both ask for an address that is a multiple of a vector's size.
inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector x) { *reinterpret_cast<Vector*>(p) = x; }

inline Vector spread(float x) { return x - Vector{}; }

// Ignores a NaN in `a`: a running maximum stays a number, and the NaN arrives in the sum of the weights.
inline Vector maximum(Vector a, Vector b) { return a > b ? a : b; }

// 2^x for x < 128 with a relative error below 2e-7: exactly 0 from -126 down to -infinity, NaN for NaN.
inline Vector exp2(Vector x) {
  x = x <= -126.0f ? spread(-127.0f) : x;
  // Adding 1.5·2²³ rounds to an integer and leaves it in the mantissa's low bits.
  constexpr float kRound = 12582912.0f;
  const Vector rounded = x + kRound;
  const Vector fraction = x - (rounded - kRound);
  // Minimax for the relative error on [-1/2, 1/2] with p(0) = 1 exactly, so that -127 ends as the bits of 0.
  Vector p = fraction * 1.3264727e-3f + 9.671513e-3f;
  p = p * fraction + 5.5507336e-2f;
  p = p * fraction + 2.4022242e-1f;
  p = p * fraction + 6.93147e-1f;
  p = p * fraction + 1.0f;
  // Add the integer to the exponent.
  return reinterpret_cast<Vector>(reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(rounded) << 23));
}
