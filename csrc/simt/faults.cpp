#include "simt/faults.h"

#include <cstdlib>

namespace simt {

#if defined(__SANITIZE_ADDRESS__)
FaultGuard::FaultGuard(void (*)(const char*)) {}
FaultGuard::~FaultGuard() = default;
#else
namespace {

void (*handler)(const char* what) = nullptr;
alignas(16) char signal_stack[64 * 1024];  // the fault may be that a thread's stack is full

void on_signal(int signal) {
  handler(signal == SIGFPE ? "divided by zero" : "accessed memory that is not there");
  std::abort();
}

}  // namespace

FaultGuard::FaultGuard(void (*handle)(const char*)) {
  handler = handle;
  stack_t stack = {};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof(signal_stack);
  sigaltstack(&stack, &stack_before_);
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;  // the handler never returns, so nothing would unblock the signal
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &before_[i]);
}

FaultGuard::~FaultGuard() {
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before_[i], nullptr);
  sigaltstack(&stack_before_, nullptr);
}
#endif

}  // namespace simt
