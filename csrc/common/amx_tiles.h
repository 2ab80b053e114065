// Intel AMX: permission to use the tile registers, and the tile shapes of the kernels. Empty in libraries built without
// AMX.
#pragma once

#if defined(__AMX_BF16__) && defined(__x86_64__) && !defined(GRISTMILL_ISA_GENERIC)
#define GRISTMILL_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#endif

namespace gristmill {

#if defined(GRISTMILL_AMX)

inline constexpr int64_t kTile = 16;              // rows of a tile; columns of a float tile
inline constexpr int64_t kTilePairs = 2 * kTile;  // bfloat16 elements of a tile row
inline constexpr int64_t kTileElements = kTile * kTilePairs;

// Whether the kernel has granted this process the tile registers (asked once).
inline bool amx_available() {
  // ARCH_REQ_XCOMP_PERM of asm/prctl.h, and the index of the tile data in the extended processor state.
  constexpr int request_permission = 0x1023, tile_data = 18;
  static const bool available = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return available;
}

// GCC's tile intrinsics do not tell the compiler which memory they read: everything stored before must be in memory
// before tiles are loaded.
inline void tile_fence() { __asm__ volatile("" : : : "memory"); }

// Configures the tile registers of the calling thread for its lifetime. Tiles 0-3 hold sums of (left, right) = (0, 0),
// (0, 1), (1, 0), (1, 1); 4 and 5 are left operands of `rows` rows, 6 and 7 right operands of 16 rows. Rows are 64
// bytes.
class TileSession {
 public:
  explicit TileSession(int64_t rows) {
    Config config;
    for (int t = 0; t < 8; ++t) {
      config.bytes_per_row[t] = 64;
      config.rows[t] = static_cast<uint8_t>(t >= 6 ? kTile : rows);
    }
    // The whole struct must be in memory; the intrinsic names only its first word.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
  };
};

#else

constexpr bool amx_available() { return false; }

#endif

}  // namespace gristmill
