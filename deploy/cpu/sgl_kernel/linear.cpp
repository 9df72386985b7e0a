// y = x w^T for a few rows of x, the weights read once and widened in registers: where a processor has no bfloat16
// instructions, torch multiplies each row by itself, and verifying four rows costs four decode steps.
// Called through ctypes by native.py, which says what the arguments are. Each sum runs over its products in one order,
// whatever the other rows are, so a row comes out the same to the bit in verifying as in decoding.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "bfloat16.h"

namespace {

constexpr int64_t kLane = 8;
typedef float Lanes __attribute__((vector_size(kLane * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLane * 2), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(kLane * 4), aligned(4), may_alias));

INLINE Lanes lanes(const float *at) { return *reinterpret_cast<const Lanes *>(at); }
INLINE Lanes lanes(const uint16_t *at) {
  return (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves *>(at), Bits) << 16);
}

INLINE float total(Lanes sum) {
  sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3);
  sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
  return sum[0] + sum[1];
}

struct Work {
  const float *x;     // [rows, inner], widened
  const void *weight; // [outer, inner]
  const void *bias;   // [outer] or null
  void *y;            // [rows, outer]
  int64_t rows, inner, outer;
};

// A tile of R rows and C weights: its sums stay in registers.
template <typename T, int R, int C>
INLINE void tile(const Work &work, int64_t row, int64_t column) {
  const int64_t inner = work.inner, whole = inner / kLane * kLane;
  const float *x = work.x + row * inner;
  const T *weight = static_cast<const T *>(work.weight) + column * inner;
  Lanes sums[R][C] = {};
  for (int64_t i = 0; i < whole; i += kLane) {
    Lanes w[C];
    for (int c = 0; c < C; ++c) w[c] = lanes(weight + c * inner + i);
    for (int r = 0; r < R; ++r) {
      const Lanes one = lanes(x + r * inner + i);
      for (int c = 0; c < C; ++c) sums[r][c] += one * w[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float sum = total(sums[r][c]);
      for (int64_t i = whole; i < inner; ++i) sum += x[r * inner + i] * load(weight + c * inner + i);
      if (work.bias) sum += load(static_cast<const T *>(work.bias) + column + c);
      store(static_cast<T *>(work.y) + (row + r) * work.outer + column + c, sum);
    }
}

template <typename T, int C>
INLINE void column(const Work &work, int64_t at) {
  int64_t row = 0;
  for (; row + 4 <= work.rows; row += 4) tile<T, 4, C>(work, row, at);
  switch (work.rows - row) {
    case 3: tile<T, 3, C>(work, row, at); break;
    case 2: tile<T, 2, C>(work, row, at); break;
    case 1: tile<T, 1, C>(work, row, at); break;
    default: break;
  }
}

template <typename T>
INLINE void columns(const Work &work, int64_t begin, int64_t end) {
  int64_t at = begin;
  for (; at + 2 <= end; at += 2) column<T, 2>(work, at);
  for (; at < end; ++at) column<T, 1>(work, at);
}

CLONES void columns_float(const Work &work, int64_t begin, int64_t end) { columns<float>(work, begin, end); }
CLONES void columns_bfloat16(const Work &work, int64_t begin, int64_t end) { columns<uint16_t>(work, begin, end); }

template <typename T>
INLINE void widen(const T *from, float *to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = load(from + i);
}

}  // namespace

extern "C" void eyas_linear(int bfloat16, const void *x, const void *weight, const void *bias, void *y, int64_t rows,
                            int64_t inner, int64_t outer, int threads) {
  std::vector<float> wide;
  if (bfloat16) {
    wide.resize(rows * inner);
    widen(static_cast<const uint16_t *>(x), wide.data(), rows * inner);
  }
  const Work work{bfloat16 ? wide.data() : static_cast<const float *>(x), weight, bias, y, rows, inner, outer};
  // Below, waking the other threads costs more than they save.
  const int used = inner * outer < 100000 ? 1 : threads;
#pragma omp parallel num_threads(used) if (used > 1)
  {
    constexpr int64_t kBlock = 32;  // columns
    const int64_t blocks = (outer + kBlock - 1) / kBlock;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kBlock, end = std::min(outer, begin + kBlock);
      (bfloat16 ? columns_bfloat16 : columns_float)(work, begin, end);
    }
  }
}
