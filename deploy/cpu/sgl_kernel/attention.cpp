// Attention of a few new rows to a paged KV cache, read where it lies: no copy of the keys is gathered first.
// Called through ctypes by native.py, which says what the arguments are. Every row and head is worked out by itself and
// in one order of keys, so a row comes out the same to the bit whatever goes with it, in verifying as in decoding.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "bfloat16.h"

namespace {

// Vectors by hand: a compiler's own choice of them differs from loop to loop, and with it how floats add up.
constexpr int64_t kLane = 16;    // head widths and keys are padded to whole vectors of so many floats
typedef float Lanes __attribute__((vector_size(kLane * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(kLane * 4), aligned(4), may_alias));
constexpr int64_t kAhead = 8;    // keys between what is read and what is asked for from memory

struct Cache {
  const void *k, *v;            // [S, ...], a slot's head h at k + (slot * k_stride + h * width) elements
  int64_t k_stride, v_stride;   // elements from slot to slot
};

struct Shape {
  int64_t heads, kv_heads, width, value_width;
};

struct Work {
  const void *query;      // rows [*, H, D], rows query_stride elements apart
  void *output;           // rows [*, H, V], rows output_stride elements apart
  int64_t query_stride, output_stride;
  Cache cache, fresh;     // fresh.k is null where the new keys are read from the cache too
  const int32_t *table;   // [P, columns]: the slot of each position of each request
  int64_t columns;
  Shape shape;
  float scale;
  bool causal;
  int64_t window;         // keys that a row sees, itself included; 0: all
};

struct Request {
  int64_t table_row, end, rows, first_row;  // keys in all, new rows, and where their queries start
  const uint8_t *mask;                      // [rows, rows] or null
};

struct Scratch {
  std::vector<float> query, scores, value, row;
};

INLINE Lanes *lanes(float *at) { return reinterpret_cast<Lanes *>(at); }
INLINE const Lanes *lanes(const float *at) { return reinterpret_cast<const Lanes *>(at); }

// By halves: sixteen additions one after another took longer than the product before them.
INLINE float total(Lanes sum) {
  sum += __builtin_shufflevector(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return sum[0] + sum[1];
}

// exp(x) for x <= 0 within 2 ulp: 2^n * exp(r), |r| <= ln(2)/2, and exp(r) by its Taylor series to r^7.
INLINE Lanes exponential(Lanes x) {
  const Bits below = x < -87.0f;
  x = below ? Lanes{} : x;
  const Bits whole = __builtin_convertvector(x * 1.44269504f - 0.5f, Bits);  // towards zero: the nearest, for x <= 0
  const Lanes n = __builtin_convertvector(whole, Lanes);
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Bits power = (whole + 127) << 23;
  return below ? Lanes{} : p * (Lanes)power;
}

template <typename T>
INLINE const T *row_of(const Cache &cache, bool key, int64_t slot, int64_t head, const Shape &shape) {
  return key ? static_cast<const T *>(cache.k) + slot * cache.k_stride + head * shape.width
             : static_cast<const T *>(cache.v) + slot * cache.v_stride + head * shape.value_width;
}

// Where key or value number `at` of a request lies.
template <typename T>
INLINE const T *place(const Work &work, const Request &request, bool key, int64_t at, int64_t head) {
  int64_t prefix = request.end - request.rows;
  if (at >= prefix && work.fresh.k)
    return row_of<T>(work.fresh, key, request.first_row + at - prefix, head, work.shape);
  return row_of<T>(work.cache, key, work.table[request.table_row * work.columns + at], head, work.shape);
}

template <typename T>
INLINE void widen(const T *from, float *to, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] = load(from + i);
}

INLINE bool sees(const Work &work, const Request &request, int64_t row, int64_t at) {
  int64_t prefix = request.end - request.rows, own = prefix + row;
  if (work.window > 0 && at <= own - work.window) return false;
  if (at < prefix) return true;
  if (request.mask) return request.mask[row * request.rows + at - prefix];
  return !work.causal || at <= own;
}

// One KV head of one request: all of its new rows and of the query heads that share it.
template <typename T>
INLINE void attend(const Work &work, const Request &request, int64_t kv_head, Scratch &scratch) {
  const Shape &shape = work.shape;
  const int64_t group = shape.heads / shape.kv_heads, queries = request.rows * group, keys = request.end;
  // Whole vectors, so that keys which a row does not see change nothing in how those which it sees are added up.
  const int64_t padded = (keys + kLane - 1) / kLane * kLane;
  const int64_t width = (shape.width + kLane - 1) / kLane * kLane;
  const int64_t values = (shape.value_width + kLane - 1) / kLane * kLane;
  scratch.query.assign(queries * width, 0.0f);
  scratch.value.assign(queries * values, 0.0f);
  scratch.row.assign(std::max(width, values), 0.0f);
  scratch.scores.resize(queries * padded);
  float *const query = scratch.query.data(), *const row = scratch.row.data(), *const scores = scratch.scores.data();
  for (int64_t q = 0; q < queries; ++q) {
    const T *from = static_cast<const T *>(work.query) + (request.first_row + q / group) * work.query_stride +
                    (kv_head * group + q % group) * shape.width;
    widen(from, query + q * width, shape.width);
  }
  for (int64_t at = 0; at < keys; ++at) {
    if (at + kAhead < keys) {
      const T *next = place<T>(work, request, true, at + kAhead, kv_head);
      __builtin_prefetch(next);
      __builtin_prefetch(next + 32);
    }
    widen(place<T>(work, request, true, at, kv_head), row, shape.width);
    for (int64_t q = 0; q < queries; ++q) {
      const float *one = query + q * width;
      Lanes sum = {};
      for (int64_t i = 0; i < width; i += kLane) sum += *lanes(one + i) * *lanes(row + i);
      scores[q * padded + at] = total(sum) * work.scale;
    }
  }
  for (int64_t q = 0; q < queries; ++q) {
    float *own = scores + q * padded;
    const float hidden = -std::numeric_limits<float>::infinity();
    int64_t plain = work.window > 0 ? 0 : request.end - request.rows;  // before it everything is seen
    for (int64_t at = plain; at < keys; ++at)
      if (!sees(work, request, q / group, at)) own[at] = hidden;
    std::fill(own + keys, own + padded, hidden);
    const float most = *std::max_element(own, own + padded);
    Lanes sum = {};
    for (int64_t at = 0; at < padded; at += kLane) {
      *lanes(own + at) = exponential(*lanes(own + at) - most);
      sum += *lanes(own + at);
    }
    const float share = 1.0f / total(sum);
    for (int64_t at = 0; at < padded; at += kLane) *lanes(own + at) *= share;
  }
  std::fill(scratch.row.begin(), scratch.row.end(), 0.0f);
  for (int64_t at = 0; at < keys; ++at) {
    if (at + kAhead < keys) {
      const T *next = place<T>(work, request, false, at + kAhead, kv_head);
      __builtin_prefetch(next);
      __builtin_prefetch(next + 32);
    }
    widen(place<T>(work, request, false, at, kv_head), row, shape.value_width);
    for (int64_t q = 0; q < queries; ++q) {
      const float weight = scores[q * padded + at];
      if (weight == 0.0f) continue;  // what a row does not see may hold anything, NaN too
      float *const sum = scratch.value.data() + q * values;
      for (int64_t i = 0; i < values; i += kLane) *lanes(sum + i) += weight * *lanes(row + i);
    }
  }
  for (int64_t q = 0; q < queries; ++q) {
    T *to = static_cast<T *>(work.output) + (request.first_row + q / group) * work.output_stride +
            (kv_head * group + q % group) * shape.value_width;
    for (int64_t i = 0; i < shape.value_width; ++i) store(to + i, scratch.value[q * values + i]);
  }
}

CLONES void attend_float(const Work &work, const Request &request, int64_t kv_head, Scratch &scratch) {
  attend<float>(work, request, kv_head, scratch);
}
CLONES void attend_bfloat16(const Work &work, const Request &request, int64_t kv_head, Scratch &scratch) {
  attend<uint16_t>(work, request, kv_head, scratch);
}

}  // namespace

extern "C" void eyas_attention(int bfloat16, const void *query, int64_t query_stride, void *output,
                               int64_t output_stride, const void *k, const void *v, int64_t k_stride, int64_t v_stride,
                               const void *k_new, const void *v_new, const int32_t *table, int64_t columns,
                               int64_t requests, const int64_t *table_rows, const int64_t *ends,
                               const int64_t *row_counts, const int64_t *first_rows, const uint8_t *masks,
                               int64_t heads, int64_t kv_heads, int64_t width, int64_t value_width, float scale,
                               int causal, int64_t window, int threads) {
  const Work work{query, output, query_stride, output_stride,
                  {k, v, k_stride, v_stride},
                  {k_new, v_new, kv_heads * width, kv_heads * value_width},
                  table, columns, {heads, kv_heads, width, value_width}, scale, causal != 0, window};
  std::vector<Request> todo(requests);
  int64_t mask_at = 0, total = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t rows = row_counts ? row_counts[b] : 1;
    todo[b] = {table_rows[b], ends[b], rows, first_rows ? first_rows[b] : b, masks ? masks + mask_at : nullptr};
    mask_at += rows * rows;
    total += rows * ends[b];
  }
  // Below, waking the other threads costs more than they save.
  const int used = total * heads * width < 400000 ? 1 : threads;
#pragma omp parallel num_threads(used) if (used > 1)
  {
    Scratch scratch;
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < requests; ++b)
      for (int64_t head = 0; head < kv_heads; ++head) {
        if (todo[b].rows == 0) continue;
        (bfloat16 ? attend_bfloat16 : attend_float)(work, todo[b], head, scratch);
      }
  }
}
