#include "kv_codes.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace pagemill {
namespace {

constexpr int kVector = 32;  // numbers that share two scales: those at even places one, those at odd places the other
constexpr int kLeastExponent = -60, kMostExponent = 100, kNoNumber = 118;
constexpr int kExponentPlace = 7;  // of a bf16 number
constexpr bf16 kZero = 64 << kExponentPlace;

// Of half a block's vectors every `step`th from `first` up to `end`.
struct Vectors {
    int first, step, end;
};

// The 16 bits of whole numbers, and of floats with 4 bits of exponent (bias 7) and 3 of mantissa.
constexpr CodeTable table_of(Codes codes) {
    CodeTable table{};
    for (int code = 1; code < 128; code++) {
        int mantissa = codes == Codes::kInt8 ? code : code < 8 ? code : 8 + code % 8;
        int exponent = codes == Codes::kInt8 ? 0 : std::max(code / 8, 1) - 10;
        while (mantissa < 128) mantissa *= 2, exponent--;
        const int bits = (exponent + 7 + 127) << kExponentPlace | (mantissa - 128);
        table.high[code] = std::uint8_t(bits >> 8);
        table.low[code] = std::uint8_t(bits & 255);
    }
    table.high[0] = kZero >> 8;
    table.low[0] = kZero & 255;
    return table;
}

constexpr CodeTable kWhole = table_of(Codes::kInt8), kFloat = table_of(Codes::kE4M3);

// Which of the pairs of scales that a half of a block has is that of its vector `index`, and which vectors have pair `scale`.
struct KeyScales {
    int head_dim;
    int operator()(int index) const { return index % (head_dim / 2); }
    Vectors vectors_of(int scale, int num_vectors) const { return {scale, head_dim / 2, num_vectors}; }
};
struct ValueScales {
    int head_dim;
    int operator()(int index) const { return index / (head_dim / 16); }
    Vectors vectors_of(int scale, int) const { return {scale * (head_dim / 16), 1, (scale + 1) * (head_dim / 16)}; }
};
struct OneScale {
    int operator()(int) const { return 0; }
    Vectors vectors_of(int, int num_vectors) const { return {0, 1, num_vectors}; }
};

int exponent_of(bf16 largest_magnitude, float largest_code) {
    if (largest_magnitude >= 0x7f80) return kNoNumber;
    int exponent;
    const float mantissa = std::frexp(widen(largest_magnitude) / largest_code, &exponent);
    return std::clamp(exponent - (mantissa == 0.5f), kLeastExponent, kMostExponent);
}

// Codes of numbers that are scaled already, 0 <= x; what is too large, or no number, gets the largest. Rounded to nearest, ties
// to even.
struct WholeCode {
    static constexpr float kLargest = 127.0f;
    PAGEMILL_INLINE Ints of(Lanes x) { return __builtin_convertvector(round_to_whole(x < kLargest ? x : all(kLargest)), Ints); }
};
struct FloatCode {
    static constexpr float kLargest = 448.0f;
    PAGEMILL_INLINE Ints of(Lanes x) {
        constexpr float kLeastNormal = 0.015625f, kPerSubnormal = 512.0f;
        x = x < kLargest ? x : all(kLargest);
        const Ints bits = (Ints)x;
        const Ints normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
        return x < kLeastNormal ? WholeCode::of(x * kPerSubnormal) : normal;
    }
};

// The largest magnitude among the first numbers of the pairs of some vectors, and among the second ones.
std::array<bf16, 2> largest_magnitudes(const bf16* from, const Vectors& vectors) {
    Pairs first{}, second{};
    for (int index = vectors.first; index < vectors.end; index += vectors.step) {
        for (int j = 0; j < kVector; j += 2 * kLanes) {
            const Pairs x = load_pairs(from + index * kVector + j);
            const Pairs in_first = x & 0x7fffu, in_second = x >> 16 & 0x7fffu;
            first = first < in_first ? in_first : first;
            second = second < in_second ? in_second : second;
        }
    }
    std::array<bf16, 2> most{};
    for (int lane = 0; lane < kLanes; lane++) {
        most[0] = std::max(most[0], bf16(first[lane]));
        most[1] = std::max(most[1], bf16(second[lane]));
    }
    return most;
}

// A vector's numbers to codes: the first ones of its pairs times one factor, the second ones times the other.
template <class Code>
void encode_vector(const bf16* from, Lanes first_factor, Lanes second_factor, std::uint8_t* to) {
    alignas(64) std::uint16_t codes[kVector / 2];
    for (int j = 0; j < kVector; j += 2 * kLanes) {
        const Pairs x = load_pairs(from + j);
        const Pairs first = (Pairs)Code::of((Lanes)((x & 0x7fffu) << 16) * first_factor);
        const Pairs second = (Pairs)Code::of((Lanes)(x & 0x7fff0000u) * second_factor);
        const Pairs both = first | (x >> 8 & 0x80u) | second << 8 | (x >> 16 & 0x8000u);
        store_halves(codes + j / 2, both);
    }
    for (int eight = 0; eight < 4; eight++) std::memcpy(to + eight * 16, codes + eight * 4, 8);
}

// Half a block of `count` numbers with `num_scales` pairs of scales; a single scale is written for both of its pair.
template <class Code, class ScaleOf>
void encode_half(const bf16* from, int count, int num_scales, const ScaleOf& scale_of, std::uint8_t* codes, std::int8_t* exponents) {
    for (int scale = 0; scale < num_scales; scale += 2) {
        const Vectors vectors = scale_of.vectors_of(scale / 2, count / kVector);
        std::array<bf16, 2> most = largest_magnitudes(from, vectors);
        if (num_scales == 1) most[0] = most[1] = std::max(most[0], most[1]);
        Lanes factors[2];
        for (int i = 0; i < 2; i++) {
            const int exponent = exponent_of(most[i], Code::kLargest);
            if (scale + i < num_scales) exponents[scale + i] = std::int8_t(exponent);
            // Infinity times zero is no number and gets the largest code too, as all of that scale do.
            factors[i] = all(exponent == kNoNumber ? std::numeric_limits<float>::infinity() : std::ldexp(1.0f, -exponent));
        }
        for (int index = vectors.first; index < vectors.end; index += vectors.step) {
            encode_vector<Code>(from + index * kVector, factors[0], factors[1], codes + index / 2 * 2 * kVector + index % 2 * 8);
        }
    }
}

// Exponents as what is added to the bits of bf16 numbers, two by two.
void widen_exponents(const std::int8_t* exponents, int count, bool is_one, bf16* shifts) {
    for (int i = 0; i < count; i++) shifts[i] = bf16(exponents[is_one ? 0 : i] * (1 << kExponentPlace));
}

template <class ScaleOf>
void decode_half(
    const CodeTable& table, const std::uint8_t* codes, int count, const bf16* shifts, const ScaleOf& scale_of, const std::uint8_t* ahead, bf16* out) {
    for (int index = 0; index < count / kVector; index += 2) {
        const std::uint8_t* from = codes + index * kVector;
        __builtin_prefetch(ahead + index * kVector, 0, 2);
        decode_codes(table, from, all_pairs(shifts + 2 * scale_of(index)), all_pairs(shifts + 2 * scale_of(index + 1)), out + index * kVector);
    }
}

}  // namespace

void kv_encode(const KVLayout& layout, const KVPool& pool, std::int64_t place, std::int64_t block, int head) {
    const int count = int(layout.half());
    const bf16* keys = pool.keys(layout, place, head);
    const bf16* values = keys + layout.half();
    const int num_keys = num_key_exponents(layout), num_values = num_value_exponents(layout);
    std::uint8_t* codes = pool.codes + layout.keys_at(block, head);
    std::int8_t* exponents = pool.exponents + (block * layout.num_kv_heads + head) * (num_keys + num_values);
    if (layout.codes == Codes::kInt8) {
        encode_half<WholeCode>(keys, count, num_keys, KeyScales{layout.head_dim}, codes, exponents);
        encode_half<WholeCode>(values, count, num_values, ValueScales{layout.head_dim}, codes + count, exponents + num_keys);
    } else {
        encode_half<FloatCode>(keys, count, 1, OneScale(), codes, exponents);
        encode_half<FloatCode>(values, count, 1, OneScale(), codes + count, exponents + num_keys);
    }
}

const std::uint8_t* codes_of(const KVLayout& layout, const KVPool& pool, int head, const CodedGroup& group) {
    return pool.codes + layout.keys_at(group.block, head) + std::int64_t(group.offset) * layout.head_dim;
}

void GroupReader::open(const KVLayout& layout, const KVPool& pool, int head, const CodedGroup& group, const CodedGroup& next) {
    constexpr int kLine = 64;
    const bool is_one = layout.codes != Codes::kInt8;
    const int num_keys = num_key_exponents(layout), num_exponents = num_keys + num_value_exponents(layout);
    const auto exponents_of = [&](const CodedGroup& of) { return pool.exponents + (of.block * layout.num_kv_heads + head) * num_exponents; };
    for (int i = 0; i < num_exponents; i += kLine) __builtin_prefetch(exponents_of(next) + i, 0, 2);
    __builtin_prefetch(exponents_of(next) + num_exponents - 1, 0, 2);
    const std::int8_t* exponents = exponents_of(group);
    widen_exponents(exponents, layout.head_dim, is_one, key_shifts);
    widen_exponents(exponents + num_keys + (is_one ? 0 : group.offset), kTokensPerGroup, is_one, value_shifts);
    keys = codes_of(layout, pool, head, group);
    values = keys + layout.half();
    table = is_one ? &kFloat : &kWhole;
}

void kv_decode_group(
    const KVLayout& layout, const KVPool& pool, int head, const CodedGroup& group, const CodedGroup& next, bf16* keys, bf16* values) {
    const int count = kTokensPerGroup * layout.head_dim;
    GroupReader reader;
    reader.open(layout, pool, head, group, next);
    const std::uint8_t* ahead = codes_of(layout, pool, head, next);
    decode_half(*reader.table, reader.keys, count, reader.key_shifts, KeyScales{layout.head_dim}, ahead, keys);
    decode_half(*reader.table, reader.values, count, reader.value_shifts, ValueScales{layout.head_dim}, ahead + layout.half(), values);
}

}  // namespace pagemill

using namespace pagemill;

void pagemill_kv_encode(const KVLayout* layout, const KVPool* pool, const std::int64_t* full, std::int64_t num_full) {
    for (std::int64_t i = 0; i < num_full; i++) {
        for (int head = 0; head < layout->num_kv_heads; head++) kv_encode(*layout, *pool, full[i], full[num_full + i], head);
    }
}

void pagemill_kv_move(const KVLayout* layout, const KVPool* pool, const std::int64_t* moves, std::int64_t num_moves) {
    for (std::int64_t i = 0; i < num_moves; i++) kv_move(*layout, *pool, moves[i], moves[num_moves + i]);
}

void pagemill_kv_decode(const KVLayout* layout, const KVPool* pool, const std::int64_t* blocks, std::int64_t num_blocks, bf16* out) {
    for (std::int64_t i = 0; i < num_blocks; i++) {
        for (int head = 0; head < layout->num_kv_heads; head++) {
            bf16* keys = out + layout->keys_at(i, head);
            for (int offset = 0; offset < layout->block_size; offset += kTokensPerGroup) {
                const std::int64_t at = std::int64_t(offset) * layout->head_dim;
                const CodedGroup group{blocks[i], offset};
                kv_decode_group(*layout, *pool, head, group, group, keys + at, keys + layout->half() + at);
            }
        }
    }
}
