// As many float32 numbers at a time as a register holds: the only file that knows which instructions there are.
//
// Compiled with AVX-512 and its bf16 dot product each function is one or a few instructions; compiled for any other CPU it
// is plain C++ over the compiler's vector type. The two round alike but may differ in the last bit of a sum.
// kLanes is 16, 8 or 4: what is laid out in memory never depends on it.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define PAGEMILL_AVX512 1
#define PAGEMILL_VECTOR_BYTES 64
#elif defined(__AVX__)
#define PAGEMILL_VECTOR_BYTES 32
#else
#define PAGEMILL_VECTOR_BYTES 16
#endif

namespace pagemill {

using bf16 = std::uint16_t;  // the upper half of a float32

constexpr int kLanes = PAGEMILL_VECTOR_BYTES / 4;
typedef float Lanes __attribute__((vector_size(PAGEMILL_VECTOR_BYTES), may_alias));
typedef std::int32_t Ints __attribute__((vector_size(PAGEMILL_VECTOR_BYTES), may_alias));
typedef std::uint32_t Pairs __attribute__((vector_size(PAGEMILL_VECTOR_BYTES), may_alias));  // two bf16 a lane, the first in the lower half

#define PAGEMILL_INLINE static inline __attribute__((always_inline))
// Before a loop over registers: left rolled it would put them into memory.
#define PAGEMILL_UNROLL _Pragma("GCC unroll 32")

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

PAGEMILL_INLINE Lanes all(float x) { return x - Lanes{}; }

// 0, 1, 2, ...
PAGEMILL_INLINE Ints lane_numbers() {
    Ints numbers{};
    PAGEMILL_UNROLL for (int i = 0; i < kLanes; i++) numbers[i] = i;
    return numbers;
}

template <class Vector, class Number>
PAGEMILL_INLINE Vector load_as(const Number* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

PAGEMILL_INLINE Lanes load(const float* from) { return load_as<Lanes>(from); }
PAGEMILL_INLINE void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }

// Pairs that lie one after the other, or one pair in every lane.
PAGEMILL_INLINE Pairs load_pairs(const bf16* from) { return load_as<Pairs>(from); }
PAGEMILL_INLINE Pairs all_pairs(const bf16* from) { return Pairs{} + load_as<std::uint32_t>(from); }

typedef bf16 Halves __attribute__((vector_size(PAGEMILL_VECTOR_BYTES / 2)));

// The lower half of each lane.
PAGEMILL_INLINE void store_halves(std::uint16_t* to, Pairs x) {
    const Halves halves = __builtin_convertvector(x, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// The first number of each pair, with zero for the second.
PAGEMILL_INLINE Pairs without_second(Pairs x) { return x & 0xffffu; }

// The two bytes of the bf16 number that each code of seven bits stands for; an eighth bit is its sign.
struct CodeTable {
    alignas(64) std::uint8_t high[128];
    alignas(64) std::uint8_t low[128];
};

struct TwoPairs {
    Pairs first, second;
};

#ifdef PAGEMILL_AVX512

PAGEMILL_INLINE Lanes max(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
PAGEMILL_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }

// sum + a.first * b.first + a.second * b.second in each lane.
PAGEMILL_INLINE Lanes add_dot(Lanes sum, Pairs a, Pairs b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// sum + the four products of a's unsigned and b's signed bytes in each lane; no lane may overflow.
PAGEMILL_INLINE Ints add_dot4(Ints sum, Ints a, Ints b) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }

// The largest magnitude of 64 numbers, as the upper half of a float32; infinities and NaN count as larger than the others.
PAGEMILL_INLINE bf16 largest_magnitude_of_64(const bf16* from) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    const __m512i a = _mm512_and_si512(_mm512_loadu_si512(from), magnitude), b = _mm512_and_si512(_mm512_loadu_si512(from + 32), magnitude);
    const __m512i of_32 = _mm512_max_epu16(a, b);
    const __m256i of_16 = _mm256_max_epu16(_mm512_castsi512_si256(of_32), _mm512_extracti64x4_epi64(of_32, 1));
    const __m128i of_8 = _mm_max_epu16(_mm256_castsi256_si128(of_16), _mm256_extracti128_si256(of_16, 1));
    return bf16(~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(of_8, _mm_set1_epi16(-1))), 0));
}

// 64 codes, of two vectors of 32 numbers 8 by 8 in turn, as bf16 numbers without their scales.
PAGEMILL_INLINE TwoPairs decoded(const CodeTable& table, const std::uint8_t* codes) {
    const __m512i code = _mm512_loadu_si512(codes);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), code, _mm512_load_si512(table.low + 64));
    const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), code, _mm512_load_si512(table.high + 64));
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, code, _mm512_set1_epi8(char(0x80)), 0xf8);  // a | (b & c)
    return {(Pairs)_mm512_unpacklo_epi8(low, high), (Pairs)_mm512_unpackhi_epi8(low, high)};
}

// The same with them: `first` is added to the bits of the one vector's numbers, two by two, `second` to the other's.
PAGEMILL_INLINE TwoPairs decoded(const CodeTable& table, const std::uint8_t* codes, Pairs first, Pairs second) {
    const TwoPairs plain = decoded(table, codes);
    return {(Pairs)_mm512_add_epi16((__m512i)plain.first, (__m512i)first), (Pairs)_mm512_add_epi16((__m512i)plain.second, (__m512i)second)};
}

PAGEMILL_INLINE void decode_codes(const CodeTable& table, const std::uint8_t* codes, Pairs first, Pairs second, bf16* out) {
    const TwoPairs both = decoded(table, codes, first, second);
    std::memcpy(out, &both.first, sizeof both.first);
    std::memcpy(out + 32, &both.second, sizeof both.second);
}

// 16 numbers from 0 to 1 times powers of two up to 2^118: `shifts` are added to their bits. What gets too small is zero.
PAGEMILL_INLINE void shift_16(bf16* numbers, const bf16* shifts) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)numbers), shift = _mm256_loadu_si256((const __m256i*)shifts);
    const __m256i shifted = _mm256_maskz_adds_epi16(_mm256_test_epi16_mask(x, x), x, shift);
    _mm256_storeu_si256((__m256i*)numbers, _mm256_max_epi16(shifted, _mm256_setzero_si256()));
}

PAGEMILL_INLINE Lanes load_bf16(const bf16* from) {
    return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}

PAGEMILL_INLINE void store_bf16(bf16* to, Lanes x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }

PAGEMILL_INLINE float largest(Lanes x) { return _mm512_reduce_max_ps(x); }
PAGEMILL_INLINE float sum_of(Lanes x) { return _mm512_reduce_add_ps(x); }

PAGEMILL_INLINE Lanes round_to_whole(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PAGEMILL_INLINE Lanes times_power_of_two(Lanes x, Lanes exponent) { return _mm512_scalef_ps(x, exponent); }

#else

PAGEMILL_INLINE Lanes max(Lanes a, Lanes b) { return a > b ? a : b; }
PAGEMILL_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return a * b + c; }

PAGEMILL_INLINE Lanes add_dot(Lanes sum, Pairs a, Pairs b) {
    const Lanes first = (Lanes)(a << 16) * (Lanes)(b << 16);
    const Lanes second = (Lanes)(a & 0xffff0000u) * (Lanes)(b & 0xffff0000u);
    return sum + second + first;
}

PAGEMILL_INLINE Ints add_dot4(Ints sum, Ints a, Ints b) {
    PAGEMILL_UNROLL for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 0xff) * (b << (24 - shift) >> 24);
    return sum;
}

PAGEMILL_INLINE bf16 largest_magnitude_of_64(const bf16* from) {
    bf16 result = 0;
    for (int i = 0; i < 64; i++) result = (from[i] & 0x7fff) > result ? from[i] & 0x7fff : result;
    return result;
}

// 64 codes as bf16 numbers, as above.
PAGEMILL_INLINE void decode_codes(const CodeTable& table, const std::uint8_t* codes, Pairs first, Pairs second, bf16* out) {
    for (int i = 0; i < 64; i++) {
        const std::uint8_t code = codes[i % 32 / 8 * 16 + i / 32 * 8 + i % 8];
        const int magnitude = table.high[code & 127] << 8 | table.low[code & 127];
        const std::uint32_t shift = i < 32 ? first[0] : second[0];
        out[i] = bf16((magnitude | (code & 128) << 8) + (i % 2 ? shift >> 16 : shift));
    }
}

PAGEMILL_INLINE Lanes load_bf16(const bf16* from) { return (Lanes)(__builtin_convertvector(load_as<Halves>(from), Pairs) << 16); }

// Rounds to nearest, ties to even; a NaN stays one.
PAGEMILL_INLINE void store_bf16(bf16* to, Lanes x) {
    const Pairs bits = (Pairs)x;
    const Pairs rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Halves result = __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40u, Halves);
    std::memcpy(to, &result, sizeof result);
}

PAGEMILL_INLINE float largest(Lanes x) {
    float result = x[0];
    for (int i = 1; i < kLanes; i++) result = x[i] > result ? x[i] : result;
    return result;
}

PAGEMILL_INLINE float sum_of(Lanes x) {
    float result = 0;
    for (int i = 0; i < kLanes; i++) result += x[i];
    return result;
}

// Adding 1.5 * 2^23 leaves no bits for a fraction.
PAGEMILL_INLINE Lanes round_to_whole(Lanes x) { return (x + 12582912.0f) - 12582912.0f; }

// Whole exponents from -127 (which gives 0) to 127.
PAGEMILL_INLINE Lanes times_power_of_two(Lanes x, Lanes exponent) {
    return x * (Lanes)((__builtin_convertvector(exponent, Ints) + 127) << 23);
}

#endif

typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));

// Numbers from 0 to 255 as bytes, rounded to nearest.
PAGEMILL_INLINE void store_bytes(std::uint8_t* to, Lanes x) {
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(round_to_whole(x), Ints), Bytes);
    std::memcpy(to, &bytes, sizeof bytes);
}

PAGEMILL_INLINE float widen(bf16 x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    return load_as<float>(&bits);
}

// 2^x for x <= 127; exactly 1 at 0, 0 from -127 down (at -inf too). Relative error below 3e-6: a polynomial of degree 4 in
// the fraction, fitted to the least maximum of the relative error.
PAGEMILL_INLINE Lanes power_of_two(Lanes x) {
    x = max(x, all(-127.0f));
    const Lanes whole = round_to_whole(x);
    const Lanes fraction = x - whole;
    Lanes power = multiply_add(all(0.00958285287f), fraction, all(0.0559064249f));
    power = multiply_add(power, fraction, all(0.240240986f));
    power = multiply_add(power, fraction, all(0.693124193f));
    power = multiply_add(power, fraction, all(1.0f));
    return times_power_of_two(power, whole);
}

}  // namespace pagemill
