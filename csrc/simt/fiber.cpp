#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define NO_SANITIZER __attribute__((no_sanitize_address))
#else
#define NO_SANITIZER
#endif

// Saves the callee-saved registers on the stack, stores where, and continues from another such place.
extern "C" __attribute__((visibility("hidden"))) void gristmill_simt_switch(void** save, void* load);
asm(R"(
.text
.globl gristmill_simt_switch
.hidden gristmill_simt_switch
.type gristmill_simt_switch,@function
gristmill_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gristmill_simt_switch,.-gristmill_simt_switch
)");

namespace simt {
namespace {

// The stack of the thread that launched, while a fiber runs.
void* launcher = nullptr;
[[maybe_unused]] void* launcher_sanitizer_stack = nullptr;
[[maybe_unused]] const void* launcher_bottom = nullptr;
[[maybe_unused]] size_t launcher_bytes = 0;

NO_SANITIZER void enter() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &launcher_bottom, &launcher_bytes);
#endif
  fiber_main();
  std::abort();
}

}  // namespace

// `stagger` keeps the busy ends of the stacks out of each other's cache lines.
void Fiber::restart(char* stack, size_t stagger) {
  stack_ = stack;
  auto top = reinterpret_cast<void**>(stack + kStackBytes - 64 * (stagger % 32));
  *--top = nullptr;  // where a called function would find its return address
  *--top = reinterpret_cast<void*>(&enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
}

void Fiber::resume() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&launcher_sanitizer_stack, stack_, kStackBytes);
#endif
  gristmill_simt_switch(&launcher, stack_pointer_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(launcher_sanitizer_stack, nullptr, nullptr);
#endif
}

void Fiber::pause([[maybe_unused]] bool ended) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ended ? nullptr : &sanitizer_stack_, launcher_bottom, launcher_bytes);
#endif
  gristmill_simt_switch(&stack_pointer_, launcher);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(sanitizer_stack_, &launcher_bottom, &launcher_bytes);
#endif
}

char* Stacks::operator[](size_t index) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  while (stacks_.size() <= index) {
    void* memory =
        mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("simt: no memory for the stacks of a block's threads");
    mprotect(memory, page, PROT_NONE);
    stacks_.push_back(static_cast<char*>(memory) + page);
  }
  return stacks_[index];
}

void Stacks::abandon() {
#if defined(__SANITIZE_ADDRESS__)
  for (char* stack : stacks_) ASAN_UNPOISON_MEMORY_REGION(stack, kStackBytes);
#endif
}

}  // namespace simt
