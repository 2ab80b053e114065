#include "simt/shared.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

namespace simt {
namespace {

constexpr unsigned char kBorderByte = 0xb5;
constexpr size_t kAlignment = 256;

char* aligned(char* p, size_t misalignment) {
  const auto address = (reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment;
  return reinterpret_cast<char*>(address + misalignment);
}

bool all_border(const char* begin, const char* end) {
  return std::all_of(begin, end, [](char c) { return static_cast<unsigned char>(c) == kBorderByte; });
}

}  // namespace

// Room for the largest launch and for the borders of many arrays.
SharedMemory::SharedMemory() : memory_(2 * kMaxBytes) {}

void SharedMemory::begin_launch(size_t dynamic_bytes, unsigned char poison) {
  ASAN_UNPOISON_MEMORY_REGION(memory_.data(), memory_.size());
  std::memset(memory_.data(), kBorderByte, memory_.size());
  ASAN_POISON_MEMORY_REGION(memory_.data(), memory_.size());
  poison_ = poison;
  arrays_.clear();
  static_bytes_ = 0;
  free_ = memory_.data();
  add(nullptr, dynamic_bytes, 128);
}

void SharedMemory::begin_block() {
  for (const Array& array : arrays_) std::memset(array.data, poison_, array.bytes);
}

void* SharedMemory::array(const void* place, size_t bytes) {
  for (const Array& array : arrays_) {
    if (array.place == place) return array.data;
  }
  static_bytes_ += (bytes + 15) / 16 * 16;
  const char* end = aligned(free_ + kBorder, 16) + bytes + kBorder;
  if (static_bytes_ > kMaxStaticBytes || end > memory_.data() + memory_.size()) return nullptr;
  return add(place, bytes, 16);
}

char* SharedMemory::add(const void* place, size_t bytes, size_t misalignment) {
  char* data = aligned(free_ + kBorder, misalignment);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  std::memset(data, poison_, bytes);
  arrays_.push_back({place, data, bytes});
  free_ = data + bytes;
  return data;
}

bool SharedMemory::contains(const void* address, size_t bytes) const {
  const char* begin = static_cast<const char*>(address);
  return std::any_of(arrays_.begin(), arrays_.end(), [&](const Array& array) {
    return begin >= array.data && begin + bytes <= array.data + array.bytes;
  });
}

bool SharedMemory::borders_intact() const {
#if !defined(__SANITIZE_ADDRESS__)
  for (const Array& array : arrays_) {
    const char* end = array.data + array.bytes;
    if (!all_border(array.data - kBorder, array.data) || !all_border(end, end + kBorder)) return false;
  }
#endif
  return true;
}

}  // namespace simt
