// The shared memory of one block: each array at its exact size between borders, poisoned anew for every block.
#pragma once

#include <cstddef>
#include <vector>

namespace simt {

class SharedMemory {
 public:
  static constexpr size_t kMaxStaticBytes = 48 * 1024;
  static constexpr size_t kMaxBytes = 227 * 1024;

  SharedMemory();

  void begin_launch(size_t dynamic_bytes, unsigned char poison);
  void begin_block();
  // Null when there is no room for it on a GPU.
  void* array(const void* place, size_t bytes);
  void* dynamic() { return arrays_.front().data; }
  bool contains(const void* address, size_t bytes) const;
  // Whether no border was written. AddressSanitizer reports that at once, without being asked.
  bool borders_intact() const;

 private:
  static constexpr size_t kBorder = 256;

  struct Array {
    const void* place;
    char* data;
    size_t bytes;
  };

  char* add(const void* place, size_t bytes, size_t misalignment);

  std::vector<char> memory_;
  char* free_ = nullptr;
  size_t static_bytes_ = 0;
  unsigned char poison_ = 0xff;
  std::vector<Array> arrays_;  // the dynamic one first
};

}  // namespace simt
