// The bfloat16 linear layer on AMX tiles; a library built without AMX never has it available.
#pragma once

#include "common/amx_tiles.h"
#include "gemm/store.h"

namespace gristmill {

#if defined(GRISTMILL_AMX)
void amx_linear(const LinearArguments<BFloat16>& args);
#else
inline void amx_linear(const LinearArguments<BFloat16>&) {}
#endif

}  // namespace gristmill
