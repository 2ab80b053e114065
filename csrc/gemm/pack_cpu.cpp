// Packing of a weight on the CPU, done once per layer when a model is loaded.
#include "common/parallel.h"
#include "gemm/gemm.h"
#include "gemm/layout.h"

namespace gristmill {
namespace {

template <typename T>
void pack_panel(T* panel, const T* weight, int64_t columns, int64_t k, int64_t row_stride) {
  constexpr int64_t group = std::is_same_v<T, BFloat16> ? 2 : 1;  // elements along K that lie side by side
  const int64_t padded = padded_k<T>(k);
  for (int64_t c = 0; c < kPanelColumns; ++c) {
    const T* row = weight + c * row_stride;
    for (int64_t i = 0; i < padded; ++i) {
      panel[(i / group * kPanelColumns + c) * group + i % group] = c < columns && i < k ? row[i] : T{};
    }
  }
}

}  // namespace

void pack_weight(const Tensor& out, const Tensor& weight) {
  constexpr const char* op = "pack_weight";
  check_dim(weight, 2, op, "weight");
  check_inner(weight, op, "weight");
  check_dim(out, 1, op, "out");
  check_dtype(out, weight.scalar_type(), op, "out");
  check_inner(out, op, "out");
  const int64_t n = weight.size(0), k = weight.size(1), row_stride = weight.stride(0);
  dispatch_float(weight.scalar_type(), op, "weight", [&](auto tag) {
    using T = decltype(tag);
    check_size(out, 0, packed_size<T>(n, k), op, "out");
    T* panels = mutable_data<T>(out);
    const T* rows = data<T>(weight);
    parallel_units(num_panels(n), k * kPanelColumns, [&](int64_t p) {
      const int64_t first = p * kPanelColumns;
      pack_panel(panels + p * panel_size<T>(k), rows + first * row_stride, std::min(kPanelColumns, n - first), k,
                 row_stride);
    });
  });
}

}  // namespace gristmill
