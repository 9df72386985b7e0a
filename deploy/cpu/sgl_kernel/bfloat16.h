// bfloat16 (as uint16_t) and float read and written alike, and how functions are compiled for more than one processor.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float load(const float *at) { return *at; }
INLINE float load(const uint16_t *at) {
  uint32_t bits = uint32_t(*at) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
INLINE void store(float *at, float value) { *at = value; }
INLINE void store(uint16_t *at, float value) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) {
    *at = 0x7fc0;
    return;
  }
  *at = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
