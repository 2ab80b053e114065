// Stacks that are switched by hand: one per GPU thread.
#pragma once

#include <cstddef>
#include <vector>

namespace simt {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr size_t kStackBytes = 256 * 1024;
#else
inline constexpr size_t kStackBytes = 64 * 1024;
#endif

// Runs `entry` on its own stack until it pauses or ends, and continues there when resumed. Kept and used again.
class Fiber {
 public:
  // From the next resume on, `entry` runs from its beginning; what an earlier run left unfinished is forgotten.
  void restart(char* stack, size_t stagger);
  void resume();
  // Called on the fiber's stack: back to whoever resumed it. With `ended`, never to come back.
  void pause(bool ended = false);

 private:
  void* stack_pointer_ = nullptr;
  char* stack_ = nullptr;
  void* sanitizer_stack_ = nullptr;
};

// What fibers run.
void fiber_main();

// Memory for as many stacks as the largest block had threads, each with an unmapped page below it.
class Stacks {
 public:
  char* operator[](size_t index);
  // Forgets what AddressSanitizer knows of frames that will never return.
  void abandon();

 private:
  std::vector<char*> stacks_;
};

}  // namespace simt
