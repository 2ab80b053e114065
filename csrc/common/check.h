// Argument checks of the op launchers. Every refusal is one sentence: the op, the argument, its value, and what would
// be right.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "common/dtypes.h"
#include "common/float8_format.h"
#include "common/target.h"

namespace gristmill {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fnuz:
      return "float8_e4m3fnuz";
    default:
      return "another dtype";
  }
}

inline void check_dim(const Tensor& t, int64_t dim, const char* op, const char* name) {
  STD_TORCH_CHECK(t.dim() == dim, op, ": ", name, " must have ", dim, " dimensions, got ", t.dim());
}

inline void check_size(const Tensor& t, int64_t dim, int64_t size, const char* op, const char* name) {
  STD_TORCH_CHECK(t.size(dim) == size, op, ": ", name, " must have size ", size, " in dimension ", dim, ", got ",
                  t.size(dim));
}

inline void check_dtype(const Tensor& t, ScalarType type, const char* op, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == type, op, ": ", name, " must be ", dtype_name(type), ", got ",
                  dtype_name(t.scalar_type()));
}

// Elements of one row lie side by side. A dimension of size 0 or 1 has no meaningful stride.
inline void check_inner(const Tensor& t, const char* op, const char* name) {
  const int64_t last = t.dim() - 1;
  STD_TORCH_CHECK(last >= 0 && (t.size(last) <= 1 || t.stride(last) == 1), op, ": ", name,
                  " must have stride 1 in its last dimension, got ", last >= 0 ? t.stride(last) : 0);
}

// An index or per-row vector: 1-D, contiguous, of one size (any size when size < 0).
inline void check_vector(const Tensor& t, ScalarType type, int64_t size, const char* op, const char* name) {
  check_dim(t, 1, op, name);
  check_dtype(t, type, op, name);
  if (size >= 0) check_size(t, 0, size, op, name);
  check_inner(t, op, name);
}

template <typename T>
inline const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
inline T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls f with a value of the element type of `type`.
template <typename F>
inline void dispatch_float(ScalarType type, const char* op, const char* name, F&& f) {
  switch (type) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::BFloat16:
      return f(BFloat16{});
    case ScalarType::Half:
      return f(Half{});
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " must be float32, bfloat16 or float16, got ", dtype_name(type));
  }
}

inline bool is_float8(ScalarType type) {
  return type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2 || type == ScalarType::Float8_e4m3fnuz;
}

// As dispatch_float, for the 8-bit floats of a cache.
template <typename F>
inline void dispatch_float8(ScalarType type, F&& f) {
  switch (type) {
    case ScalarType::Float8_e4m3fn:
      return f(Float8E4M3{});
    case ScalarType::Float8_e5m2:
      return f(Float8E5M2{});
    default:
      return f(Float8E4M3Fnuz{});
  }
}

// Offsets of the rows [..., H] of a tensor of any rank, in the order of a contiguous tensor.
// Neighbouring dimensions that step evenly are joined, so that the usual tensor needs one multiplication per row.
class Rows {
 public:
  Rows(const Tensor& t, const char* op, const char* name) {
    check_inner(t, op, name);
    const int64_t dims = t.dim() - 1;
    STD_TORCH_CHECK(dims <= kMaxDims, op, ": ", name, " has ", dims + 1, " dimensions, at most ", kMaxDims + 1,
                    " are supported");
    width_ = t.size(dims);
    for (int64_t d = 0; d < dims; ++d) {
      const int64_t size = t.size(d);
      const int64_t stride = t.stride(d);
      count_ *= size;
      if (size == 1) continue;
      if (dims_ > 0 && stride_[dims_ - 1] == size * stride) {
        size_[dims_ - 1] *= size;
        stride_[dims_ - 1] = stride;
      } else {
        size_[dims_] = size;
        stride_[dims_] = stride;
        ++dims_;
      }
    }
  }

  GRISTMILL_HOST_DEVICE int64_t count() const { return count_; }
  GRISTMILL_HOST_DEVICE int64_t width() const { return width_; }

  // Whether rows lie in at most two dimensions: row r at r / inner() * outer_step() + r % inner() * inner_step(). The
  // heads of q in a fused projection do.
  bool two_steps() const { return dims_ <= 2; }
  int64_t inner() const { return dims_ == 2 ? size_[1] : 1; }
  int64_t outer_step() const { return dims_ == 0 ? 0 : stride_[0]; }
  int64_t inner_step() const { return dims_ == 2 ? stride_[1] : 0; }

  // Whether every row of T begins at a multiple of 16 bytes.
  bool begins_aligned(const Tensor& t, int64_t element_bytes) const {
    bool even = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
    for (int d = 0; d < dims_; ++d) even = even && stride_[d] * element_bytes % 16 == 0;
    return even;
  }

  GRISTMILL_HOST_DEVICE int64_t offset(int64_t row) const {
    if (dims_ == 1) return row * stride_[0];
    int64_t offset = 0;
    for (int d = dims_ - 1; d >= 0; --d) {
      offset += (row % size_[d]) * stride_[d];
      row /= size_[d];
    }
    return offset;
  }

 private:
  static constexpr int64_t kMaxDims = 7;
  int64_t count_ = 1;
  int64_t width_ = 0;
  int dims_ = 0;
  int64_t size_[kMaxDims] = {};
  int64_t stride_[kMaxDims] = {};
};

// Two tensors of one shape, whatever their strides.
inline void check_same_shape(const Tensor& t, const Tensor& like, const char* op, const char* name,
                             const char* like_name) {
  bool same = t.dim() == like.dim();
  for (int64_t d = 0; same && d < t.dim(); ++d) same = t.size(d) == like.size(d);
  STD_TORCH_CHECK(same, op, ": ", name, " must have the shape of ", like_name);
}

}  // namespace gristmill
