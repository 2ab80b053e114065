// What a function is compiled for: the CPU alone, or the CPU and a GPU.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define GRISTMILL_HOST_DEVICE __host__ __device__
#else
#define GRISTMILL_HOST_DEVICE
#endif
