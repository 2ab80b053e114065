// Thread-local memory that grows to the largest request and is then reused, so that a hot op allocates nothing after
// its first call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace gristmill {

class Scratch {
 public:
  // At least `count` elements of T, 64-byte aligned, contents unspecified. Valid until the next call on the same
  // Scratch.
  template <typename T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > capacity_) {
      memory_.reset();
      const size_t grown = (bytes + kAlign - 1) / kAlign * kAlign;
      memory_.reset(static_cast<std::byte*>(::operator new(grown, std::align_val_t(kAlign))));
      capacity_ = grown;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  static constexpr size_t kAlign = 64;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(kAlign)); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t capacity_ = 0;
};

}  // namespace gristmill
