// The bfloat16 linear layer on AMX tiles; a library built without AMX never has it available.
#pragma once

#include "gemm/store.h"

namespace gristmill {

#if defined(__AMX_BF16__)
// Whether the kernel has granted this process the tile registers (asked once).
bool amx_available();
void amx_linear(const LinearArguments<BFloat16>& args);
#else
constexpr bool amx_available() { return false; }
inline void amx_linear(const LinearArguments<BFloat16>&) {}
#endif

}  // namespace gristmill
