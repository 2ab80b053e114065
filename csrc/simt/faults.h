// While kernels run, a bad address or an integer division by zero is an error of the thread that did it.
#pragma once

#include <csignal>

namespace simt {

// Between construction and destruction faults of this process go to `handle`, which must not return. Does nothing under
// AddressSanitizer, whose report says more.
class FaultGuard {
 public:
  explicit FaultGuard(void (*handle)(const char* what));
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction before_[3];
  stack_t stack_before_;
};

}  // namespace simt
