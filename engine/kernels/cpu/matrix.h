// A table of numbers that a step works on, allocated once.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace pagemill {

// Rows begin at a cache line; the numbers behind the last column are zero until somebody writes them.
template <class Number>
class Matrix {
public:
    Matrix(std::int64_t num_rows, std::int64_t num_columns)
        : stride_((num_columns + kRounding - 1) / kRounding * kRounding),
          numbers_(new (std::align_val_t(64)) Number[num_rows * stride_]()) {}

    Number* row(std::int64_t index) const { return numbers_.get() + index * stride_; }
    std::int64_t stride() const { return stride_; }

private:
    static constexpr std::int64_t kRounding = 64;  // a panel of outputs

    struct Free {
        void operator()(Number* numbers) const { ::operator delete[](numbers, std::align_val_t(64)); }
    };
    std::int64_t stride_;
    std::unique_ptr<Number[], Free> numbers_;
};

}  // namespace pagemill
